"""Plots of an audit: ROC curves, members beside non-members (samia_ppb, Figs. 1 and 4), accuracy against leakage."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from secateur.report.measures import shown
from secateur.report.plotting import GREY, MEMBERS, OTHERS, PALETTE, Panel, Part, alone, cycle, panel, short, thin
from secateur.report.sources import Record
from secateur.report.summary import SummaryLine, front, full_title
from secateur.report.verdict import GUESSING

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "pentagon", "hexagram")
VISIBLE = 6  # curves drawn at first: the strongest attacks
SIDES = (("members", "members", MEMBERS), ("nonmembers", "non-members", OTHERS))


@dataclass(frozen=True)
class StyledCurve:
    """One attack's ROC curve and its style."""

    name: str
    auc: float
    record: Record
    style: int  # the same attack looks the same on every plot


def roc(title: str, curves: Sequence[StyledCurve]) -> Panel:
    """Plot ROC curves on logarithmic axes, which show the low false positive rates that an attacker can afford."""
    ranked = sorted(curves, key=lambda curve: -curve.auc)
    least = min((x for curve in ranked for x in curve.record.content["fpr"] if x > 0), default=0.1)
    decades = max(1, math.ceil(-math.log10(least) - 1e-9))
    traces = [_stair(curve, 10.0**-decades, rank < VISIBLE) for rank, curve in enumerate(ranked)]
    ends = [10.0**-decades, 1]
    guessing = {"x": ends, "y": ends, "name": "guessing · 0.500", "line": thin("dash"), "hoverinfo": "skip"}
    traces.append({"type": "scatter", "mode": "lines"} | guessing)
    ticks = [10.0**-k for k in range(decades, -1, -1)]
    percents = [f"{100 * rate:g} %" for rate in ticks]
    axis = {"type": "log", "range": [-decades, 0.02], "tickvals": ticks, "ticktext": percents}
    spoken = ", ".join(f"{curve.name} {curve.auc:.3f}" for curve in ranked)
    return panel(
        title,
        f"ROC curves on logarithmic axes, {title}. AUC: {spoken}.",
        traces,
        460,
        {"title": "false positive rate"} | axis,
        {"title": "true positive rate"} | axis,
        legend={"title": {"text": "attack · AUC", "font": {"size": 13}}},
    )


def _stair(curve: StyledCurve, floor: float, visible: bool) -> Part:
    """Return a curve that rises at thresholds only: between two of them an attacker has the lower rate."""
    fpr, tpr = (short(max(x, floor) for x in curve.record.content[side]) for side in ("fpr", "tpr"))
    points = list(dict(zip(fpr, tpr, strict=True)).items())  # of each FPR the last TPR, the highest
    rises = [p for before, p in pairwise(points) if p[1] > before[1]]
    corners = [points[0], *rises, points[-1]]
    style = {"color": cycle(PALETTE, curve.style), "dash": cycle(DASHES, curve.style // len(PALETTE))}
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in corners],
        "y": [y for _, y in corners],
        "name": f"{curve.name} · {curve.auc:.3f}",
        "line": {"shape": "hv", "width": 2} | style,
        "visible": True if visible else "legendonly",
        "hovertemplate": f"{curve.name}: %{{y:.3p}} of members<br>at %{{x:.3p}} false alarms<extra></extra>",
    }


def histogram(title: str, record: Record, top: float) -> Panel:
    """Plot the shares of members and non-members by confidence or sensitivity, their means as lines (Fig. 1)."""
    content = record.content
    edges, inside, outside = content["edges"], content["member_mean"], content["nonmember_mean"]
    traces = [
        {
            "type": "bar",
            "x": short((a + b) / 2 for a, b in pairwise(edges)),
            "y": short(content[side]),
            "width": edges[1] - edges[0],
            "name": name,
            "marker": {"color": colour, "opacity": 0.55, "line": {"width": 0}},
            "hovertemplate": f"%{{y:.1%}} of {name} near %{{x:.3g}}<extra></extra>",
        }
        for side, name, colour in SIDES
    ]
    means = f"means {inside:.3f} and {outside:.3f}, gap {inside - outside:+.3f}"
    return panel(
        f"{title}: {means}",
        f"Histogram of the {record.quantity} of members and non-members, {title}: {means}.",
        traces,
        280,
        {"title": f"{record.quantity} of the true class", "range": [0, top], "zeroline": False},
        {"title": "share", "tickformat": ".0%", "rangemode": "tozero", "nticks": 6},
        barmode="overlay",
        showlegend=False,
        shapes=[_upright(inside, MEMBERS), _upright(outside, OTHERS)],
    )


