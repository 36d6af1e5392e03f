"""Tables inside the pages of this folder, made from archives of rows; `python results/table.py` fills and checks them.

A page has a marker above each table, and `<!-- end -->` below it:

    <!-- rows NAME | FIELDS | COLUMNS | LABELS -->   a line for each value of FIELDS, of rows that have the LABELS
    <!-- study NAME STUDY | COLUMNS | LABELS -->     the study's own table, of its COLUMNS
    <!-- script NAME.py -->                          what `make_table()` of a script of this folder returns
    <!-- claims PAPER -->                            every claim of a paper (claims.py)
    <!-- sentences NAME | NETWORK -->                what the intervals of an archived matrix allow to say
    <!-- source NAME -->                             command, commit, machine and load of an archive

NAME is an archive of rows/. COLUMNS are separated by semicolons. One of rows is a metric with the labels that select
it, such as `auc attack=rmia`; ` = title` names a column otherwise. Means over seeds have Student's 95 % interval; where
rows of one seed differ by client, clients are averaged and there is no interval for one seed.

Measured numbers stand in such tables alone. `find_typed` refuses those that a sentence has, but for settings: sections
called Method, code and links may have numbers.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from secateur.catalogue import find, name_of
from secateur.metrics.estimates import mean
from secateur.metrics.membership import Estimate
from secateur.report.heatmap import build_heatmaps
from secateur.report.matrix_sentences import write_sentences
from secateur.report.summary import estimate
from secateur.runs.archive import Archive, read_archive
from secateur.runs.rows import Row
from secateur.studies.table import format_estimate, unit_of

BLOCK = re.compile(r"<!-- (rows|study|script|claims|sentences|source) ([^>]*?) -->\n.*?<!-- end -->", re.DOTALL)
MADE = re.compile(r"<!-- (?:rows|study|script|claims|sentences|source)\b.*?<!-- end -->", re.DOTALL)
METHOD = re.compile(r"^## Method\n.*?(?=^## |\Z)", re.DOTALL | re.MULTILINE)
EXEMPT = re.compile(r"^```.*?^```$|^(?: {4}|#).*?$|`[^`\n]*`|!?\[[^\]]*\]\([^)]*\)", re.DOTALL | re.MULTILINE)
NAMED = re.compile(r"\b(?:Python|torch|Theorem|Corollary|Section|Eq\.|Eqs\.) [\d.]*\d|\b95 %")
UNITS = r"(?:%|per cent|dB|points?|times|ms|s|seconds|minutes|MB|MiB|GiB|of \d)"
COUNT = r"(?:\d|\btwo|\bthree|\bfour|\bfive|\bsix|\bseven|\beight|\bnine|\bten|\btwelve|\btwenty)"
TYPED = re.compile(
    rf"(?<![\w.])(?<![A-Za-z]-)\d*\.\d+|{COUNT} ?{UNITS}(?!\w)|\btwice\b|\ba (?:third|quarter|fifth|tenth)\b"
)
read = cache(read_archive)


def fill_pages(folder: Path, claims: Mapping[str, str]) -> dict[Path, str]:
    """Return the texts of the pages with their tables made anew.

    Args:
        folder: that of the pages.
        claims: table of every claim, by paper.
    """
    pages = {path: path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.md")) if path.stem != "README"}
    return {path: BLOCK.sub(lambda match: _fill(folder, claims, match), text) for path, text in pages.items()}


def _fill(folder: Path, claims: Mapping[str, str], match: re.Match[str]) -> str:
    kind, text = match[1], match[2]
    name, *parts = (part.strip() for part in text.split("|"))
    if kind == "script":
        table = _run_script(folder / name)
    elif kind == "claims":
        table = claims[name]
    else:
        file, _, study = name.partition(" ")
        archive = read(folder / "rows" / f"{file}.jsonl.xz")
        make = {
            "study": partial(tabulate_study, archive, study),
            "rows": partial(tabulate_rows, archive.rows),
            "sentences": partial(list_sentences, archive.rows),
            "source": partial(describe_source, archive, file),
        }
        table = make[kind](*parts)
    return f"<!-- {kind} {text} -->\n{table}\n<!-- end -->"


def find_typed(text: str) -> list[str]:
    """Return the sentences of a page that have a measured number, which rows should give.

    Example:
        >>> find_typed("DGP has .71 here. Fig. 3 reproduces. The interval of 95 % holds it in `tv=.1`.")
        ['DGP has .71 here.']
    """
    for pattern in (MADE, METHOD, EXEMPT, NAMED):
        text = pattern.sub("", text)
    sentences = re.split(r"(?<=[.:;!?]) +|\n", text)
    return [sentence.strip() for sentence in sentences if TYPED.search(sentence)]


def tabulate_rows(rows: Sequence[Row], fields: str, columns: str, labels: str = "") -> str:
    """Return a table of rows: a line for each value of the fields, a column for each metric and its labels."""
    wanted = dict(text.split("=") for text in labels.split())
    known = [row for row in rows if row.value is not None and row.extra.get("target") is None and has(row, wanted)]
    names = fields.replace(",", " ").split()
    lines: dict[tuple[str, ...], list[Row]] = {}
    for row in known:
        lines.setdefault(tuple(word(row, name) for name in names), []).append(row)
    titles, body = [], []
    for column in columns.split(";"):
        text, _, title = (part.strip() for part in column.partition(" = "))
        metric, *selectors = text.split()
        chosen = dict(selector.split("=") for selector in selectors)
        titles.append(title or text.replace("_", " "))
        body.append([_cell(some, metric, chosen) for some in lines.values()])
    cells = [[*key, *values] for key, values in zip(lines, zip(*body, strict=True), strict=True)]
    return grid([*names, *titles], [line for line in cells if any(line[len(names) :])])


def _cell(rows: Sequence[Row], metric: str, labels: Mapping[str, str]) -> str:
    """Return the mean of a metric over seeds; empty if no row has it."""
    seeds: dict[int, list[Row]] = {}
    for row in rows:
        if row.metric == metric and has(row, labels):
            seeds.setdefault(int(row.seed), []).append(row)
    if any(len(some) > 1 and len({row.extra.get("client") for row in some}) < len(some) for some in seeds.values()):
        raise ValueError(f"{metric} {labels}: several rows of one seed; name more labels")
    value = mean({seed: _average(some) for seed, some in seeds.items()})
    return "" if value is None else format_estimate(value, unit_of(metric))


def _average(rows: Sequence[Row]) -> Estimate:
    if len(rows) == 1:
        return estimate(rows[0])
    value = sum(row.value or 0.0 for row in rows) / len(rows)
    return Estimate(value, value, value)


def has(row: Row, labels: Mapping[str, str]) -> bool:
    """Return True if a row has these labels; a method's name stands for all its settings."""
    return all(text in (word(row, name), name_of(word(row, name))) for name, text in labels.items())


