"""What federations give away by the rate of their base pruning (priprune, Figs. 2, 3, A1 and A2)."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.report import federation
from secateur.report.federation_names import brief
from secateur.report.figures import DASHES
from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View
from secateur.rows import Row

Curves = dict[tuple[str, str], dict[float, list[float]]]  # by base pruning, and by the rest: values at each rate


def by_rate(rows: Sequence[Row]) -> list[View]:
    """One view a network and data set whose base prunings were run at several rates: leakage against the rate."""
    views = []
    for place, own in federation.attacked(rows).items():
        panels = []
        for metric, title in {"nmi_256": "NMI, 256 levels", "psnr": "PSNR"}.items():
            curves = _curves([row for row in own if row.metric == metric and row.value is not None])
            if any(len(points) > 1 for points in curves.values()):
                panels.append(_panel(title, curves))
        if panels:
            views.append(View(place, panels))
    return views


def _curves(rows: Sequence[Row]) -> Curves:
    curves: Curves = {}
    attacks = brief(str(row.attack) for row in rows)
    for row in rows:
        rest = [
            row.extra["broadcast"],
            attacks[str(row.attack)],
            *([] if row.defense == "none" else [str(row.defense)]),
        ]
        points = curves.setdefault((str(row.extra["base_pruning"]).partition(":")[0], ", ".join(rest)), {})
        points.setdefault(row.sparsity or 0.0, []).append(row.value or 0.0)
    return curves


def _panel(title: str, curves: Curves) -> Panel:
    """A base pruning has one colour; an attack on one kind of broadcast one dash."""
    bases, rests = (list(dict.fromkeys(key[side] for key in curves)) for side in (0, 1))
    traces: list[Part] = []
    for (base, rest), points in curves.items():
        means = {rate: sum(values) / len(values) for rate, values in sorted(points.items())}
        style = {"color": cycle(PALETTE, bases.index(base)), "dash": cycle(DASHES, rests.index(rest)), "width": 2}
        line = {"x": list(means), "y": short(means.values()), "name": f"{base}, {rest}", "line": style}
        traces.append({"type": "scatter", "mode": "lines+markers", "marker": {"size": 6}} | line)
    told = "; ".join(f"{x['name']} {x['y'][0]:g} at {x['x'][0]:g}, {x['y'][-1]:g} at {x['x'][-1]:g}" for x in traces)
    return panel(
        f"{title} by pruning rate",
        f"{title} by the base pruning's rate, means over attacked updates: {told}.",
        traces,
        360 + 24 * len(traces),
        {"title": "base pruning rate", "zeroline": False, "nticks": 10},
        {"title": title, "zeroline": False, "nticks": 6},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )
