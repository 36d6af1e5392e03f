"""Theorem 4.1 of priprune beside measured leakage: NMI, and the bound in both forms, along what varied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short, thin
from secateur.report.sections import View
from secateur.rows import Row
from secateur.studies.priprune_curves import AXES, ROUNDS, SIZE, THEORY, Axis, Curve, curves, updates

NMI, CHANCE = "nmi_256", "nmi_256_chance"


def beside_measured(rows: Iterable[Row]) -> list[View]:
    """One view for each thing that varied: NMI and its chance level, then both forms of the theorem; a colour a base.

    Empty where no theory was asked for. Two rounds are no course, and are not drawn.
    """
    rows = list(rows)
    if not any(row.extra.get("study") == THEORY for row in rows):
        return []
    known, views = updates(rows), []
    for axis in AXES:
        groups: dict[str, list[Curve]] = {}
        for curve in curves(known, axis):
            if axis is not ROUNDS or len(curve.points) > 2:
                groups.setdefault(_place(curve), []).append(curve)
        for place, own in groups.items():
            views.append(View(f"{axis.title}, {place}", _panels(axis, own)))
    return views


def _panels(axis: Axis, own: Sequence[Curve]) -> list[Panel]:
    theory = "rounds" if axis is ROUNDS else "total"
    name = "Corollary 4.2" if axis is ROUNDS else "Theorem 4.1"
    measures = {NMI: "NMI of SGI, 256 levels", f"printed_{theory}": f"{name} as printed, bits"}
    measures |= {f"corrected_{theory}": f"{name} corrected, bits"}
    measures |= {} if axis is ROUNDS else {"corrected_gradient": "of it the gradient's part, bits"}
    return [made for metric, title in measures.items() if (made := _panel(axis, own, metric, title)) is not None]


def _panel(axis: Axis, own: Sequence[Curve], metric: str, title: str) -> Panel | None:
    traces, told = list[Part](), []
    for number, curve in enumerate(own):
        points = _points(curve, metric)
        if not points:
            continue
        colour, name = cycle(PALETTE, number), str(curve.labels["base"])
        traces.append(_trace(name, points, {"color": colour, "width": 2}))
        told.append(f"{name} {points[min(points)]:.4g} to {points[max(points)]:.4g}")
        if metric == NMI:
            traces.append(_trace(f"{name}, by chance", _points(curve, CHANCE), thin("dot") | {"color": colour}))
    if not traces:
        return None
    return panel(
        f"{title} by {axis.title}",
        f"{title} by {axis.title}; from the least to the most: {', '.join(told)}.",
        traces,
        340 + 22 * len(own),
        {"title": axis.title, "zeroline": False, "nticks": 8} | ({"type": "log"} if axis is SIZE else {}),
        {"title": title, "zeroline": False, "nticks": 6},
        legend={"orientation": "h", "y": -0.25, "yanchor": "top"},
    )


def _points(curve: Curve, metric: str) -> dict[float, float]:
    found = {x: curve.at(x, metric) for x in curve.points}
    return {x: estimate.value for x, estimate in found.items() if estimate is not None}


def _trace(name: str, points: Mapping[float, float], line: Part) -> Part:
    hover = f"{name}, %{{x}}: %{{y:.4g}}<extra></extra>"
    own = {"name": name, "x": list(points), "y": short(points.values()), "line": line, "hovertemplate": hover}
    return {"type": "scatter", "mode": "lines+markers", "marker": {"size": 5}} | own


def _place(curve: Curve) -> str:
    """What the curves of one view have in common: all but the base pruning."""
    labels = {name: value for name, value in curve.labels.items() if name not in ("base", "attack")}
    network = f"{labels.pop('model')} on " if "model" in labels else ""
    rest = [f"{name} {value:g}" for name, value in labels.items() if name != "data"]
    return ", ".join([f"{network}{labels['data']}", *rest])
