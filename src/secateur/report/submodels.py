"""Federations over sub-models: how accurate and how exposed everybody is, and who trains which cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.report.plotting import CLEAR, GREY, PALETTE, Panel, Part, cycle, panel, short
from secateur.report.sections import View
from secateur.report.summary import Cell
from secateur.rows import Row

PLAIN = ("mixed", 1)  # how Yeom's attack asks where nothing else is said: mixed batches, the last update
GROUPS = 4  # different parts that are drawn each by itself
ATTACK = "yeom"
MEASURES = {"advantage": "advantage", "auc": "AUC"}


class Who(NamedTuple):
    """A federation, and a client of it; None is the server."""

    labels: tuple[tuple[str, Any], ...]
    client: int | None


@dataclass(frozen=True)
class Party:
    """A client or a server: a line of the table; means over seeds, and the range of several or the interval of one."""

    labels: Mapping[str, Any]
    client: int | None
    data_size: str
    parameters: int
    attack: str
    accuracy: Cell | None
    advantage: Cell | None
    auc: Cell | None

    @property
    def name(self) -> str:
        """What a person calls it."""
        return "server" if self.client is None else f"client {self.client}"


@dataclass(frozen=True)
class Federated:
    """One federation, a point on the plane: its server, and its average client."""

    labels: Mapping[str, Any]
    server: Party | None
    accuracy: float | None
    advantage: float | None
    clients: int

    @property
    def name(self) -> str:
        """The rule, the network and a defense on top."""
        return name(self.labels)


def is_submodel(row: Row) -> bool:
    """Whether a row is of a federation over sub-models."""
    return "submodels" in row.extra


def name(labels: Mapping[str, Any]) -> str:
    """A channel rule on the server's network, and the defense on top.

    Example:
        >>> name({"submodels": "none", "model": "mapp-cnn-8", "defense": "none"})
        'fedavg, mapp-cnn-8'
    """
    rule = "fedavg" if labels["submodels"] == "none" else str(labels["submodels"])
    told = f"{rule}, {labels['model']}"
    return told if labels["defense"] in ("none", None) else f"{told}, {labels['defense']}"


def parties(rows: Iterable[Row]) -> list[Party]:
    """Every client and server, one line for each attack that was run."""
    found: dict[tuple[Who, str], dict[str, list[Row]]] = {}
    for row in rows:
        if "scope" in row.extra and _is_plain(row):
            who = Who(tuple(_labels(row).items()), row.extra["client"])
            found.setdefault((who, row.attack or ""), {}).setdefault(row.metric, []).append(row)
    lines = []
    for (who, attack), measures in found.items():
        if attack:
            accuracy = found.get((who, ""), {}).get("test_accuracy", [])
            first = next(iter(measures.values()))[0]
            sizes = sorted({row.extra["data_size"] for row in measures["advantage"]})
            size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            values = [_cell(measures.get(metric, [])) for metric in MEASURES]
            labels = dict(who.labels)
            lines.append(Party(labels, who.client, size, first.extra["parameters"], attack, _cell(accuracy), *values))
    return lines


def federations(lines: Sequence[Party]) -> list[Federated]:
    """One line a federation, in the order they were run, by Yeom's attack or the first that was run."""
    groups: dict[tuple[tuple[str, Any], ...], list[Party]] = {}
    for line in lines:
        groups.setdefault(tuple(line.labels.items()), []).append(line)
    result = []
    for found in groups.values():
        attacks = {line.attack for line in found}
        own = [line for line in found if line.attack == (ATTACK if ATTACK in attacks else found[0].attack)]
        clients = [line for line in own if line.client is not None]
        server = next((line for line in own if line.client is None), None)
        means = [_mean(getattr(line, what) for line in clients) for what in ("accuracy", "advantage")]
        result.append(Federated(found[0].labels, server, means[0], means[1], len(clients)))
    return result


def planes(lines: Sequence[Party]) -> list[View]:
    """One view a data set: the average client's accuracy against its advantage, a colour a rule."""
    places: dict[str, list[Federated]] = {}
    for each in federations(lines):
        if each.accuracy is not None and each.advantage is not None:
            places.setdefault(str(each.labels["dataset"]), []).append(each)
    return [View(place, [_plane(found)], _sentence(found)) for place, found in places.items()]


def cells(figures: Iterable[Mapping[str, Any]]) -> list[View]:
    """One view a federation: how many clients train each cell of a layer, and the parts that groups of them train."""
    views: dict[str, View] = {}
    for figure in figures:
        if figure["kind"] == "cells":
            title = f"{name(figure)}, {figure['large_clients']} large"
            views.setdefault(title, View(title, _heat(figure), _heat_sentence(figure)))
    return list(views.values())


