"""Theorems beside measurements: dgp's Proposition 1 (Fig. 1) and priprune's Theorem 4.1.

dgp: the error of every reconstruction by the distance of the update from the gradient. priprune: NMI and the bound
in both forms, along each varied setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from secateur.evaluation.theory_curves import AXES, ROUNDS, SIZE, THEORY, Axis, LeakageCurve, curves, updates
from secateur.report import plotting
from secateur.report.plotting import GREY, PALETTE, Panel, Part, View, cycle
from secateur.report.summary import group_by, name_setting, read_labels, select_rows
from secateur.runs.rows import Row

STUDY = "theory"  # the `study` of rows from studies/dgp/theory.py
MEASURES = ("relative_distance", "error", "bound", "bound_by_sent")
NMI, CHANCE = "nmi_256", "nmi_256_chance"
BOUNDS: dict[str, tuple[Callable[[BoundPoint], float], str]] = {  # each with its mark
    "bound by Eq. 2": (lambda point: point.bound, "line-ew-open"),
    "bound by the sent update": (lambda point: point.by_sent, "triangle-up-open"),
}


@dataclass(frozen=True)
class BoundPoint:
    """One target under one defense, with the bounds of Proposition 1 on its reconstruction error."""

    defense: str
    target: str
    distance: float  # of the sent update from the gradient, relative to the gradient
    error: float
    bound: float  # Eq. 2
    by_sent: float  # Eq. 2 with the sent update in place of the reconstruction's gradient


def draw_distances(rows: Iterable[Row]) -> list[View]:
    """Return one view for each network and data set: a point for every target and defense, and its two bounds."""
    settings = group_by(select_rows(rows, study=STUDY), lambda row: name_setting(read_labels(row)))
    return [
        View(setting, [_draw_scatter(setting, points)], describe_distances(points))
        for setting, same in settings.items()
        if (points := _list_points(same))
    ]


def _list_points(rows: Sequence[Row]) -> list[BoundPoint]:
    """Return the reconstructed targets with finite values: a gradient of zeros has no relative distance."""
    several = len({row.seed for row in rows}) > 1
    points = []
    targets = group_by(rows, lambda row: (row.defense or "none", row.seed, row.extra["number"]))
    for (defense, seed, number), same in targets.items():
        measured = {row.metric: row.value for row in same if row.value is not None}
        values = [measured.get(name, math.nan) for name in MEASURES]
        if all(map(math.isfinite, values)):
            points.append(BoundPoint(defense, f"target {number}" + (f", seed {seed}" if several else ""), *values))
    return points


def describe_distances(points: Sequence[BoundPoint]) -> str:
    """Return the plot in words: the ends, and the number of broken bounds."""
    means = {
        name: (fmean(x.distance for x in group), fmean(x.error for x in group))
        for name, group in group_by(points, lambda point: point.defense).items()
    }
    ends = [pick(means, key=lambda name: means[name][0]) for pick in (min, max)]
    texts = [f"{name} (distance {means[name][0]:.3g}, mean error {means[name][1]:.3g})" for name in dict.fromkeys(ends)]
    broken = [sum(x.error < bound(x) for x in points) for bound, _ in BOUNDS.values()]
    return (
        f"From the nearest update to the furthest: {' to '.join(texts)}. "
        f"Nearer to the truth than Proposition 1 allows: {broken[0]} of {len(points)} reconstructions "
        f"by Eq. 2, {broken[1]} by the sent update."
    )


def _draw_scatter(title: str, points: Sequence[BoundPoint]) -> Panel:
    groups = group_by(points, lambda point: point.defense)
    traces = [
        _draw_marks(name, group, lambda x: x.error, {"color": cycle(PALETTE, number), "size": 9})
        for number, (name, group) in enumerate(groups.items())
    ]
    for name, (bound, symbol) in BOUNDS.items():
        marker = {"color": GREY, "size": 8, "symbol": symbol, "line": {"width": 2, "color": GREY}}
        traces.append(_draw_marks(name, points, bound, marker))
    alt = f"{title}: the error of each reconstruction by the distance of the update. {describe_distances(points)}"
    x_axis = plotting.number_axis("relative distance from the gradient") | plotting.fit_single(
        x.distance for x in points
    )
    y_axis = plotting.number_axis("error of the reconstruction (norm)", rangemode="tozero")
    return plotting.draw_panel(title, alt, traces, 440, x_axis, y_axis)


def _draw_marks(name: str, points: Sequence[BoundPoint], read: Callable[[BoundPoint], float], marker: Part) -> Part:
    texts = [
        f"<b>{x.defense}</b>, {x.target}<br>distance {x.distance:.3g}, error {x.error:.3g}"
        f"<br>at least {x.bound:.3g} by Eq. 2, {x.by_sent:.3g} by the sent update"
        for x in points
    ]
    return plotting.draw_points(name, [(x.distance, read(x)) for x in points], marker, texts, cliponaxis=False)


def draw_theory(rows: Iterable[Row]) -> list[View]:
    """Return one view for each varied setting: NMI and its chance level, then both forms of the theorem.

    A colour is a base pruning. Empty if no theory was asked for. Curves over two rounds are not drawn.
    """
    rows = list(rows)
    if not any(row.extra.get("study") == THEORY for row in rows):
        return []
    known, views = updates(rows), []
    for axis in AXES:
        drawn = [curve for curve in curves(known, axis) if axis is not ROUNDS or len(curve.points) > 2]
        for setting, group in group_by(drawn, _name_shared).items():
            views.append(View(f"{axis.title}, {setting}", _draw_panels(axis, group)))
    return views


def _name_shared(curve: LeakageCurve) -> str:
    """Return the labels that the curves of one view share: all but the base pruning and the attack."""
    labels = {name: value for name, value in curve.labels.items() if name not in ("base", "attack")}
    network = f"{labels.pop('model')} on " if "model" in labels else ""
    rest = [f"{name} {value:g}" for name, value in labels.items() if name != "data"]
    return ", ".join([f"{network}{labels['data']}", *rest])


def _draw_panels(axis: Axis, group: Sequence[LeakageCurve]) -> list[Panel]:
    theory, name = ("rounds", "Corollary 4.2") if axis is ROUNDS else ("total", "Theorem 4.1")
    measures = {
        NMI: "NMI of SGI, 256 levels",
        f"printed_{theory}": f"{name} as printed, bits",
        f"corrected_{theory}": f"{name} corrected, bits",
    }
    measures |= {} if axis is ROUNDS else {"corrected_gradient": "of it the gradient's part, bits"}
    drawn = (_draw_measure(axis, group, metric, title) for metric, title in measures.items())
    return [panel for panel in drawn if panel is not None]


def _draw_measure(axis: Axis, group: Sequence[LeakageCurve], metric: str, title: str) -> Panel | None:
    traces, ends = list[Part](), []
    for number, curve in enumerate(group):
        points = _read_points(curve, metric)
        if not points:
            continue
        colour, name = cycle(PALETTE, number), str(curve.labels["base"])
        traces.append(_draw_line(name, points, {"color": colour, "width": 2}))
        ends.append(f"{name} {points[min(points)]:.4g} to {points[max(points)]:.4g}")
        if metric == NMI:
            guide = plotting.style_guide("dot") | {"color": colour}
            traces.append(_draw_line(f"{name}, by chance", _read_points(curve, CHANCE), guide))
    if not traces:
        return None
    alt = f"{title} by {axis.title}; from the least to the most: {', '.join(ends)}."
    x_axis = plotting.number_axis(axis.title) | ({"type": "log"} if axis is SIZE else {})
    y_axis = plotting.number_axis(title, 6)
    return plotting.draw_panel(
        f"{title} by {axis.title}", alt, traces, 340 + 22 * len(group), x_axis, y_axis, legend=plotting.place_legend()
    )


def _draw_line(name: str, points: dict[float, float], line: Part) -> Part:
    more = {"mode": "lines+markers", "marker": {"size": 5}}
    return plotting.draw_curve(name, points, line, "%{y:.4g} at %{x}", **more)


def _read_points(curve: LeakageCurve, metric: str) -> dict[float, float]:
    estimates = {x: curve.average_at(x, metric) for x in curve.points}
    return {x: estimate.value for x, estimate in estimates.items() if estimate is not None}
