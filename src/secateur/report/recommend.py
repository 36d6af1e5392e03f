"""Recommendations: the recipes of a search, their front, and the effect of every setting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from secateur.evaluation.selection import (
    AUC,
    BYTES,
    COMPARED,
    DROP,
    IMPORTANCE,
    LATENCY,
    NAMES,
    PREFIX,
    SPENT,
    TPR,
    Assessment,
    select_front,
)
from secateur.metrics.membership import Estimate
from secateur.report import plotting, table
from secateur.report.plotting import View
from secateur.report.summary import Labels, SummaryLine, estimate, group_by, name_compression
from secateur.report.table import Column, ReportTable, TableCell
from secateur.runs.rows import Row

RUNGS = ("short fine-tuning", "all of the fine-tuning", "shadow models")
SHOWN = (DROP, AUC, TPR, BYTES, LATENCY)
TITLES = NAMES | {BYTES: "bytes, share", LATENCY: "latency, share"}
BRIEF = {DROP: "accuracy\ndrop", AUC: "AUC", TPR: "TPR at\n1% FPR", BYTES: "bytes", LATENCY: "latency"}


def read_recipes(rows: Iterable[Row], prefix: str = PREFIX) -> list[SummaryLine]:
    """Return one line for each recipe of a search, or of a comparison; the prefix is that of its measures."""
    searched = [row for row in rows if row.metric.startswith(prefix)]
    lines = []
    for same in group_by(searched, lambda row: (row.extra.get("run"), row.extra["recipe"])).values():
        labels = {name: getattr(same[0], name) for name in ("model", "dataset", "pruner", "sparsity", "defense")}
        lines.append(SummaryLine(labels | same[0].extra, {}, same))
    return lines


def assess(line: SummaryLine) -> Assessment:
    """Return the measures of a recipe's line."""
    measures = {
        row.metric.removeprefix(PREFIX).removeprefix(COMPARED): estimate(row)
        for row in line.rows
        if row.value is not None
    }
    return Assessment(line.labels["recipe"], name_recipe(line.labels), line.labels["rung"], measures)


def name_recipe(labels: Labels) -> str:
    """Name a recipe without its schedule."""
    return f"{name_compression(labels)}, {labels['defense']}"


def build_tables(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, ReportTable]:
    """Return the tables of recipes, of both halves, of importance and of seconds; only those that have lines."""
    lines, shown = read_recipes(rows), next((x for x in figures if x["kind"] == "recipe"), None)
    if not lines:
        return {}
    front = {item.number for item in select_front([assess(line) for line in lines if line.labels["rung"] == 2])}
    chosen = None if shown is None else shown["recipe"]
    named = [
        Column("recipe", lambda line: name_recipe(line.labels)),
        Column("epochs", lambda line: str(line.labels["epochs"]), number=True),
        Column("learning rate", lambda line: f"{line.labels['learning_rate']:g}", number=True),
        *(Column(TITLES[name], partial(_build_measure, name), number=True) for name in SHOWN),
    ]
    columns = [
        *named,
        Column("attacked after", lambda line: _name_rung(line.labels["rung"])),
        Column("front", lambda line: "recommended" if line.labels["recipe"] == chosen else _mark(line, front)),
    ]
    ranked = sorted(lines, key=lambda line: (-line.labels["rung"], assess(line).value(AUC)))
    tables = {
        "recipes": table.build_table(
            "Recipes of the search", ranked, columns, id="recipes", wide=True, is_bold=lambda line: _is(line, chosen)
        )
    }
    if compared := read_recipes(rows, COMPARED):
        whose = Column("whose", lambda line: "recommended" if line.labels["recipe"] >= 0 else "yours")
        tables["compared"] = table.build_table("Beside yours", compared, [*named, whose], id="compared", wide=True)
    shares = [row for row in rows if row.metric == IMPORTANCE]
    if shares:
        tables["importance"] = _build_importance(shares)
    spent = [row for row in rows if row.metric == SPENT and row.value is not None]
    if spent:
        seconds = [
            Column("work", lambda row: str(row.extra["work"])),
            Column("times", lambda row: str(row.extra["stages"]), number=True),
            Column("seconds", lambda row: TableCell(f"{row.value:.1f}", (), row.value, True), number=True),
        ]
        tables["spent"] = table.build_table("Seconds by kind of work", spent, seconds, id="spent")
    return tables


def _is(line: SummaryLine, number: int | None) -> bool:
    return bool(line.labels["recipe"] == number)


