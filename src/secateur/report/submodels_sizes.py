"""Whether clients with less data are exposed more: every client's advantage against its data size (mapp_fl Fig. 1a)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.submodels import Party
from secateur.report.tradeoff import SYMBOLS

BESIDE = 0.05  # decades of the axis beyond its first and last tick
Point = tuple[int, float]  # data size and advantage


def by_size(lines: Sequence[Party], curves: Mapping[str, str], **layout: object) -> Panel:
    """A point a client and seed; colours as on the plane, whose curves these are, by the federations' names."""
    clients = [line for line in lines if line.client is not None]
    traces: list[Part] = []
    for number, rule in enumerate(dict.fromkeys(curves.values())):
        points = sorted(point for line in clients if curves.get(line.rule) == rule for point in _points(line))
        mark = {"size": 7, "color": cycle(PALETTE, number), "symbol": cycle(SYMBOLS, number // len(PALETTE))}
        own = {"x": [size for size, _ in points], "y": short(advantage for _, advantage in points), "marker": mark}
        shown = f"{rule}: %{{x}} examples, advantage %{{y:.1%}}<extra></extra>"
        traces.append({"type": "scatter", "mode": "markers", "name": rule, "hovertemplate": shown} | own)
    ticks = _ticks([size for line in clients for size, _ in _points(line)])
    ends = [math.log10(ticks[0]) - BESIDE, math.log10(ticks[-1]) + BESIDE]
    log = {"type": "log", "range": ends, "tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}
    return panel(
        "Every client: advantage against data size",
        "The advantage on every client by how many examples it holds; r in the table above tells how they go together.",
        traces,
        xaxis={"title": "examples of the client"} | log,
        yaxis={"title": f"advantage of {lines[0].attack}", "tickformat": ".0%", "zerolinecolor": GREY, "nticks": 8},
        **layout,  # type: ignore[arg-type]
    )


def _points(line: Party) -> list[Point]:
    rows = line.rows.get("advantage", ())
    return [(row.extra["data_size"], row.value) for row in rows if row.value is not None]


def _ticks(sizes: Sequence[int]) -> list[int]:
    """1, 2, 5, 10, ... as far as the sizes go, those beside them included.

    Example:
        >>> _ticks([16, 120])
        [10, 20, 50, 100, 200]
    """
    low, high = math.floor(math.log10(max(1, min(sizes)))), math.ceil(math.log10(max(sizes)))
    all_ticks = [digit * 10**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    under = [tick for tick in all_ticks if tick <= min(sizes)]
    over = next((tick for tick in all_ticks if tick >= max(sizes)), all_ticks[-1])
    return [tick for tick in all_ticks if (under or [1])[-1] <= tick <= over]
