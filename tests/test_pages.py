"""Every page of the repository: links and anchors lead somewhere, commands parse, Python blocks compile and import."""

import ast
import importlib
import importlib.util
import json
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer.main
import yaml

from secateur.cli.commands import app
from secateur.cli.options import RunCommand, read_settings

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "docs/**/*.md", "results/*.md", ".github/**/*.md")
PAGES = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
GENERATED = ("methods/", "reference.md")  # pages of the site that docs/generated_pages.py makes
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MENTION = re.compile(r"secateur [\w-]+( --[\w-]+)?")  # of a command or an option
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


def lines_of(page):
    """The lines of code that begin with secateur: in fences, indented, and in spans that have arguments."""
    text = read(page)
    fenced = [line for kind, block in FENCE.findall(text) if not kind for line in block.splitlines()]
    indented = re.findall(r"^ {4}(secateur .*)$", FENCE.sub("", text), re.MULTILINE)
    spans = [span for span in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)) if not MENTION.fullmatch(span)]
    lines = [line for line in (*fenced, *indented, *spans) if line.startswith("secateur ")]
    return [line for line in lines if "..." not in line and "DIR" not in line]


COMMANDS = sorted({(line, page) for page in NAMES if page != "CHANGELOG.md" for line in lines_of(page)})


def test_commands_of_all_pages_parse():
    """Options and fields are checked; files are not read, and nothing runs."""
    root, broken = typer.main.get_command(app), []
    for line, page in COMMANDS:
        name, *words = shlex.split(line, comments=True)[1:]
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
    assert len(COMMANDS) > 60


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


@cache
def load_site():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_shows_every_page():
    def targets(nav):
        for entry in nav:
            (target,) = entry.values()
            yield from targets(target) if isinstance(target, list) else [target]

    listed = list(targets(yaml.safe_load(read("mkdocs.yml"))["nav"]))
    pages = {place for place in load_site().list_sources().values() if place.endswith(".md")}
    assert pages == {target for target in listed if not target.startswith(GENERATED)}
    assert len(listed) == len(set(listed))


def test_links_of_the_site_lead_between_its_pages():
    module = load_site()
    places = module.list_sources()
    moved = module.move_links("[a](docs/howto/gate.md#the-answer) [b](src/x.py) `[c](d.md)`", "README.md", places)
    assert moved == "[a](howto/gate.md#the-answer) b `[c](d.md)`"
    moved = module.move_links("[r](../../results/README.md)", "docs/howto/audit.md", places)
    assert moved == "[r](../results/index.md)"
    assert module.space_lists("as follows:\n- a\n- b\n") == "as follows:\n\n- a\n- b\n"
    assert module.fence_code("text\n\n    code\n\nmore\n") == "text\n\n```\ncode\n```\n\nmore\n"