def _name_rung(rung: int) -> str:
    return RUNGS[rung] if rung >= 0 else "could not be made"


def _mark(line: SummaryLine, front: set[int]) -> str:
    return "on the front" if line.labels["recipe"] in front else "-"


def _build_measure(name: str, line: SummaryLine) -> TableCell:
    """Return the cell of a measure of a recipe."""
    value = assess(line).measures.get(name)
    under = next(
        (
            row.extra["under"]
            for row in line.rows
            if row.metric in (PREFIX + name, COMPARED + name) and "under" in row.extra
        ),
        "",
    )
    return _write_cell(value, under)


def _write_cell(value: Estimate | None, *small: str) -> TableCell:
    if value is None:
        return TableCell("-", (), None, measured=True)
    ends = () if value.low == value.high else (f"[{value.low:.3f}, {value.high:.3f}]",)
    return TableCell(f"{value.value:.3f}", (*ends, *filter(None, small)), value.value, measured=True)


def _build_importance(rows: Sequence[Row]) -> ReportTable:
    """Return one line a setting, one column an objective."""
    settings = group_by(rows, lambda row: str(row.extra["setting"]))
    objectives = list(dict.fromkeys(str(row.extra["of"]) for row in rows))

    def build(objective: str, same: Sequence[Row]) -> TableCell:
        row = next((row for row in same if row.extra["of"] == objective), None)
        return _write_cell(None if row is None else estimate(row))

    columns = [
        Column("setting", lambda same: str(same[0].extra["setting"])),
        *(Column(TITLES[name], partial(build, name), number=True) for name in objectives),
    ]
    return table.build_table("Settings by their effect", list(settings.values()), columns, id="importance")


def draw_front(rows: Sequence[Row], figures: Sequence[Labels]) -> list[View]:
    """Return the plot of leakage against the loss of accuracy, a point a recipe."""
    lines, shown = read_recipes(rows), next((x for x in figures if x["kind"] == "recipe"), None)
    items = [assess(line) for line in lines]
    items = [item for item in items if DROP in item.measures and AUC in item.measures]
    if not items:
        return []
    traces = []
    for rung, name in enumerate(RUNGS):
        same = [item for item in items if item.rung == rung]
        if same:
            points = [(item.value(DROP), item.value(AUC)) for item in same]
            bars: dict[str, Any] = {"error_y": plotting.draw_intervals(item.measures[AUC] for item in same)}
            bars |= {"error_x": plotting.draw_intervals(item.measures[DROP] for item in same)}
            marker = plotting.style_marker(rung, 9)
            traces.append(plotting.draw_points(name, points, marker, [item.title for item in same], **bars))
    if shown is not None and (best := next((item for item in items if item.number == shown["recipe"]), None)):
        ring = {"symbol": "circle-open", "size": 17, "color": plotting.GREY, "line": {"width": 2}}
        at = [(best.value(DROP), best.value(AUC))]
        traces.append(plotting.draw_points("recommended", at, ring, [best.title]))
    alt = f"{len(items)} recipes by accuracy drop and AUC"
    panel = plotting.draw_panel(
        "Leakage against the loss of accuracy",
        alt,
        traces,
        420,
        plotting.number_axis(NAMES[DROP]),
        plotting.number_axis("AUC of the strongest attack"),
        legend=plotting.place_legend(),
    )
    return [View("recipes", [panel])]


def build_page(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the template's values about a search."""
    return {
        "recommendations": [figure for figure in figures if figure["kind"] == "recipe"],
        "tables": build_tables(rows, figures),
        "views": {"front": draw_front(rows, figures)},
    }


def print_recommendation(rows: Sequence[Row], sentences: Sequence[str]) -> None:
    """Print the recipes that shadow models attacked, by the rows that chose, and the answer."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    finalists = [line for line in read_recipes(rows) if line.labels["rung"] == len(RUNGS) - 1]
    columns = [
        Column("recipe", lambda line: name_recipe(line.labels).replace(", ", ",\n")),
        Column("schedule", lambda line: f"{line.labels['epochs']} epochs\nat {line.labels['learning_rate']:.2g}"),
        *(Column(heading, partial(_build_measure, name), number=True) for name, heading in BRIEF.items()),
    ]
    ranked = sorted(finalists, key=lambda line: assess(line).value(AUC))
    console.print(table.to_rich(table.build_table("", ranked, columns), pad_edge=False, padding=(0, 1, 0, 0)))
    for sentence in sentences:
        console.print(sentence)
