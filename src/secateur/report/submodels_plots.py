"""Plots of federations over sub-models: accuracy against exposure, advantage by data size, rounds, and trained cells.

Advantage by data size is mapp_fl Fig. 1a, the cells that each group of clients trains mapp_fl Fig. 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.report import plotting
from secateur.report.plotting import GREY, PALETTE, Panel, Part, View
from secateur.report.submodels import name_federation, read_federation, summarise_federations, summarise_parties
from secateur.report.summary import Labels, SummaryLine, average_along, group_by, select_front, select_rows
from secateur.runs.rows import Row

GROUPS = 16  # different parts with a plot each: as many as MaPP-FL has groups at most
CELLS = 1 << 18  # cells of a layer that is drawn
NAMED = 12  # clients of a part that are named
FRAME = {"zeroline": False, "showgrid": False, "showline": True, "mirror": True, "linecolor": GREY}
FAINT = "rgba(43,134,197,0)"  # the first colour of the palette, clear
BESIDE = 0.05  # decades of the axis beyond its first and last tick
Cells = tuple[tuple[int, ...], tuple[int, ...]]  # the output and the input channels of a part of a layer


def draw_planes(rows: Sequence[Row]) -> list[View]:
    """Return one view a data set and attack, a colour a rule.

    The plots are the average client's accuracy against its advantage, and every client's advantage by data size.
    """
    known = (line for line in summarise_federations(rows) if _locate(line) is not None)
    parties, views = group_by(summarise_parties(rows), _name_view), []
    for name, group in group_by(known, _name_view).items():
        curves = _name_curves(group)
        count = len(set(curves.values()))
        common = {"height": 440 + 22 * count, "legend": plotting.place_legend(), "showlegend": count > 1}
        panels = [_draw_plane(group, curves, common), _draw_sizes(parties[name], curves, common)]
        views.append(View(name, panels, _describe_front(group)))
    return views


def _name_curves(group: Sequence[SummaryLine]) -> dict[str, str]:
    """Return the curve of each federation, by its name: kept cells get their own curve only beside zeroed ones."""
    plain = {_name(line): name_federation({**line.labels, "uncovered": None}) for line in group}
    without_large = Counter(plain[name] for name in {_name(x) for x in group if x.labels["large_clients"] == 0})
    return {name: base if without_large[base] < 2 else name for name, base in plain.items()}


def _name(line: SummaryLine) -> str:
    return name_federation(line.labels)


def _name_view(line: SummaryLine) -> str:
    """Return the data set and the attack of a federation or a party."""
    return f"{line.labels['dataset']}, {line.labels['attack']}"


def _draw_plane(group: Sequence[SummaryLine], curves: Mapping[str, str], layout: Mapping[str, Any]) -> Panel:
    """Plot the average client's accuracy against its advantage, a curve a rule."""
    ordered = sorted(group, key=lambda federation: federation.labels["large_clients"])
    rules = group_by(ordered, lambda federation: curves[_name(federation)])
    traces: list[Part] = []
    for number, rule in enumerate(dict.fromkeys(curves.values())):
        points = [point for point in map(_locate, rules[rule]) if point is not None]
        marker = plotting.style_marker(number, 10)
        counts = [str(federation.labels["large_clients"]) for federation in rules[rule]]
        named = zip(counts, points, strict=True)
        texts = [f"{rule}, {large} large clients: {x:.1%}, advantage {y:.1%}" for large, (x, y) in named]
        more = {
            "mode": "lines+markers+text" if len(points) > 1 else "markers+text",
            "text": counts,
            "textposition": "top center",
            "line": {"width": 1, "color": marker["color"], "dash": "dot"},
        }
        traces.append(plotting.draw_points(rule, points, marker, texts, **more))
    values = "; ".join(
        f"{_name(x)} with {x.labels['large_clients']} large {at[0]:.1%}, {at[1]:.1%}"
        for x in group
        if (at := _locate(x))
    )
    return plotting.draw_panel(
        "The average client: accuracy against advantage",
        f"Accuracy and membership advantage of the average client: {values}.",
        traces,
        xaxis=plotting.share_axis("test accuracy of the average client", tickformat=".1~%"),
        yaxis=_advantage_axis(group[0].labels["attack"], ".1%"),
        **layout,
    )


def _advantage_axis(attack: str, form: str) -> Part:
    return {"title": f"advantage of {attack}", "tickformat": form, "zerolinecolor": GREY, "nticks": 8}


