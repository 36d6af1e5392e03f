"""Every page of the repository: links and anchors lead somewhere, commands parse, Python blocks compile and import."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import typer.main
import yaml

from secateur.catalogue import methods
from secateur.cli.commands import app
from secateur.cli.options import RunCommand, read_settings
from secateur.config import Audit, Recommend, Sweep
from secateur.config.base import PolicyFile
from secateur.report.method_sheet import describe_method

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "results/*.md", ".github/**/*.md")
PAGES = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
GENERATED = ("methods/", "reference.md")  # pages of the site that docs/generated_pages.py makes
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_HERE = {"my_models", "presumed", "secateur.federated.flare"}  # files that a page shows, and what needs FLARE


def read(page):
    return (ROOT / page).read_text(encoding="utf-8")


def prose_of(text):
    """A page without its code."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", text))


@cache
def anchors_of(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", path.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", NAMES)
def test_links_and_anchors_lead_somewhere(page):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose_of(read(page))):
        path, _, anchor = target.partition("#")
        if re.match(r"https?:", target):
            continue
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors_of(file.resolve())):
            broken.append(target)
    assert not broken


@cache
def load(path):
    """A script of the repository as a module."""
    spec = importlib.util.spec_from_file_location(f"page_{Path(path).stem}", ROOT / path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUNNER = load(".ci/readme.py")
SECTIONS = RUNNER.list_sections([*RUNNER.PAGES, *sorted(RUNNER.HISTORY - {"CHANGELOG.md"})])
COMMANDS = sorted(
    {(line, code.page) for section in SECTIONS for code in section if not code.kind for line in code.lines}
)


def test_commands_of_all_pages_parse():
    """Options and fields are checked; files are not read, and nothing runs."""
    root, broken = typer.main.get_command(app), []
    lines = [(line, page) for line, page in COMMANDS if line.startswith("secateur ") and "..." not in line]
    for line, page in lines:
        name, *words = shlex.split(line)[1:]
        try:
            command = root.commands[name]
            context = command.make_context(name, words)
            if isinstance(command, RunCommand):
                values = {parameter.name: context.params.pop(parameter.name) for parameter in command.inputs}
                values.pop("trust", None)
                if not values.get("file") and not values.get("config"):
                    read_settings(command.schema, values)
        except Exception as error:
            broken.append(f"{page}: {line}: {error!r}")
    assert not broken, "\n".join(broken)
    assert len(lines) > 90


def test_every_command_and_python_block_is_run_or_says_why_not():
    """`find_runner` raises for a line without a rule; a rule that no line needs is refused too."""
    codes = [code for section in RUNNER.list_sections(RUNNER.PAGES) for code in section]
    runners = Counter(code.find_runner(line) for code in codes for line in code.lines)
    assert runners[RUNNER.HERE] > 90 and runners["tests/system/test_readme.py"] > 6
    assert {file for file, _ in RUNNER.ELSEWHERE.values()} | set(RUNNER.NOT_RUN.values()) == runners.keys() - {
        RUNNER.HERE
    }
    assert not any("--dry-run" in flags for flags in RUNNER.QUICK.values())  # only a line that says so itself is a plan
    for file, words in RUNNER.ELSEWHERE.values():
        assert words in read(file), file
    with pytest.raises(SystemExit, match="no rule for the line: curl"):
        RUNNER.Code("README.md", "", "curl example.org").find_runner("curl example.org")


def test_scripts_and_targets_that_pages_name_are_there_with_their_options():
    targets = re.findall(r"^([\w./-]+):", read("Makefile"), re.MULTILINE)
    for line, page in COMMANDS:
        program, *words = shlex.split(line)
        if program == "make":
            assert words[0] in targets, (page, line)
        elif program == "python" and words[0].endswith(".py") and page != "docs/tutorial.md":
            text = read(words[0])
            assert all(option in text for option in words if option.startswith("--")), (page, line)


def test_run_files_and_policies_of_the_pages_are_valid():
    schemas = {
        "docs/howto/gate.md": PolicyFile,
        "docs/howto/runs.md": Audit,
        "docs/sweep.md": Sweep,
        "docs/howto/recommend.md": Recommend,
    }
    blocks = [code for section in SECTIONS for code in section if code.kind == "yaml"]
    for code in blocks:
        schemas[code.page].model_validate(yaml.safe_load(code.text))
    assert {code.page for code in blocks} == schemas.keys()


def test_every_method_has_what_its_page_shows():
    """Equation, threat model, cost, gap, strongest attacker, and a meaning for every parameter."""
    pages = load("docs/generated_pages.py")
    for kind in pages.KINDS:
        for name, entry in methods(kind).items():
            facts = describe_method({"kind": kind} | entry.describe())
            assert len(pages.find_equations(entry.make)) >= 1, name
            assert all(facts[part] for part in ("threat", "cost", "gap", "strongest")), name
            assert all(facts["meanings"].values()), name


@pytest.mark.parametrize("page", [name for name in NAMES if "```python" in read(name)])
def test_python_blocks_compile_and_their_imports_exist(page):
    for kind, block in FENCE.findall(read(page)):
        if kind != "python":
            continue
        for node in ast.walk(ast.parse(block.replace(", ...]", "]"))):
            if isinstance(node, ast.Import):
                assert all(importlib.util.find_spec(name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module not in NOT_HERE:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), node.module


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs_and_compile(notebook):
    cells = json.loads(notebook.read_text())["cells"]
    for cell in cells:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")
            assert not cell["outputs"] and cell["execution_count"] is None
    assert cells[0]["source"][0].startswith("# ") and len(cells) > 5


def test_the_site_shows_every_page():
    def targets(nav):
        for entry in nav:
            (target,) = entry.values()
            yield from targets(target) if isinstance(target, list) else [target]

    listed = list(targets(yaml.safe_load(read("mkdocs.yml"))["nav"]))
    pages = {place for place in load("docs/site.py").list_sources().values() if place.endswith(".md")}
    assert pages == {target for target in listed if not target.startswith(GENERATED)}
    assert len(listed) == len(set(listed))


def test_links_of_the_site_lead_between_its_pages():
    module = load("docs/site.py")
    places = module.list_sources()
    moved = module.move_links("[a](docs/howto/gate.md#the-answer) [b](src/x.py) `[c](d.md)`", "README.md", places)
    assert moved == "[a](howto/gate.md#the-answer) b `[c](d.md)`"
    moved = module.move_links("[r](../../results/README.md)", "docs/howto/audit.md", places)
    assert moved == "[r](../results/index.md)"
    assert module.space_lists("as follows:\n- a\n- b\n") == "as follows:\n\n- a\n- b\n"
    assert module.fence_code("text\n\n    code\n\nmore\n") == "text\n\n```\ncode\n```\n\nmore\n"
