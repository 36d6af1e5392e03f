"""Plots of federations over sub-models: accuracy against exposure, advantage by data size, rounds, and trained cells.

Advantage by data size is mapp_fl Fig. 1a, the cells that each group of clients trains mapp_fl Fig. 2.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.report.audit import View
from secateur.report.audit_plots import DASHES, SYMBOLS
from secateur.report.plotting import GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.submodels import Party, SubmodelPoint, federations, is_submodel, labels_of, name
from secateur.runs.rows import Row

GROUPS = 16  # different parts with a plot each: as many as MaPP-FL has groups at most
NAMED = 12  # clients of a part that are named
FRAME = {"zeroline": False, "showgrid": False, "showline": True, "mirror": True, "linecolor": GREY}
FAINT = "rgba(43,134,197,0)"  # the first colour of the palette, clear
UNDER = {"orientation": "h", "y": -0.25, "yanchor": "top"}
BESIDE = 0.05  # decades of the axis beyond its first and last tick
Point = tuple[int, float]  # data size and advantage
Cells = tuple[tuple[int, ...], tuple[int, ...]]  # the output and the input channels of a part of a layer


def planes(lines: Sequence[Party]) -> list[View]:
    """Return one view a data set and attack, a colour a rule.

    The plots are the average client's accuracy against its advantage, and every client's advantage by data size.
    """
    places: dict[str, list[SubmodelPoint]] = {}
    for federation in federations(lines):
        if federation.accuracy is not None and federation.advantage is not None:
            places.setdefault(_place(federation), []).append(federation)
    views = []
    for place, group in places.items():
        curves, place_lines = _named_curves(group), [line for line in lines if _place(line) == place]
        count = len(set(curves.values()))
        common = {"height": 440 + 22 * count, "legend": UNDER, "showlegend": count > 1}
        views.append(
            View(place, [_plane(group, curves, **common), by_size(place_lines, curves, **common)], _sentence(group))
        )
    return views


def _named_curves(group: Sequence[SubmodelPoint]) -> dict[str, str]:
    """Return the curve of each federation, by its name: kept cells get their own curve only beside zeroed ones."""
    plain = {federation.name: name(dict(federation.labels) | {"uncovered": None}) for federation in group}
    without_large = Counter(plain[full_name] for full_name in {x.name for x in group if x.labels["large_clients"] == 0})
    return {full_name: base if without_large[base] < 2 else full_name for full_name, base in plain.items()}


def _place(line: SubmodelPoint | Party) -> str:
    """Return the data set and the attack of a federation or a party."""
    return f"{line.labels['dataset']}, {line.attack}"


def _plane(group: Sequence[SubmodelPoint], curves: Mapping[str, str], **layout: Any) -> Panel:
    """Plot the average client's accuracy against its advantage, a curve a rule."""
    traces: list[Part] = []
    ordered = sorted(group, key=lambda federation: federation.labels["large_clients"])
    for number, rule in enumerate(dict.fromkeys(curves.values())):
        same_rule = [federation for federation in ordered if curves[federation.name] == rule]
        colour = cycle(PALETTE, number)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text" if len(same_rule) > 1 else "markers+text",
                "x": short(_at(federation)[0] for federation in same_rule),
                "y": short(_at(federation)[1] for federation in same_rule),
                "text": [str(federation.labels["large_clients"]) for federation in same_rule],
                "textposition": "top center",
                "name": rule,
                "marker": {"size": 10, "color": colour, "symbol": cycle(SYMBOLS, number // len(PALETTE))},
                "line": {"width": 1, "color": colour, "dash": "dot"},
                "hovertemplate": f"{rule}, %{{text}} large clients: %{{x:.1%}}, advantage %{{y:.1%}}<extra></extra>",
            }
        )
    values = "; ".join(
        f"{federation.name} with {federation.labels['large_clients']} large "
        f"{100 * _at(federation)[0]:.1f}%, {100 * _at(federation)[1]:.1f}%"
        for federation in group
    )
    return panel(
        "The average client: accuracy against advantage",
        f"Accuracy and membership advantage of the average client: {values}.",
        traces,
        xaxis={"title": "test accuracy of the average client", "tickformat": ".1~%", "zeroline": False, "nticks": 8},
        yaxis={"title": f"advantage of {group[0].attack}", "tickformat": ".1%", "zerolinecolor": GREY, "nticks": 8},
        **layout,
    )


