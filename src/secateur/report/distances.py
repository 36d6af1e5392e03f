"""Fig. 1 of dgp as a plot: the error of every reconstruction by how far the update was from the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from secateur.report.plotting import GREY, PALETTE, Panel, Part, alone, cycle, panel, short
from secateur.report.sections import View, setting
from secateur.rows import Row

STUDY = "theory"  # what dgp_theory's rows say their study is
MEASURES = ("relative_distance", "error", "bound", "bound_by_sent")
Values = dict[str, float]


@dataclass(frozen=True)
class Point:
    """One target under one defense, with what Proposition 1 says of its reconstruction."""

    defense: str
    target: str
    distance: float  # of what was sent from the gradient, relative to the gradient
    error: float
    bound: float  # Eq. 2
    by_sent: float  # with what was sent in the place of the reconstruction's gradient


BOUNDS: dict[str, tuple[Callable[[Point], float], str]] = {  # each with its mark
    "at least, by Eq. 2": (lambda point: point.bound, "line-ew-open"),
    "at least, by what was sent": (lambda point: point.by_sent, "triangle-up-open"),
}


def by_distance(rows: Iterable[Row]) -> list[View]:
    """One view for each network and data set: a point for every target and defense, and its two bounds."""
    places: dict[str, dict[tuple[str, int, int], Values]] = {}
    for row in rows:
        if row.extra.get("study") == STUDY and row.value is not None:
            place = setting({"model": row.model, "dataset": row.dataset, "run": row.extra.get("run")})
            key = (row.defense or "none", row.seed, row.extra["number"])
            places.setdefault(place, {}).setdefault(key, {})[row.metric] = row.value
    return [
        View(place, [_scatter(place, points)], sentence(points))
        for place, found in places.items()
        if (points := _points(found))
    ]


def sentence(points: Sequence[Point]) -> str:
    """What is seen, for whoever prints the page or cannot see the plot: the ends, and how often a bound is broken."""
    means = {
        name: (fmean(x.distance for x in own), fmean(x.error for x in own)) for name, own in _groups(points).items()
    }
    ends = [pick(means, key=lambda name: means[name][0]) for pick in (min, max)]
    told = [f"{name} (distance {means[name][0]:.3g}, mean error {means[name][1]:.3g})" for name in dict.fromkeys(ends)]
    broken = [sum(x.error < bound(x) for x in points) for bound, _ in BOUNDS.values()]
    return (
        f"From the nearest update to the furthest: {' to '.join(told)}. Nearer to the truth than Proposition 1 allows: "
        f"{broken[0]} of {len(points)} reconstructions by Eq. 2, {broken[1]} by what was sent."
    )


def _points(found: dict[tuple[str, int, int], Values]) -> list[Point]:
    """Those that there is a reconstruction of, at a finite distance: that of a gradient of zeros is none."""
    several = len({seed for _, seed, _ in found}) > 1
    return [
        Point(
            defense,
            f"target {number}" + (f", seed {seed}" if several else ""),
            *(values[name] for name in MEASURES),
        )
        for (defense, seed, number), values in found.items()
        if all(math.isfinite(values.get(name, math.nan)) for name in MEASURES)
    ]


def _groups(points: Iterable[Point]) -> dict[str, list[Point]]:
    groups: dict[str, list[Point]] = {}
    for point in points:
        groups.setdefault(point.defense, []).append(point)
    return groups


def _scatter(title: str, points: Sequence[Point]) -> Panel:
    groups = _groups(points)
    traces = [
        _trace(name, own, lambda x: x.error, {"color": cycle(PALETTE, number), "size": 9})
        for number, (name, own) in enumerate(groups.items())
    ]
    for name, (bound, symbol) in BOUNDS.items():
        marker = {"color": GREY, "size": 8, "symbol": symbol, "line": {"width": 2, "color": GREY}}
        traces.append(_trace(name, points, bound, marker))
    return panel(
        title,
        f"{title}: the error of each reconstruction by the distance of the update. {sentence(points)}",
        traces,
        440,
        {"title": "relative distance from the gradient", "zeroline": False, "nticks": 8}
        | alone(x.distance for x in points),
        {"title": "error of the reconstruction (norm)", "rangemode": "tozero", "zeroline": False, "nticks": 8},
    )


def _trace(name: str, points: Sequence[Point], value: Callable[[Point], float], marker: Part) -> Part:
    told = [f"<b>{x.defense}</b>, {x.target}<br>distance {x.distance:.3g}, error {x.error:.3g}" for x in points]
    bounds = [f"<br>at least {x.bound:.3g} by Eq. 2, {x.by_sent:.3g} by what was sent" for x in points]
    return {
        "type": "scatter",
        "mode": "markers",
        "name": name,
        "x": short(x.distance for x in points),
        "y": short(value(x) for x in points),
        "marker": marker,
        "cliponaxis": False,
        "text": [first + second for first, second in zip(told, bounds, strict=True)],
        "hovertemplate": "%{text}<extra></extra>",
    }
