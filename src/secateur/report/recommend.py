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
    PSNR,
    RECOGNISABLE,
    SPENT,
    TPR,
    Assessment,
)
from secateur.metrics.membership import Estimate
from secateur.report import plotting, table
from secateur.report.plotting import View
from secateur.report.summary import Labels, SummaryLine, estimate, group_by, name_compression
from secateur.report.table import Column, ReportTable, TableCell
from secateur.runs.rows import Row

RUNGS = ("short fine-tuning", "all of the fine-tuning", "shadow models")
SHOWN = (DROP, AUC, TPR, RECOGNISABLE, PSNR, BYTES, LATENCY)
LEAKS = (AUC, PSNR)  # the first that was measured is drawn
TITLES = NAMES | {BYTES: "bytes, share", LATENCY: "latency, share"}
BRIEF = {DROP: "accuracy\ndrop", AUC: "AUC", TPR: "TPR at\n1% FPR", RECOGNISABLE: "recog-\nnisable", PSNR: "PSNR"}
BRIEF |= {BYTES: "bytes", LATENCY: "latency"}


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
    """Name a recipe without its schedule; those of updates and federations have a title."""
    return labels["title"] if "title" in labels else f"{name_compression(labels)}, {labels['defense']}"


def build_tables(rows: Sequence[Row], figures: Sequence[Labels]) -> dict[str, ReportTable]:
    """Return the tables of recipes, of both halves, of importance and of seconds; only those that have lines."""
    lines, shown = read_recipes(rows), next((x for x in figures if x["kind"] == "recipe"), None)
    if not lines:
        return {}
    front = set() if shown is None else set(shown["front"])
    chosen = None if shown is None else shown["recipe"]
    schedule = [
        Column("epochs", lambda line: str(line.labels["epochs"]), number=True),
        Column("learning rate", lambda line: f"{line.labels['learning_rate']:g}", number=True),
    ]
    named = [
        Column("recipe", lambda line: name_recipe(line.labels)),
        *(schedule if "epochs" in lines[0].labels else []),
        *(Column(TITLES[name], partial(_build_measure, name), number=True) for name in _list_measured(lines)),
    ]
    rungs = list_rungs(figures)
    columns = [
        *named,
        Column("reached", lambda line: rungs[line.labels["rung"]] if line.labels["rung"] >= 0 else "could not be made"),
        Column("front", lambda line: "recommended" if line.labels["recipe"] == chosen else _mark(line, front)),
    ]
    leak = _find_leak(lines)
    ranked = sorted(lines, key=lambda line: (-line.labels["rung"], assess(line).value(leak)))
    tables = {
        "recipes": table.build_table(
            "Recipes of the search", ranked, columns, id="recipes", wide=True, is_bold=lambda line: _is(line, chosen)
        )
    }
    if len(compared := read_recipes(rows, COMPARED)) > 1:  # beside the recommended one
        whose = Column("whose", _name_owner)
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


def list_rungs(figures: Sequence[Labels]) -> Sequence[str]:
    """Return the names of a search's rungs."""
    return next((figure["rungs"] for figure in figures if figure["kind"] == "recipe" and "rungs" in figure), RUNGS)


def _list_measured(lines: Sequence[SummaryLine]) -> list[str]:
    """Return the measures that some recipe has."""
    known = {name for line in lines for name in assess(line).measures}
    return [name for name in SHOWN if name in known]


def _find_leak(lines: Sequence[SummaryLine]) -> str:
    """Return the measure of leakage by which recipes are drawn and sorted."""
    return next((name for name in LEAKS if name in _list_measured(lines)), AUC)


def _name_owner(line: SummaryLine) -> str:
    """Return whose a compared recipe is."""
    if line.labels["recipe"] < 0:
        return "yours"
    return "the best by value" if line.labels.get("rule") == "value" else "recommended"


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
    items, leak = [assess(line) for line in lines], _find_leak(lines)
    items = [item for item in items if DROP in item.measures and leak in item.measures]
    if not items:
        return []
    traces = []
    for rung, name in enumerate(list_rungs(figures)):
        same = [item for item in items if item.rung == rung]
        if same:
            points = [(item.value(DROP), item.value(leak)) for item in same]
            bars: dict[str, Any] = {"error_y": plotting.draw_intervals(item.measures[leak] for item in same)}
            bars |= {"error_x": plotting.draw_intervals(item.measures[DROP] for item in same)}
            marker = plotting.style_marker(rung, 9)
            traces.append(plotting.draw_points(name, points, marker, [item.title for item in same], **bars))
    if shown is not None and (best := next((item for item in items if item.number == shown["recipe"]), None)):
        ring = {"symbol": "circle-open", "size": 17, "color": plotting.GREY, "line": {"width": 2}}
        at = [(best.value(DROP), best.value(leak))]
        traces.append(plotting.draw_points("recommended", at, ring, [best.title]))
    alt = f"{len(items)} recipes by accuracy drop and {NAMES[leak]}"
    panel = plotting.draw_panel(
        "Leakage against the loss of accuracy",
        alt,
        traces,
        420,
        plotting.number_axis(NAMES[DROP]),
        plotting.number_axis(f"{NAMES[leak]} of the strongest attack"),
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
    """Print the recipes that met the strongest attackers, by the rows that chose, and the answer."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    finalists = [line for line in read_recipes(rows) if line.labels["rung"] == len(RUNGS) - 1]
    schedule = Column("schedule", lambda line: f"{line.labels['epochs']} epochs\nat {line.labels['learning_rate']:.2g}")
    columns = [
        Column("recipe", lambda line: name_recipe(line.labels).replace(", ", ",\n")),
        *([schedule] if all("epochs" in line.labels for line in finalists) else []),
        *(Column(BRIEF[name], partial(_build_measure, name), number=True) for name in _list_measured(finalists)),
    ]
    leak = _find_leak(finalists)
    ranked = sorted(finalists, key=lambda line: assess(line).value(leak))
    console.print(table.to_rich(table.build_table("", ranked, columns), pad_edge=False, padding=(0, 1, 0, 0)))
    for sentence in sentences:
        console.print(sentence)
