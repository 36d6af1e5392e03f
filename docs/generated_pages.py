"""Pages that are made from the package: one a method, and the Python reference.

A method's page has the text of its docstring and the sheet of `secateur list NAME`. Its numbers are cells of the
matrix, claims of results/README.md and means over other archives, all from results/rows.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import secateur
from secateur.catalogue import Method, methods, name_of
from secateur.report.heatmap import COLUMNS, Heatmap, build_heatmaps
from secateur.report.method_sheet import describe_method, write_default
from secateur.runs.archive import read_archive
from secateur.runs.rows import Row

ROOT = Path(__file__).parents[1]
KINDS = {  # folder of the pages, and the heading of their list
    "attack": ("attacks", "Membership attacks", "Who was in the training data?"),
    "inversion": ("inversions", "Attacks on updates", "Which pictures does an update hold?"),
    "defense": ("defenses", "Defenses", "Losses, training loops, uploads, clients and models that give away less."),
    "pruner": ("pruners", "Compressors", "Pruners, int8 and distillation."),
    "base-pruning": ("base-prunings", "Base prunings", "Masks of a federation's clients."),
    "submodel": ("submodels", "Channel rules", "The part of the server's model that a client trains."),
}
PAPERS = {
    "samia_ppb": "SAMIA and PPB (USENIX Security 2022)",
    "dgp": "DGP (AAAI 2024)",
    "priprune": "PriPrune (ACM TOMPECS 2024)",
    "mapp_fl": "MaPP-FL (2023)",
}
NO_NUMBERS = "Not measured: no kept row has a number of this method. `secateur list studies` names what can be run."
MEASURES = {"auc": ("AUC", ".3f"), "psnr": ("PSNR, dB", ".1f")}


def make_pages() -> Iterator[tuple[str, str]]:
    """Yield the address below the site's root and the Markdown text of every page."""
    yield "methods/index.md", make_index()
    for kind, (folder, _, _) in KINDS.items():
        for name, method in methods(kind).items():
            yield f"methods/{folder}/{name}.md", make_method(method)
    yield "reference.md", make_reference()


# Methods --------------------------------------------------------------------------------------------------------
def make_index() -> str:
    """Return the list of all methods."""
    parts = [
        "# Methods\nEvery page is made from the method's code and from the rows in `results/rows`. "
        "`secateur list NAME` prints the same sheet."
    ]
    for kind, (folder, title, about) in KINDS.items():
        lines = [f"| [{name}]({folder}/{name}.md) | {_cell(m.summary)} |" for name, m in methods(kind).items()]
        parts.append("\n".join([f"## {title}", about, "", "| name | what it does |", "|---|---|", *lines]))
    return "\n\n".join(parts) + "\n"


def make_method(method: Method) -> str:
    """Return the page of one method."""
    row = {"kind": method.kind} | method.describe()
    facts = describe_method(row)
    text = inspect.getdoc(method.make) or ""
    equations = find_equations(method.make)
    text = re.sub(r"\n\nEquation: `[^`]*`\.", "", text).replace("Acts on: ", "Acts on ")
    source = PAPERS.get(method.paper, "no paper of the four")
    parts = [f"# {method.name}", f"*{KINDS[method.kind][1]}; {source}; `secateur list {method.name}`*", text]
    parts += ["\n".join(["## Equation", "```text", *equations, "```"])] if equations else []
    parts.append(f"## Threat model\n{_sentence(facts['threat'])}")
    parts.append(f"## Parameters\n{_parameters(row['defaults'], facts['meanings'])}")
    parts.append(f"## Cost\n{_sentence(facts['cost'])}")
    heading = "What it does not show" if method.kind in ("attack", "inversion") else "What it does not protect against"
    parts.append(f"## {heading}\n{_sentence(facts['gap'])}")
    parts.append(f"## Strongest attacker known\n{_sentence(facts['strongest'])}")
    measured = [*matrix_numbers(method), *kept_numbers(method), *claims_about(method)]
    parts.append("\n\n".join(["## What we measured", *(measured or [NO_NUMBERS])]))
    return "\n\n".join(parts) + "\n"


def find_equations(make: Any) -> list[str]:
    """Return the equations of a method's docstring, or of the method whose preset it is."""
    classes = inspect.getmro(make)[:-1] if inspect.isclass(make) else (make,)
    texts = (re.findall(r"Equation: `([^`]*)`\.", inspect.getdoc(one) or "") for one in classes)
    return next(filter(None, texts), [])