def _locate(federation: SummaryLine) -> tuple[float, float] | None:
    """Return the average client's accuracy and advantage; None if one is missing."""
    accuracy, advantage = federation.value("client_accuracy"), federation.value("client_advantage")
    return None if accuracy is None or advantage is None else (accuracy, advantage)


def _describe_front(group: Sequence[SummaryLine]) -> str:
    """Return the front in words: no federation is both more accurate and less exposed."""
    best = select_front(group, "client_accuracy", "client_advantage", keep_equal=True)
    front = [f"{_name(line)} ({line.labels['large_clients']} large)" for line in group if line in best]
    sentence = f"By the means no federation is both more accurate and less exposed than {' or '.join(front)}."
    return sentence if len(group) > 1 else ""


def _draw_sizes(parties: Sequence[SummaryLine], curves: Mapping[str, str], layout: Mapping[str, Any]) -> Panel:
    """Plot a point for each client and seed; colours as on the plane, `curves` by the federations' names."""
    clients = [party for party in parties if party.labels["client"] is not None]
    traces: list[Part] = []
    for number, rule in enumerate(dict.fromkeys(curves.values())):
        points = sorted(point for party in clients if curves.get(_name(party)) == rule for point in _list_points(party))
        texts = [f"{rule}: {size} examples, advantage {advantage:.1%}" for size, advantage in points]
        trace = plotting.draw_points(rule, points, plotting.style_marker(number, 7), texts)
        traces.append(trace | {"x": [size for size, _ in points]})
    ticks = _choose_ticks([size for party in clients for size, _ in _list_points(party)])
    ends = [math.log10(ticks[0]) - BESIDE, math.log10(ticks[-1]) + BESIDE]
    log = {"type": "log", "range": ends, "tickvals": ticks, "ticktext": [f"{tick:,}" for tick in ticks]}
    return plotting.draw_panel(
        "Every client: advantage against data size",
        "The advantage on every client by its number of examples; the table above has their correlation r.",
        traces,
        xaxis={"title": "examples of the client"} | log,
        yaxis=_advantage_axis(parties[0].labels["attack"], ".0%"),
        **layout,
    )


def _list_points(party: SummaryLine) -> list[tuple[int, float]]:
    """Return data size and advantage of a client for each seed."""
    return [
        (row.extra["data_size"], row.value) for row in select_rows(party.rows, "advantage") if row.value is not None
    ]