def word(row: Row, name: str) -> str:
    """Return a label of a row as text."""
    value: Any = getattr(row, name) if name in type(row).__dataclass_fields__ else row.extra.get(name)
    return f"{value:g}" if isinstance(value, float) else str(value)


def tabulate_study(archive: Archive, study: str, columns: str, labels: str = "") -> str:
    """Return columns of a study's own table, of the lines that have these labels; `part` is one of them.

    Marks of lines, such as an attacker that a defense did not meet, are always shown.
    """
    wanted = dict(text.split("=") for text in labels.split(";") if text)
    names = [name.strip() for name in columns.split(";")]
    body, marks = [], []
    for lines, _ in find("study", study).make().tabulate_rows(archive).values():
        for line in lines:
            cells: dict[str, Any] = line.labels | line.cells | {"paper": line.paper, "mark": line.mark}
            texts = [_write(name, cells.get(name)) for name in names]
            shown = all((cells | {"part": line.part}).get(name) == text for name, text in wanted.items())
            if shown and texts[0] and any(texts[1:]):
                body.append(texts)
                marks.append(line.mark)
    if absent := [name for place, name in enumerate(names) if not any(texts[place] for texts in body)]:
        raise ValueError(f"{study} has no such columns: {', '.join(absent)}")
    if any(marks) and "mark" not in names and len({*marks}) > 1:
        names, body = [*names, "mark"], [[*texts, mark] for texts, mark in zip(body, marks, strict=True)]
    common = f"\n\nEvery line: {marks[0]}." if "mark" not in names and any(marks) else ""
    return grid([name.replace("_", " ") for name in names], body) + common


def list_sentences(rows: Sequence[Row], network: str) -> str:
    """Return the sentences that the intervals of a matrix allow on one network."""
    maps = [heatmap for heatmap in build_heatmaps(rows) if heatmap.network == network]
    return "\n".join(f"- {text}" for heatmap in maps for text in write_sentences(heatmap))


def describe_source(archive: Archive, file: str) -> str:
    """Return the command, the commit, the machine and the load behind an archive."""
    known = {name: str(archive.provenance.get(name, "")) for name in ("command", "commit", "machine", "load")}
    load = f", load {known['load']}" if known["load"] else ""
    return f"`{known['command']}` at {known['commit']}, {known['machine']}{load} ([rows](rows/{file}.jsonl.xz))."


def _write(column: str, cell: Estimate | str | None) -> str:
    return format_estimate(cell, unit_of(column)) if isinstance(cell, Estimate) else cell or ""


def _run_script(path: Path) -> str:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.make_table())


def grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    rows = [" | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) for row in (head, *body)]
    return "\n".join(f"| {row} |" for row in (rows[0], " | ".join(["---"] * len(head)), *rows[1:]))
