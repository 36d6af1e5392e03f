"""Pictures of which cells of a layer each group of clients trains (mapp_fl Figure 2)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from secateur.report.plotting import GREY, PALETTE, Panel, panel
from secateur.report.sections import View
from secateur.report.submodels import name

GROUPS = 16  # different parts that are drawn each by itself: as many as groups of MaPP-FL at most
NAMED = 12  # clients of a part that are named
FRAME = {"zeroline": False, "showgrid": False, "showline": True, "mirror": True, "linecolor": GREY}
FAINT = "rgba(43,134,197,0)"  # the first colour of the palette, clear


def cells(figures: Iterable[Mapping[str, Any]]) -> list[View]:
    """One view a federation: how many clients train each cell of a layer, and the parts that groups of them train."""
    views: dict[str, View] = {}
    for figure in figures:
        if figure["kind"] == "cells" and any(not _is_whole(figure, part) for part in _parts(figure)):
            title = f"{name(figure)}, {figure['large_clients']} large"
            views.setdefault(title, View(title, _heat(figure), _heat_sentence(figure)))
    return list(views.values())


def _heat(figure: Mapping[str, Any]) -> list[Panel]:
    parts = _parts(figure)
    everyone = [client for clients in parts.values() for client in clients]
    panels = [_map(figure, parts, f"layer {figure['layer']}: how many of {len(everyone)} clients train each cell")]
    drawn = [(part, clients) for part, clients in parts.items() if not _is_whole(figure, part)]
    for part, clients in drawn[:GROUPS] if len(drawn) > 1 else []:
        panels.append(_map(figure, {part: clients}, _named(clients)))
    return panels


def _named(clients: Sequence[int]) -> str:
    """Whose part it is, of many clients the first.

    Example:
        >>> _named([3]), _named([2, 6]), _named(range(0, 40, 2))
        ('client 3', 'clients 2, 6', 'clients 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 8 others')
    """
    named, others = ", ".join(map(str, clients[:NAMED])), len(clients) - NAMED
    named += f" and {others} others" if others > 0 else ""
    return f"client {named}" if len(clients) == 1 else f"clients {named}"


def _is_whole(figure: Mapping[str, Any], part: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    return bool(len(part[0]) * len(part[1]) == figure["outputs"] * figure["inputs"])


def _parts(figure: Mapping[str, Any]) -> dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]]:
    """The different parts of the layer, each with the clients that train it."""
    parts: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for each in figure["trained"]:
        parts.setdefault((tuple(each["outputs"]), tuple(each["inputs"])), []).append(each["client"])
    return parts


def _map(
    figure: Mapping[str, Any], parts: Mapping[tuple[tuple[int, ...], tuple[int, ...]], Sequence[int]], title: str
) -> Panel:
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
    parts = _parts(figure)
    covered = {(row, column) for outputs, inputs in parts for row in outputs for column in inputs}
    share = len(covered) / (figure["outputs"] * figure["inputs"])
    return f"In the last round {len(parts)} different parts were trained, together {100 * share:.0f} % of the cells."