def _choose_ticks(sizes: Sequence[int]) -> list[int]:
    """Return the ticks 1, 2, 5, 10, ... that enclose the sizes.

    Example:
        >>> _choose_ticks([16, 120])
        [10, 20, 50, 100, 200]
    """
    low, high = math.floor(math.log10(max(1, min(sizes)))), math.ceil(math.log10(max(sizes)))
    all_ticks = [digit * 10**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    under = [tick for tick in all_ticks if tick <= min(sizes)]
    over = next((tick for tick in all_ticks if tick >= max(sizes)), all_ticks[-1])
    return [tick for tick in all_ticks if (under or [1])[-1] <= tick <= over]


def draw_rounds(rows: Sequence[Row]) -> list[View]:
    """Return one view a data set: the server's accuracy by round, a curve a federation."""
    server = select_rows(rows, "test_accuracy", client=None, scope=None)
    federated = [row for row in server if {"submodels", "round"} <= row.extra.keys()]
    views = []
    for data, same in group_by(federated, lambda row: row.dataset).items():
        groups = group_by(same, lambda row: _name_with_large(read_federation(row)))
        curves = {name: average_along(group, lambda row: row.extra["round"]) for name, group in groups.items()}
        if any(len(points) > 1 for points in curves.values()):
            views.append(View(data, [_draw_curves(curves)]))
    return views


def _name_with_large(labels: Labels) -> str:
    return f"{name_federation(labels)}, {labels['large_clients']} large"


def _draw_curves(curves: Mapping[str, Mapping[int, float]]) -> Panel:
    traces = [
        plotting.draw_curve(title, points, plotting.style_line(number), "%{y:.1%} in round %{x}")
        for number, (title, points) in enumerate(curves.items())
    ]
    span = max(trace["x"][-1] for trace in traces) - min(trace["x"][0] for trace in traces)
    alt = f"Test accuracy of the server by round; in the last: {plotting.list_ends(traces)}."
    x_axis = {"title": "round", "zeroline": False, "dtick": max(1, math.ceil(span / 8))}
    y_axis = plotting.share_axis("test accuracy", 6, tickformat=".1~%")
    return plotting.draw_panel(
        "The server's accuracy over rounds",
        alt,
        traces,
        340 + 22 * len(traces),
        x_axis,
        y_axis,
        showlegend=len(traces) > 1,
        legend=plotting.place_legend(),
    )


def draw_cells(figures: Iterable[Labels]) -> list[View]:
    """Return one view a federation: the number of clients that train each cell of a layer, and the parts of groups."""
    views: dict[str, View] = {}
    for figure in figures:
        if figure["kind"] == "cells" and any(not _is_whole(figure, part) for part in _group_clients(figure)):
            title = _name_with_large(figure)
            views.setdefault(title, View(title, _draw_maps(figure), _describe_parts(figure)))
    return list(views.values())


def _group_clients(figure: Labels) -> dict[Cells, list[int]]:
    """Return the different parts of the layer, each with the clients that train it."""
    parts = group_by(figure["trained"], lambda trained: (tuple(trained["outputs"]), tuple(trained["inputs"])))
    return {part: [trained["client"] for trained in same] for part, same in parts.items()}


def _is_whole(figure: Labels, part: Cells) -> bool:
    """Return True if a part is the whole layer."""
    return bool(len(part[0]) * len(part[1]) == figure["outputs"] * figure["inputs"])


def _draw_maps(figure: Labels) -> list[Panel]:
    """Plot the cells of all clients, then of each group."""
    parts = _group_clients(figure)
    if figure["outputs"] * figure["inputs"] > CELLS:
        return []
    count = sum(map(len, parts.values()))
    panels = [_draw_map(figure, parts, f"layer {figure['layer']}: how many of {count} clients train each cell")]
    drawn = [(part, clients) for part, clients in parts.items() if not _is_whole(figure, part)]
    for part, clients in drawn[:GROUPS] if len(drawn) > 1 else []:
        panels.append(_draw_map(figure, {part: clients}, _name_clients(clients)))
    return panels


def _name_clients(clients: Sequence[int]) -> str:
    """Return the names of the clients of a part, of many the first.

    Example:
        >>> _name_clients([3]), _name_clients([2, 6]), _name_clients(range(0, 40, 2))
        ('client 3', 'clients 2, 6', 'clients 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 others')
    """
    named, others = ", ".join(map(str, clients[:NAMED])), len(clients) - NAMED
    named += f" and {others} others" if others > 0 else ""
    return f"client {named}" if len(clients) == 1 else f"clients {named}"


def _draw_map(figure: Labels, parts: Mapping[Cells, Sequence[int]], title: str) -> Panel:
    """Plot the number of clients that train each cell."""
    counts = [[0] * figure["inputs"] for _ in range(figure["outputs"])]
    for (outputs, inputs), clients in parts.items():
        for row in outputs:
            for column in inputs:
                counts[row][column] += len(clients)
    most = max(map(max, counts))
    trace = {
        "type": "heatmap",
        "z": counts,
        "zmin": 0,
        "zmax": most,
        "colorscale": [[0, FAINT], [1, PALETTE[0]]],
        "showscale": len(parts) > 1,
        "colorbar": {"title": {"text": "clients"}, "thickness": 12, "dtick": max(1, math.ceil(most / 5))},
        "hovertemplate": "output %{y}, input %{x}: %{z} clients<extra></extra>",
    }
    alt = f"{title}; {_share_trained(figure, parts)} of the cells are trained."
    x_axis = {"title": "input channel", "nticks": 6} | FRAME
    y_axis = {"title": "output channel", "nticks": 6, "autorange": "reversed"} | FRAME
    return plotting.draw_panel(title, alt, [trace], 300, x_axis, y_axis)


def _share_trained(figure: Labels, parts: Iterable[Cells]) -> str:
    """Return the share of the layer's cells that are in one of the parts."""
    covered = {(row, column) for outputs, inputs in parts for row in outputs for column in inputs}
    return f"{100 * len(covered) / (figure['outputs'] * figure['inputs']):.0f} %"


def _describe_parts(figure: Labels) -> str:
    """Return the number of different parts and their share of the cells in words."""
    parts = _group_clients(figure)
    share = _share_trained(figure, parts)
    cells = figure["outputs"] * figure["inputs"]
    left = f" The layer has {cells:,} cells, too many to draw." if cells > CELLS else ""
    return f"In the last round {len(parts)} different parts were trained, together {share} of the cells.{left}"