def _plane(found: Sequence[Federated]) -> Panel:
    rules = list(dict.fromkeys(each.name for each in found))
    traces: list[Part] = []
    for number, rule in enumerate(rules):
        own = sorted((each for each in found if each.name == rule), key=lambda each: each.labels["large_clients"])
        colour = cycle(PALETTE, number)
        traces.append(
            {
                "type": "scatter",
                "mode": "lines+markers+text" if len(own) > 1 else "markers+text",
                "x": short(each.accuracy or 0 for each in own),
                "y": short(each.advantage or 0 for each in own),
                "text": [str(each.labels["large_clients"]) for each in own],
                "textposition": "top center",
                "name": rule,
                "marker": {"size": 10, "color": colour},
                "line": {"width": 1, "color": colour, "dash": "dot"},
                "hovertemplate": f"{rule}, %{{text}} large clients: %{{x:.1%}}, advantage %{{y:.1%}}<extra></extra>",
            }
        )
    told = "; ".join(
        f"{each.name} with {each.labels['large_clients']} large {100 * (each.accuracy or 0):.1f}%, "
        f"{100 * (each.advantage or 0):.1f}%"
        for each in found
    )
    return panel(
        "The average client: accuracy against advantage",
        f"Accuracy and membership advantage of the average client: {told}.",
        traces,
        480,
        {"title": "test accuracy of the average client", "tickformat": ".0%", "zeroline": False, "nticks": 8},
        {"title": "advantage of the attack", "tickformat": ".1%", "zeroline": True, "zerolinecolor": GREY, "nticks": 8},
        showlegend=True,
    )


def _sentence(found: Sequence[Federated]) -> str:
    """Who lies on the front: nobody is both more accurate and less exposed."""
    front = [
        one.name + f" ({one.labels['large_clients']} large)"
        for one in found
        if not any(
            (other.accuracy or 0) >= (one.accuracy or 0)
            and (other.advantage or 0) <= (one.advantage or 0)
            and (other.accuracy, other.advantage) != (one.accuracy, one.advantage)
            for other in found
        )
    ]
    return f"Nobody is both more accurate and less exposed than {', '.join(front)}." if len(found) > 1 else ""


def _heat(figure: Mapping[str, Any]) -> list[Panel]:
    parts = _parts(figure)
    everyone = [client for clients in parts.values() for client in clients]
    panels = [_map(figure, parts, f"{figure['layer']}: how many of {len(everyone)} clients train each cell")]
    whole = figure["outputs"] * figure["inputs"]
    drawn = [(part, clients) for part, clients in parts.items() if len(part[0]) * len(part[1]) < whole]
    for part, clients in drawn[:GROUPS] if len(drawn) > 1 else []:
        panels.append(_map(figure, {part: clients}, f"client {', '.join(map(str, clients))}"))
    return panels


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
    trained = sum(value > 0 for line in counts for value in line) / (figure["outputs"] * figure["inputs"])
    trace = {
        "type": "heatmap",
        "z": counts,
        "zmin": 0,
        "colorscale": [[0, CLEAR], [1, PALETTE[0]]],
        "showscale": False,
        "hovertemplate": "output %{y}, input %{x}: %{z} clients<extra></extra>",
    }
    return panel(
        title,
        f"{title}; {100 * trained:.0f} % of the cells are trained.",
        [trace],
        300,
        {"title": "input channel", "zeroline": False, "nticks": 6},
        {"title": "output channel", "zeroline": False, "autorange": "reversed", "nticks": 6},
    )


def _heat_sentence(figure: Mapping[str, Any]) -> str:
    parts = _parts(figure)
    covered = {(row, column) for outputs, inputs in parts for row in outputs for column in inputs}
    share = len(covered) / (figure["outputs"] * figure["inputs"])
    return f"In the last round {len(parts)} different parts were trained, together {100 * share:.0f} % of the cells."


def _is_plain(row: Row) -> bool:
    return (row.extra.get("batches", PLAIN[0]), row.extra.get("updates", PLAIN[1])) == PLAIN


def _labels(row: Row) -> dict[str, Any]:
    names = ("run", "submodels", "large_clients", "uncovered")
    extra = {key: row.extra[key] for key in names if key in row.extra}
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense} | extra


def _cell(rows: Sequence[Row]) -> Cell | None:
    """The mean over seeds; its interval is the one seed's, or the range of several."""
    values = [row.value for row in rows if row.value is not None]
    note = next((row.note for row in rows if row.note), None)
    if not values:
        return Cell(None, None, None, note) if rows else None
    if len(values) == 1:
        return Cell(values[0], rows[0].low, rows[0].high, note)
    return Cell(sum(values) / len(values), min(values), max(values), note)


def _mean(cells: Iterable[Cell | None]) -> float | None:
    values = [cell.value for cell in cells if cell is not None and cell.value is not None]
    return sum(values) / len(values) if values else None