def _sentence(text: Any) -> str:
    """Return a text with a capital and a full stop; names in code keep their letters."""
    flags = r"--[a-z-]+(?: \d+| [\w.]+=\d+)?|(?:\w+:)?[\w-]+=[\w=:.-]+|\b(?:lira|rmia|sgi|rob|ggl)\b"
    words = re.sub(rf"(?<![`\w])({flags})", r"`\1`", str(text))
    return words[:1].upper() + words[1:] + "."


def _parameters(defaults: Mapping[str, Any], meanings: Mapping[str, str]) -> str:
    """Return the table of parameters."""
    lines = [
        f"| `{name}` | `{_cell(write_default(defaults[name]))}` | {_cell(meaning)} |"
        for name, meaning in meanings.items()
    ]
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *lines]) if lines else "It has none."


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


# Numbers --------------------------------------------------------------------------------------------------------
@cache
def load_matrix() -> tuple[Heatmap, ...]:
    """Return the heat maps of the archived matrix, by network; int8 has an archive of its own."""
    archives = [read_archive(ROOT / "results" / "rows" / f"matrix-{part}.jsonl.xz") for part in ("cifar10", "int8")]
    maps = [heatmap for archive in archives for heatmap in build_heatmaps(archive.rows)]
    return tuple(heatmap for heatmap in maps if heatmap.network == "conv-2")


