"""What federations give away by the rate of their base pruning (priprune, Figs. 2, 3, A1 and A2)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from secateur.report import federation
from secateur.report.federation_names import brief
from secateur.report.figures import DASHES
from secateur.report.plotting import PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View
from secateur.rows import Row


def by_rate(rows: Sequence[Row]) -> list[View]:
    """One view a network and data set whose base prunings were run at several rates: leakage against the rate."""
    views = []
    for place, own in federation.attacked(rows).items():
        panels = []
        for metric, title in {"nmi_256": "NMI, 256 levels", "psnr": "PSNR"}.items():
            curves: dict[str, dict[float, list[float]]] = {}
            attacks = brief(str(row.attack) for row in own)
            for row in own:
                if row.metric == metric and row.value is not None:
                    parts = [
                        str(row.extra["base_pruning"]).partition(":")[0],
                        row.extra["broadcast"],
                        attacks[str(row.attack)],
                    ]
                    parts += [] if row.defense == "none" else [str(row.defense)]
                    points = curves.setdefault(", ".join(parts), {})
                    points.setdefault(row.sparsity or 0.0, []).append(row.value)
            if any(len(points) > 1 for points in curves.values()):
                panels.append(_by_rate(title, curves))
        if panels:
            views.append(View(place, panels))
    return views


def _by_rate(title: str, curves: Mapping[str, Mapping[float, Sequence[float]]]) -> Panel:
    traces: list[Part] = []
    for number, (name, points) in enumerate(curves.items()):
        means = {rate: sum(values) / len(values) for rate, values in sorted(points.items())}
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 2}
        line = {"x": list(means), "y": short(means.values()), "name": name, "line": style}
        traces.append({"type": "scatter", "mode": "lines+markers", "marker": {"size": 6}} | line)
    told = "; ".join(f"{x['name']} {x['y'][0]:g} at {x['x'][0]:g}, {x['y'][-1]:g} at {x['x'][-1]:g}" for x in traces)
    return panel(
        f"{title} by pruning rate",
        f"{title} by the base pruning's rate, means over attacked updates: {told}.",
        traces,
        360 + 22 * len(traces),
        {"title": "base pruning rate", "zeroline": False, "nticks": 10},
        {"title": title, "zeroline": False, "nticks": 6},
        legend={"orientation": "h", "y": -0.2, "yanchor": "top"},
    )