def _at(federation: SubmodelPoint) -> tuple[float, float]:
    """Return the average client's accuracy and advantage."""
    accuracy, advantage = federation.accuracy, federation.advantage
    return (accuracy.value or 0.0 if accuracy else 0.0), (advantage.value or 0.0 if advantage else 0.0)


def _sentence(group: Sequence[SubmodelPoint]) -> str:
    """Return the front in words: no federation is both more accurate and less exposed."""
    front = [
        line.name + f" ({line.labels['large_clients']} large)"
        for line in group
        if not any(
            _at(other)[0] >= _at(line)[0] and _at(other)[1] <= _at(line)[1] and _at(other) != _at(line)
            for other in group
        )
    ]
    sentence = f"By the means nobody is both more accurate and less exposed than {' or '.join(front)}."
    return sentence if len(group) > 1 else ""


def by_size(lines: Sequence[Party], curves: Mapping[str, str], **layout: object) -> Panel:
    """Plot a point for each client and seed; colours as on the plane, `curves` by the federations' names."""
    clients = [line for line in lines if line.client is not None]
    traces: list[Part] = []
    for number, rule in enumerate(dict.fromkeys(curves.values())):
        points = sorted(point for line in clients if curves.get(line.rule) == rule for point in _points(line))
        mark = {"size": 7, "color": cycle(PALETTE, number), "symbol": cycle(SYMBOLS, number // len(PALETTE))}
        data = {"x": [size for size, _ in points], "y": short(advantage for _, advantage in points), "marker": mark}
        hover = f"{rule}: %{{x}} examples, advantage %{{y:.1%}}<extra></extra>"
        traces.append({"type": "scatter", "mode": "markers", "name": rule, "hovertemplate": hover} | data)
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
    """Return data size and advantage of a client for each seed."""
    rows = line.rows.get("advantage", ())
    return [(row.extra["data_size"], row.value) for row in rows if row.value is not None]


def _ticks(sizes: Sequence[int]) -> list[int]:
    """Return the ticks 1, 2, 5, 10, ... that enclose the sizes.

    Example:
        >>> _ticks([16, 120])
        [10, 20, 50, 100, 200]
    """
    low, high = math.floor(math.log10(max(1, min(sizes)))), math.ceil(math.log10(max(sizes)))
    all_ticks = [digit * 10**power for power in range(low, high + 1) for digit in (1, 2, 5)]
    under = [tick for tick in all_ticks if tick <= min(sizes)]
    over = next((tick for tick in all_ticks if tick >= max(sizes)), all_ticks[-1])
    return [tick for tick in all_ticks if (under or [1])[-1] <= tick <= over]


def over_rounds(rows: Sequence[Row]) -> list[View]:
    """Return one view a data set: the server's accuracy by round, a curve a federation."""
    curves: dict[str, dict[str, dict[int, list[float]]]] = {}
    for row in rows:
        whole = is_submodel(row) and row.extra.get("client") is None and "scope" not in row.extra
        if whole and row.metric == "test_accuracy" and row.value is not None and "round" in row.extra:
            title = f"{name(labels_of(row))}, {row.extra['large_clients']} large"
            by_round = curves.setdefault(row.dataset, {}).setdefault(title, {})
            by_round.setdefault(row.extra["round"], []).append(row.value)
    several = {
        place: place_curves
        for place, place_curves in curves.items()
        if any(len(points) > 1 for points in place_curves.values())
    }
    return [View(place, [_curves(place_curves)]) for place, place_curves in several.items()]


def _curves(curves: Mapping[str, Mapping[int, Sequence[float]]]) -> Panel:
    traces: list[Part] = []
    for number, (title, points) in enumerate(curves.items()):
        means = {at: sum(values) / len(values) for at, values in sorted(points.items())}
        style = {"color": cycle(PALETTE, number), "dash": cycle(DASHES, number // len(PALETTE)), "width": 2}
        data = {"x": list(means), "y": short(means.values()), "name": title, "line": style}
        traces.append({"type": "scatter", "mode": "lines", "hovertemplate": "round %{x}: %{y:.1%}"} | data)
    ends = ", ".join(f"{trace['name']} {trace['y'][-1]:g}" for trace in traces)
    span = max(trace["x"][-1] for trace in traces) - min(trace["x"][0] for trace in traces)
    return panel(
        "The server's accuracy over rounds",
        f"Test accuracy of the server by round; in the last: {ends}.",
        traces,
        340 + 22 * len(traces),
        {"title": "round", "zeroline": False, "dtick": max(1, math.ceil(span / 8))},
        {"title": "test accuracy", "tickformat": ".1~%", "zeroline": False, "nticks": 6},
        showlegend=len(traces) > 1,
        legend=UNDER,
    )


def cells(figures: Iterable[Mapping[str, Any]]) -> list[View]:
    """Return one view a federation: the number of clients that train each cell of a layer, and the parts of groups."""
    views: dict[str, View] = {}
    for figure in figures:
        if figure["kind"] == "cells" and any(not _is_whole(figure, part) for part in _parts(figure)):
            title = f"{name(figure)}, {figure['large_clients']} large"
            views.setdefault(title, View(title, _heat(figure), _heat_sentence(figure)))
    return list(views.values())


def _parts(figure: Mapping[str, Any]) -> dict[Cells, list[int]]:
    """Return the different parts of the layer, each with the clients that train it."""
    parts: dict[Cells, list[int]] = {}
    for trained in figure["trained"]:
        parts.setdefault((tuple(trained["outputs"]), tuple(trained["inputs"])), []).append(trained["client"])
    return parts


def _is_whole(figure: Mapping[str, Any], part: Cells) -> bool:
    """Return True if a part is the whole layer."""
    return bool(len(part[0]) * len(part[1]) == figure["outputs"] * figure["inputs"])


def _heat(figure: Mapping[str, Any]) -> list[Panel]:
    """Plot the cells of all clients, then of each group."""
    parts = _parts(figure)
    everyone = [client for clients in parts.values() for client in clients]
    panels = [_map(figure, parts, f"layer {figure['layer']}: how many of {len(everyone)} clients train each cell")]
    drawn = [(part, clients) for part, clients in parts.items() if not _is_whole(figure, part)]
    for part, clients in drawn[:GROUPS] if len(drawn) > 1 else []:
        panels.append(_map(figure, {part: clients}, _named(clients)))
    return panels


def _named(clients: Sequence[int]) -> str:
    """Return the names of the clients of a part, of many the first.

    Example:
        >>> _named([3]), _named([2, 6]), _named(range(0, 40, 2))
        ('client 3', 'clients 2, 6', 'clients 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 others')
    """
    named, others = ", ".join(map(str, clients[:NAMED])), len(clients) - NAMED
    named += f" and {others} others" if others > 0 else ""
    return f"client {named}" if len(clients) == 1 else f"clients {named}"


def _map(figure: Mapping[str, Any], parts: Mapping[Cells, Sequence[int]], title: str) -> Panel:
    """Plot the number of clients that train each cell."""
    counts = [[0] * figure["inputs"] for _ in range(figure["outputs"])]
    for (outputs, inputs), clients in parts.items():
        for row in outputs:
            for column in inputs:
                counts[row][column] += len(clients)
    most = max(map(max, counts))
    trained = sum(value > 0 for line in counts for value in line) / (figure["outputs"] * figure["inputs"])
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
    return panel(
        title,
        f"{title}; {100 * trained:.0f} % of the cells are trained.",
        [trace],
        300,
        {"title": "input channel", "nticks": 6} | FRAME,
        {"title": "output channel", "nticks": 6, "autorange": "reversed"} | FRAME,
    )


def _heat_sentence(figure: Mapping[str, Any]) -> str:
    """Return the number of different parts and their share of the cells in words."""
    parts = _parts(figure)
    covered = {(row, column) for outputs, inputs in parts for row in outputs for column in inputs}
    share = len(covered) / (figure["outputs"] * figure["inputs"])
    return f"In the last round {len(parts)} different parts were trained, together {100 * share:.0f} % of the cells."