@cache
def load_table() -> ModuleType:
    """Import results/table.py."""
    spec = importlib.util.spec_from_file_location("results_table", ROOT / "results" / "table.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("results/table.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@cache
def load_lines() -> tuple[Any, ...]:
    """Return the lines of results/README.md that have a measurement."""
    lines = [line for some in load_table().gather_lines().values() for line in some]
    return tuple(line for line in lines if line.ours)


def matrix_numbers(method: Method) -> Iterator[str]:
    """Yield the table of the matrix rows that have the method, or of the cells that an attack decided."""
    attacks = method.kind in ("attack", "inversion")
    lines = []
    for row in (row for heatmap in load_matrix() for row in heatmap.rows):
        alone = re.sub(r"pruning alone \((.*)\)", r"\1", row.name)
        parts = {name_of(part) for part in alone.split("+")}
        cells = [row.cells.get(column.key) for column in COLUMNS]
        if attacks:
            cells = [cell if cell and cell.attack and name_of(cell.attack) == method.name else None for cell in cells]
        if any(cells) if attacks else method.name in parts and method.kind in _kinds_of(method.name):
            shown = [
                f"{cell.text} [{cell.interval}]" if cell and cell.interval else cell.text if cell else ""
                for cell in cells
            ]
            lines.append([f"`{row.name}`", *shown])
    lines = [line for line in lines if any(line[1:])]
    if not lines:
        return
    used = [place for place in range(len(COLUMNS)) if any(line[place + 1] for line in lines)]
    head = ["defense", *(f"{COLUMNS[place].title}, {COLUMNS[place].unit}" for place in used)]
    body = [[line[0], *(line[place + 1] for place in used)] for line in lines]
    table = load_table().grid(head, body)
    decided = "Cells of the matrix that this attack decided" if attacks else "Its rows of the matrix"
    yield f"{decided} (Conv-2 on CIFAR-10, [ground and limits](../../../results/matrix.md)):\n\n{table}"


@cache
def load_kept() -> Mapping[tuple[str, ...], list[Row]]:
    """Return the rows of all archives but the matrix's that have a measure, by archive, setting and measure."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for path in sorted((ROOT / "results" / "rows").glob("*.jsonl.xz")):
        for row in () if path.name.startswith("matrix-") else read_archive(path).rows:
            if row.metric not in MEASURES or row.value is None or row.extra.get("item") is not None:
                continue
            rule = row.extra.get("submodels") or row.extra.get("base_pruning") or row.pruner or "none"
            setting = (path.name, row.model, row.dataset, rule, row.defense or "none", row.attack or "", row.metric)
            groups.setdefault(setting, []).append(row)
    return groups


def kept_numbers(method: Method) -> Iterator[str]:
    """Yield the table of the means over other archives' rows that have the method."""
    place = {"attack": 5, "inversion": 5, "defense": 4}.get(method.kind, 3)
    field = {"submodel": "submodels", "base-pruning": "base_pruning"}.get(method.kind)
    lines: dict[tuple[Any, ...], list[str]] = {}  # by values: some archives have the same runs
    for setting, rows in load_kept().items():
        file, model, data, rule, defense, attack, metric = setting
        kinds = {name for name in ("submodels", "base_pruning") if name in rows[0].extra}
        if method.name not in {name_of(part) for part in setting[place].split("+")}:
            continue
        federated = kinds == {"base_pruning"} and method.kind == "pruner" and method.name != "none"
        if place == 3 and not federated and (kinds != {field} if field else kinds):
            continue
        title, digits = MEASURES[metric]
        values = [row.value for row in rows if row.value is not None]
        mean, seeds = sum(values) / len(values), len({row.seed for row in rows})
        ends = f" ({min(values):{digits}} to {max(values):{digits}})" if len(values) > 1 else ""
        counted = f"{len(values)}, {seeds} seed{'s' if seeds > 1 else ''}"
        where = f"[{model} on {data}](../../../results/rows/{file})"
        cells = [where, f"`{rule}`", f"`{defense}`", f"`{attack}`", title, f"{mean:{digits}}{ends}", counted]
        lines.setdefault((*setting[1:], *values), cells)
    if lines:
        head = ["model, data", "compression", "defense", "attack", "measure", "mean (lowest to highest)", "numbers"]
        table = load_table().grid(head, list(lines.values()))
        yield f"Its rows of other runs, as means over settings, rounds and seeds (`results/rows`):\n\n{table}"


def _kinds_of(name: str) -> list[str]:
    """Return the kind that a row's name means: a defense before a pruner, as the rows are named by defenses."""
    order = ("defense", "pruner", "submodel", "base-pruning")
    return [kind for kind in order if name in methods(kind)][:1]


def claims_about(method: Method) -> Iterator[str]:
    """Yield the table of the papers' claims that name the method, beside our numbers."""
    spelt = re.escape(method.name).replace(r"\-", "[- ]?")
    pattern = re.compile(rf"(?<![\w-]){spelt}(?![\w-])", re.IGNORECASE)
    if method.name in ("none", "local", "random", "mix", "largest", "entropy", "basic"):  # words of plain English
        pattern = re.compile(rf"\b{method.name.capitalize()}\b")
    lines = [line for line in load_lines() if pattern.search(line.claim)]
    if lines:
        table = re.sub(r"\[rows\]\([^)]*\)", "rows kept", load_table().tabulate(lines))
        yield f"Claims of the papers that name it ([all claims](../../../results/README.md)):\n\n{table}"


# The Python reference -------------------------------------------------------------------------------------------
def make_reference() -> str:
    """Return the reference of the public names."""
    parts = ["# Python reference\nThe names of `secateur`. What else may change is said in [stable names](api.md)."]
    for name in secateur.__all__:
        item = getattr(secateur, name)
        parts.append(f"## {name}\n{describe_item(name, item)}")
        if inspect.isclass(item) and not issubclass(item, Exception):
            for part, value in inspect.getmembers(item):
                if not part.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                    parts.append(f"### {name}.{part}\n{describe_item(part, value)}")
    return "\n\n".join(parts) + "\n"


def describe_item(name: str, item: Any) -> str:
    """Return signature and docstring of a function, class or property."""
    code = []
    if callable(item):
        signature = inspect.signature(item)
        arguments = [str(value).replace("'", "") for value in signature.parameters.values()]
        marked = list(_with_marks(signature, arguments))
        returns = (
            ""
            if signature.return_annotation is signature.empty or inspect.isclass(item)
            else (f" -> {str(signature.return_annotation).strip(chr(39))}")
        )
        short = f"{name}({', '.join(marked)}){returns}"
        long = f"{name}(\n" + "".join(f"    {argument},\n" for argument in marked) + f"){returns}"
        code = ["```text", short if len(short) < 100 else long, "```"]
    return "\n".join([*code, render_docstring(inspect.getdoc(item) or "")])


def _with_marks(signature: inspect.Signature, arguments: list[str]) -> Iterator[str]:
    """Yield the arguments, with the star before those that need their names."""
    starred = False
    for parameter, text in zip(signature.parameters.values(), arguments, strict=True):
        if parameter.kind is parameter.VAR_POSITIONAL:
            starred = True
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        yield text


def render_docstring(text: str) -> str:
    """Return a docstring as Markdown: arguments as a list, examples as code."""
    head, *rest = re.split(r"\n\s*\n?(Args|Returns|Raises|Example|Examples):\n", f"\n{text}")
    parts = [head.strip()]
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        lines = inspect.cleandoc(f"\n{body}")
        if title.startswith("Example"):
            parts.append(f"```python\n{lines}\n```")
        else:
            items = re.sub(r"(?m)^(\w+): ", r"- `\1`: ", re.sub(r"\n\s+", " ", lines))
            parts.append(f"**{title}**\n\n{items}")
    return "\n\n".join(part for part in parts if part)
