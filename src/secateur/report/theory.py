"""Theorems beside measurements: dgp's Proposition 1 (Fig. 1) and priprune's Theorem 4.1.

dgp: the error of every reconstruction by the distance of the update from the gradient. priprune: NMI and the bound
in both forms, along each varied setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from secateur.evaluation.theory_curves import AXES, ROUNDS, SIZE, THEORY, Axis, LeakageCurve, curves, updates
from secateur.report.audit import View, setting
from secateur.report.plotting import GREY, PALETTE, Panel, Part, alone, cycle, panel, short, thin
from secateur.runs.rows import Row

STUDY = "theory"  # the `study` of rows from studies/dgp/theory.py
MEASURES = ("relative_distance", "error", "bound", "bound_by_sent")
NMI, CHANCE = "nmi_256", "nmi_256_chance"
BOUNDS: dict[str, tuple[Callable[[BoundPoint], float], str]] = {  # each with its mark
    "at least, by Eq. 2": (lambda point: point.bound, "line-ew-open"),
    "at least, by what was sent": (lambda point: point.by_sent, "triangle-up-open"),
}
Values = dict[str, float]


@dataclass(frozen=True)
class BoundPoint:
    """One target under one defense, with the bounds of Proposition 1 on its reconstruction error."""

    defense: str
    target: str
    distance: float  # of the sent update from the gradient, relative to the gradient
    error: float
    bound: float  # Eq. 2
    by_sent: float  # Eq. 2 with the sent update in place of the reconstruction's gradient


def by_distance(rows: Iterable[Row]) -> list[View]:
    """Return one view for each network and data set: a point for every target and defense, and its two bounds."""
    places: dict[str, dict[tuple[str, int, int], Values]] = {}
    for row in rows:
        if row.extra.get("study") == STUDY and row.value is not None:
            place = setting({"model": row.model, "dataset": row.dataset, "run": row.extra.get("run")})
            key = (row.defense or "none", row.seed, row.extra["number"])
            places.setdefault(place, {}).setdefault(key, {})[row.metric] = row.value
    return [
        View(place, [_scatter(place, points)], sentence(points))
        for place, values in places.items()
        if (points := _distance_points(values))
    ]


def _distance_points(measured: dict[tuple[str, int, int], Values]) -> list[BoundPoint]:
    """Return the reconstructed targets with finite values: a gradient of zeros has no relative distance."""
    several = len({seed for _, seed, _ in measured}) > 1
    return [
        BoundPoint(
            defense,
            f"target {number}" + (f", seed {seed}" if several else ""),
            *(values[name] for name in MEASURES),
        )
        for (defense, seed, number), values in measured.items()
        if all(math.isfinite(values.get(name, math.nan)) for name in MEASURES)
    ]


def sentence(points: Sequence[BoundPoint]) -> str:
    """Return the plot in words: the ends, and the number of broken bounds."""
    means = {
        name: (fmean(x.distance for x in group), fmean(x.error for x in group))
        for name, group in _groups(points).items()
    }
    ends = [pick(means, key=lambda name: means[name][0]) for pick in (min, max)]
    texts = [f"{name} (distance {means[name][0]:.3g}, mean error {means[name][1]:.3g})" for name in dict.fromkeys(ends)]
    broken = [sum(x.error < bound(x) for x in points) for bound, _ in BOUNDS.values()]
    return (
        f"From the nearest update to the furthest: {' to '.join(texts)}. "
        f"Nearer to the truth than Proposition 1 allows: {broken[0]} of {len(points)} reconstructions "
        f"by Eq. 2, {broken[1]} by what was sent."
    )


def _groups(points: Iterable[BoundPoint]) -> dict[str, list[BoundPoint]]:
    """Return the points of each defense."""
    groups: dict[str, list[BoundPoint]] = {}
    for point in points:
        groups.setdefault(point.defense, []).append(point)
    return groups


def _scatter(title: str, points: Sequence[BoundPoint]) -> Panel:
    groups = _groups(points)
    traces = [
        _distance_trace(name, group, lambda x: x.error, {"color": cycle(PALETTE, number), "size": 9})
        for number, (name, group) in enumerate(groups.items())
    ]
    for name, (bound, symbol) in BOUNDS.items():
        marker = {"color": GREY, "size": 8, "symbol": symbol, "line": {"width": 2, "color": GREY}}
        traces.append(_distance_trace(name, points, bound, marker))
    return panel(
        title,
        f"{title}: the error of each reconstruction by the distance of the update. {sentence(points)}",
        traces,
        440,
        {"title": "relative distance from the gradient", "zeroline": False, "nticks": 8}
        | alone(x.distance for x in points),
        {"title": "error of the reconstruction (norm)", "rangemode": "tozero", "zeroline": False, "nticks": 8},
    )


def _distance_trace(
    name: str, points: Sequence[BoundPoint], value: Callable[[BoundPoint], float], marker: Part
) -> Part:
    texts = [f"<b>{x.defense}</b>, {x.target}<br>distance {x.distance:.3g}, error {x.error:.3g}" for x in points]
    bounds = [f"<br>at least {x.bound:.3g} by Eq. 2, {x.by_sent:.3g} by what was sent" for x in points]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": short(x.distance for x in points),
        "y": short(value(x) for x in points),
        "marker": marker,
        "cliponaxis": False,
        "text": [first + second for first, second in zip(texts, bounds, strict=True)],
        "hovertemplate": "%{text}<extra></extra>",
    }


def beside_measured(rows: Iterable[Row]) -> list[View]:
    """Return one view for each varied setting: NMI and its chance level, then both forms of the theorem.

    A colour is a base pruning. Empty if no theory was asked for. Curves over two rounds are not drawn.
    """
    rows = list(rows)
    if not any(row.extra.get("study") == THEORY for row in rows):
        return []
    known, views = updates(rows), []
    for axis in AXES:
        groups: dict[str, list[LeakageCurve]] = {}
        for curve in curves(known, axis):
            if axis is not ROUNDS or len(curve.points) > 2:
                groups.setdefault(_place(curve), []).append(curve)
        for place, group in groups.items():
            views.append(View(f"{axis.title}, {place}", _panels(axis, group)))
    return views


def _place(curve: LeakageCurve) -> str:
    """Return the labels that the curves of one view share: all but the base pruning and the attack."""
    labels = {name: value for name, value in curve.labels.items() if name not in ("base", "attack")}
    network = f"{labels.pop('model')} on " if "model" in labels else ""
    rest = [f"{name} {value:g}" for name, value in labels.items() if name != "data"]
    return ", ".join([f"{network}{labels['data']}", *rest])


def _panels(axis: Axis, group: Sequence[LeakageCurve]) -> list[Panel]:
    theory = "rounds" if axis is ROUNDS else "total"
    name = "Corollary 4.2" if axis is ROUNDS else "Theorem 4.1"
    measures = {NMI: "NMI of SGI, 256 levels", f"printed_{theory}": f"{name} as printed, bits"}
    measures |= {f"corrected_{theory}": f"{name} corrected, bits"}
    measures |= {} if axis is ROUNDS else {"corrected_gradient": "of it the gradient's part, bits"}
    return [plot for metric, title in measures.items() if (plot := _panel(axis, group, metric, title)) is not None]


def _panel(axis: Axis, group: Sequence[LeakageCurve], metric: str, title: str) -> Panel | None:
    traces, ends = list[Part](), []
    for number, curve in enumerate(group):
        points = _points(curve, metric)
        if not points:
            continue
        colour, name = cycle(PALETTE, number), str(curve.labels["base"])
        traces.append(_trace(name, points, {"color": colour, "width": 2}))
        ends.append(f"{name} {points[min(points)]:.4g} to {points[max(points)]:.4g}")
        if metric == NMI:
            traces.append(_trace(f"{name}, by chance", _points(curve, CHANCE), thin("dot") | {"color": colour}))
    if not traces:
        return None
    return panel(
        f"{title} by {axis.title}",
        f"{title} by {axis.title}; from the least to the most: {', '.join(ends)}.",
        traces,
        340 + 22 * len(group),
        {"title": axis.title, "zeroline": False, "nticks": 8} | ({"type": "log"} if axis is SIZE else {}),
        {"title": title, "zeroline": False, "nticks": 6},
        legend={"orientation": "h", "y": -0.25, "yanchor": "top"},
    )


def _points(curve: LeakageCurve, metric: str) -> dict[float, float]:
    estimates = {x: curve.at(x, metric) for x in curve.points}
    return {x: estimate.value for x, estimate in estimates.items() if estimate is not None}


def _trace(name: str, points: Mapping[float, float], line: Part) -> Part:
    hover = f"{name}, %{{x}}: %{{y:.4g}}<extra></extra>"
    data = {"name": name, "x": list(points), "y": short(points.values()), "line": line, "hovertemplate": hover}
    return {"type": "scatter", "mode": "lines+markers", "marker": {"size": 5}} | data