def _upright(mean: float, colour: str) -> Part:
    """Return a vertical dashed line at a mean."""
    line = {"color": colour, "width": 2, "dash": "dash"}
    return {"type": "line", "x0": mean, "x1": mean, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def classes(title: str, record: Record, top: float) -> Panel:
    """Plot the mean of each class over members, wide bars, and over non-members, narrow bars in front (Fig. 4)."""
    traces = [
        {
            "type": "bar",
            "x0": 0,
            "dx": 1,
            "y": [None if mean is None else float(f"{mean:.4g}") for mean in record.content[side]],
            "width": 0.86 if side == "members" else 0.43,
            "name": name,
            "marker": {"color": colour, "opacity": 0.6 if side == "members" else 1, "line": {"width": 0}},
            "hovertemplate": f"class %{{x}}: %{{y:.3f}} ({name})<extra></extra>",
        }
        for side, name, colour in SIDES
    ]
    pairs = zip(record.content["members"], record.content["nonmembers"], strict=True)
    gaps = {label: a - b for label, (a, b) in enumerate(pairs) if a is not None and b is not None}
    widest = max(gaps, key=lambda label: abs(gaps[label]), default=None)
    widest_gap = f"widest gap {gaps[widest]:+.3f}, class {widest}" if widest is not None else "no class has both"
    return panel(
        f"{title}: {widest_gap}",
        f"Mean {record.quantity} by class of members and non-members, {title}: {widest_gap}.",
        traces,
        260,
        {"title": "class", "nticks": 12, "tickformat": "d"},
        {"title": str(record.quantity), "range": [0, 1.04 * top], "nticks": 6},
        barmode="overlay",
        showlegend=False,
    )


def tradeoff(title: str, best: Sequence[SummaryLine]) -> Panel:
    """Plot each model's accuracy against the AUC of the strongest attack, with the Pareto front as a stair.

    Colours are defenses, shapes are pruners.
    """
    points = [line for line in best if line.value("test_accuracy") is not None]
    pruners = list(dict.fromkeys(line.labels["pruner"] for line in points if line.pruned))
    shapes = {name: cycle(SYMBOLS, number) for number, name in enumerate(pruners)}
    kinds: dict[str, list[SummaryLine]] = {}
    for line in points:
        kinds.setdefault(line.labels["defense"] if line.pruned else "original", []).append(line)
    traces = [_front(points)]
    for number, (name, models) in enumerate(kinds.items()):
        symbols = [shapes.get(line.labels["pruner"], "star") for line in models]
        traces.append(_points(name, models, {"color": cycle(PALETTE, number), "size": 11, "symbol": symbols}))
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


def front_sentence(best: Sequence[SummaryLine]) -> str:
    """Return the front in words, for readers who print the page or cannot see the plot."""
    models = "; ".join(
        f"{full_title(line.labels)}: AUC {shown(line.cells['auc'], 'auc', False)} "
        f"at {shown(line.cells['test_accuracy'], 'test_accuracy', False)}"
        for line in _edge(best)
    )
    return f"On the front, from least to most accurate: {models}." if models else "No accuracy was measured."


def _edge(best: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the front of the pruned models, or of all models if none was pruned."""
    return front([line for line in best if line.pruned] or best)


def _front(points: Sequence[SummaryLine]) -> Part:
    """Return the Pareto front as a stair."""
    edge = _edge(points)
    line = {"shape": "vh", "width": 2, "color": GREY}  # an accuracy in between leaks as much as the next better model
    corners = {"x": _values(edge, "test_accuracy"), "y": _values(edge, "auc")}
    return {"type": "scatter", "mode": "lines", "name": "Pareto front", "line": line, "hoverinfo": "skip"} | corners


def _points(name: str, points: Sequence[SummaryLine], marker: Part) -> Part:
    """Return the models of one defense as points with the intervals of their AUC."""
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
        "text": [_hover_text(line) for line in points],
        "hovertemplate": "%{text}<extra></extra>",
    }


def _hover_text(line: SummaryLine) -> str:
    """Return the hover text of a model."""
    auc, accuracy = (shown(line.cells[name], name) for name in ("auc", "test_accuracy"))
    return f"<b>{full_title(line.labels)}</b><br>AUC {auc} under {line.labels['attack']}<br>test accuracy {accuracy}"


def _legend_entry(name: str, shape: str) -> Part:
    """Return a point that is only in the legend."""
    group = {"legendgroup": "pruner", "legendgrouptitle": {"text": "pruner"}}
    marker = {"symbol": shape, "color": GREY, "size": 9}
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "name": name, "marker": marker} | group


def _values(points: Sequence[SummaryLine], metric: str) -> list[float]:
    return short(line.value(metric) or 0.0 for line in points)
