"""Accuracy against leakage: which ways of pruning are worth choosing."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.report.measures import shown
from secateur.report.plotting import GREY, PALETTE, Panel, Part, alone, cycle, panel, short, thin
from secateur.report.summary import Line, front, full_title
from secateur.report.verdict import GUESSING

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "hexagram")


def tradeoff(title: str, best: Sequence[Line]) -> Panel:
    """Each model's accuracy against the AUC of the strongest attack on it, with the Pareto front as a stair.

    Colours are defenses, shapes are pruners.
    """
    points = [line for line in best if line.value("test_accuracy") is not None]
    pruners = list(dict.fromkeys(line.labels["pruner"] for line in points if line.pruned))
    shapes = {name: cycle(SYMBOLS, number) for number, name in enumerate(pruners)}
    kinds: dict[str, list[Line]] = {}
    for line in points:
        kinds.setdefault(line.labels["defense"] if line.pruned else "original", []).append(line)
    traces = [_front(points)]
    for number, (name, own) in enumerate(kinds.items()):
        symbols = [shapes.get(line.labels["pruner"], "star") for line in own]
        traces.append(_points(name, own, {"color": cycle(PALETTE, number), "size": 11, "symbol": symbols}))
    if len(shapes) > 1:
        traces += [_legend_entry(name, shape) for name, shape in shapes.items()]
    return panel(
        title,
        f"{title}: test accuracy against AUC. {front_sentence(best)}",
        traces,
        460,
        {"title": "test accuracy", "tickformat": ".0%", "zeroline": False, "nticks": 8}
        | alone(_values(points, "test_accuracy"), most=1.005),
        {"title": "AUC of the strongest attack", "zeroline": False, "nticks": 8},
        shapes=[
            {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": GUESSING, "y1": GUESSING, "line": thin("dot")}
        ],
    )


def front_sentence(best: Sequence[Line]) -> str:
    """The front in words, for whoever prints the page or cannot see the plot."""
    told = "; ".join(
        f"{full_title(line.labels)}: AUC {shown(line.cells['auc'], 'auc', False)} "
        f"at {shown(line.cells['test_accuracy'], 'test_accuracy', False)}"
        for line in _edge(best)
    )
    return f"On the front, from least to most accurate: {told}." if told else "No accuracy was measured."


def _edge(best: Sequence[Line]) -> list[Line]:
    """The front of the pruned models, or of all where nothing was pruned."""
    return front([line for line in best if line.pruned] or best)


def _front(points: Sequence[Line]) -> Part:
    edge = _edge(points)
    line = {"shape": "vh", "width": 2, "color": GREY}  # an accuracy in between costs what the next better model leaks
    place = {"x": _values(edge, "test_accuracy"), "y": _values(edge, "auc")}
    return {"type": "scatter", "mode": "lines", "name": "Pareto front", "line": line, "hoverinfo": "skip"} | place


def _points(name: str, points: Sequence[Line], marker: Part) -> Part:
    ends = [(cell.value or 0, cell.low, cell.high) for cell in (line.cells["auc"] for line in points)]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": _values(points, "test_accuracy"),
        "y": _values(points, "auc"),
        "name": name,
        "legendgroup": "defense",
        "legendgrouptitle": {"text": "defense"},
        "marker": marker,
        "error_y": {
            "array": short(0 if high is None else high - value for value, _, high in ends),
            "arrayminus": short(0 if low is None else value - low for value, low, _ in ends),
            "color": "rgba(123, 134, 129, 0.55)",
            "thickness": 1,
            "width": 0,
        },
        "text": [_told(line) for line in points],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _legend_entry(name: str, shape: str) -> Part:
    """A point that is only in the legend."""
    group = {"legendgroup": "pruner", "legendgrouptitle": {"text": "pruner"}}
    marker = {"symbol": shape, "color": GREY, "size": 9}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": marker} | group


def _values(points: Sequence[Line], metric: str) -> list[float]:
    return short(line.value(metric) or 0.0 for line in points)


def _told(line: Line) -> str:
    auc, accuracy = (shown(line.cells[name], name) for name in ("auc", "test_accuracy"))
    return f"<b>{full_title(line.labels)}</b><br>AUC {auc} under {line.labels['attack']}<br>test accuracy {accuracy}"
