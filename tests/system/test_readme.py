"""Pages that are whole: the files that they show are written, their lines run in order, outputs are compared."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from secateur.catalogue import methods
from secateur.cli import main
from secateur.runs.archive import read_archive
from secateur.runs.folder import load_rows

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"[±+\[(-]*(\d[\d,]*\.?\d*)[%\]),.;]*")
SECTIONS = ["Equation", "Threat model", "Parameters", "Cost", "Strongest attacker known", "What we measured"]
KINDS = ("attack", "inversion", "defense", "pruner", "base-pruning", "submodel")
NO_NUMBERS = "Not measured: no kept row has a number of this method."
UNMEASURED = 17  # pages of methods that say so; a new method brings its rows
NEAR = 0.3  # share by which a number may differ on another machine: sums of floats have no fixed order


@pytest.fixture(scope="module")
def site():
    """The run of docs/site.py; without the tool that builds the site, of the pages alone."""
    flags = [] if importlib.util.find_spec("zensical") else ["--pages"]
    command = [sys.executable, ROOT / "docs" / "site.py", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def is_same(shown, printed):
    """True if two words are the same, or numbers that are near each other."""
    one, other = NUMBER.fullmatch(shown), NUMBER.fullmatch(printed)
    if one is None or other is None:
        return shown.rstrip(",.:;") == printed.rstrip(",.:;")  # a page may end its quotation earlier
    a, b = (float(match[1].replace(",", "")) for match in (one, other))
    return abs(a - b) <= NEAR * max(abs(a), abs(b))


def is_printed(words, output):
    """True if the words stand in the output, in their order and side by side."""
    places = range(len(output) - len(words) + 1)
    return any(all(map(is_same, words, output[place : place + len(words)])) for place in places)


def execute(line, capfd):
    """Run a line of a page, and return the words that it printed; its remark may name the exit code."""
    command, _, remark = line.partition(" #")
    words = shlex.split(command)
    expected = int(found[1]) if (found := re.search(r"exit code (\d+)", remark)) else 0
    if words[0] == "secateur":
        code = main(words[1:])
    else:
        code = subprocess.run([sys.executable, *words[1:]], check=False).returncode
    printed = capfd.readouterr()
    assert code == expected, printed.err
    return printed.out.split()


def test_the_tutorial_prints_what_it_shows(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    blocks = FENCE.findall((ROOT / "docs" / "tutorial.md").read_text())
    compared = 0
    for (kind, text), (following, shown) in pairwise([*blocks, ("", "")]):
        if kind == "python":
            Path(text.partition("\n")[0].removeprefix("# ")).write_text(text)
        if kind or text.startswith("make"):
            continue
        (line,) = text.splitlines()
        output = execute(line, capfd)
        if following == "text":
            for part in shown.split("...\n"):
                assert is_printed(part.split(), output), f"{line} does not print: {part}"
                compared += 1
    assert compared >= 9 and Path("runs/second/report.html").is_file()


def test_numbers_of_outputs_may_differ_a_little_and_words_may_not():
    output = ["AUC", "0.593", "±0.025", "6.5%", "LEAKS."]
    assert is_printed(["0.6", "±0.024"], output) and not is_printed(["0.4", "±0.024"], output)
    assert is_printed(["LEAKS"], output) and not is_printed(["LEAKS", "STRONGLY."], output)


def test_the_own_model_of_the_pages_is_trained_and_audited(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "howto" / "own-model.md").read_text()
    section = page.split("## From training to the page\n")[1].split("\n## ")[0]
    module, program = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in re.findall(r"^secateur .*", section, re.MULTILINE)]
    (tmp_path / module.partition("\n")[0].removeprefix("# ")).write_text(module)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_models", raising=False)  # the tutorial has another one
    names = {}
    exec(program, names)
    assert (tmp_path / "report.html").is_file() and len(commands) == 3
    for command in commands:
        assert main(command[1:]) == 0, capsys.readouterr().err
    (measured,) = [row.value for row in load_rows(Path("runs/program")) if (row.metric, row.attack) == ("auc", "conf")]
    assert measured == pytest.approx(names["report"].value("auc", "conf"), abs=1e-3)
    assert main(["audit", "own.yaml", "--trust", "--dry-run"]) == 0


def test_the_site_is_built_without_a_warning_and_without_the_network(site):
    pytest.importorskip("zensical")
    assert site.returncode == 0, site.stdout + site.stderr
    pages = list((ROOT / "site").rglob("*.html"))
    loaded = re.compile(
        r'<(?:script|img|iframe)[^>]*\bsrc="https?:|<link[^>]*rel="(?:stylesheet|preconnect)"[^>]*https?:'
    )
    assert len(pages) > 100 and not [page for page in pages if loaded.search(page.read_text())]


def test_a_page_of_a_method_has_all_its_sections_and_its_numbers_are_those_of_the_rows(site):
    assert site.returncode == 0, site.stdout + site.stderr
    written = ROOT / "build" / "pages"
    pages = {str(path.relative_to(written)): path.read_text() for path in written.glob("methods/*/*.md")}
    assert len(pages) == sum(len(methods(kind)) for kind in KINDS)
    for place, text in pages.items():
        sections = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
        titles = [title for title in sections if not title.startswith("What it does not")]
        assert titles == SECTIONS and len(sections) == len(SECTIONS) + 1, place
        assert all(body.strip() for body in sections.values()), place
        assert not any(body.strip() == "None." for title, body in sections.items() if title != "Cost"), place
    matrix = read_archive(ROOT / "results" / "rows" / "matrix-cifar10.jsonl.xz").rows
    by_references: dict[str, list[float]] = {}
    for row in matrix:
        labels = (row.metric, row.model, row.extra.get("row"), row.extra.get("column"))
        if labels == ("matrix_cell", "conv-2", "dgp", "final-rmia"):
            by_references.setdefault(str(row.extra.get("references")), []).append(row.value)
    assert [len(values) for values in by_references.values()] == [3, 3]  # seeds, with and without the defense
    strongest = max(sum(values) / len(values) for values in by_references.values())
    assert f"| `dgp` | {strongest:.3f} [" in pages["methods/defenses/dgp.md"]
    rows = read_archive(ROOT / "results" / "rows" / "samia-fig1-location.jsonl.xz").rows
    values = [row.value for row in rows if (row.metric, row.pruner) == ("auc", "l1-unstructured")]
    mean = f"{sum(values) / len(values):.3f} ({min(values):.3f} to {max(values):.3f}) | {len(values)}, 10 seeds"
    assert mean in pages["methods/attacks/conf.md"] and mean in pages["methods/pruners/l1-unstructured.md"]
    unmeasured = [place for place, text in pages.items() if NO_NUMBERS in text]
    assert all("|" not in pages[place].split("## What we measured")[1] for place in unmeasured)
    assert 0 < len(unmeasured) <= UNMEASURED
