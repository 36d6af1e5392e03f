"""Federations over sub-models: how accurate and how exposed everybody is, and who trains which cells."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.metrics.estimates import average, average_on_same
from secateur.report.submodels_means import BySize, by_size, over_clients, over_seeds
from secateur.report.summary import Cell
from secateur.rows import Row

MEASURES = {"accuracy": "test_accuracy", "advantage": "advantage", "auc": "auc"}  # a party's fields


class Asker(NamedTuple):
    """An attack on a federation."""

    labels: tuple[tuple[str, Any], ...]
    attack: str


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
    rows: Mapping[str, Sequence[Row]]  # that these are of, by metric

    @property
    def rule(self) -> str:
        """Its federation's rule and network."""
        return name(self.labels)

    @property
    def name(self) -> str:
        """What a person calls it."""
        return "server" if self.client is None else f"client {self.client}"


@dataclass(frozen=True)
class Federated:
    """One federation under one attack, a point on the plane: its server, and its average client."""

    labels: Mapping[str, Any]
    server: Party | None
    accuracy: Cell | None
    advantage: Cell | None
    clients: int
    attack: str = ""
    excluded: Sequence[str] = ()  # why clients are not in the mean advantage, one each
    by_size: Sequence[BySize] = ()  # Pearson's r of advantage and data size, by model size

    @property
    def name(self) -> str:
        """The rule, the network and a defense on top."""
        return name(self.labels)


def is_submodel(row: Row) -> bool:
    """Whether a row is of a federation over sub-models."""
    return "submodels" in row.extra


def name(labels: Mapping[str, Any]) -> str:
    """A channel rule on the server's network, and the defense on top; whether pictures were cropped and flipped.

    Without large clients, whether cells are kept.

    Example:
        >>> name({"submodels": "none", "model": "mapp-cnn-8", "defense": "none"})
        'fedavg, mapp-cnn-8'
    """
    rule = "fedavg" if labels["submodels"] == "none" else str(labels["submodels"])
    told = f"{rule}, {labels['model']}"
    if labels.get("large_clients") == 0 and labels.get("uncovered") == "keep" and not rule.startswith("local"):
        told += ", uncovered kept"
    told += ", crops and flips" if labels.get("augment") else ""
    return told if labels["defense"] in ("none", None) else f"{told}, {labels['defense']}"


def parties(rows: Sequence[Row]) -> list[Party]:
    """Every client and server, one line for each attack that was run."""
    found: dict[tuple[Who, str], dict[str, list[Row]]] = {}
    plain = plain_views(rows)
    for row in rows:
        if "scope" in row.extra and way_of(row) in (None, plain.get(asker_of(row))):
            who = Who(tuple(labels_of(row).items()), row.extra["client"])
            found.setdefault((who, row.attack or ""), {}).setdefault(row.metric, []).append(row)
    lines = []
    for (who, attack), measures in found.items():
        if attack:
            accuracy = found.get((who, ""), {}).get("test_accuracy", [])
            first = next(iter(measures.values()))[0]
            sizes = sorted({row.extra["data_size"] for row in measures["advantage"]})
            size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            own = measures | {"test_accuracy": accuracy}
            cells = {field: over_seeds(own.get(metric, [])) for field, metric in MEASURES.items()}
            labels, parameters = dict(who.labels), first.extra["parameters"]
            lines.append(Party(labels, who.client, size, parameters, attack, **cells, rows=own))
    return lines


def federations(lines: Sequence[Party]) -> list[Federated]:
    """One line a federation and attack, in the order they were run.

    Clients are tested by the same examples, and attacked by members of their own.
    """
    groups: dict[Asker, list[Party]] = {}
    for line in lines:
        groups.setdefault(Asker(tuple(line.labels.items()), line.attack), []).append(line)
    result = []
    for (_, attack), own in groups.items():
        clients = [line for line in own if line.client is not None]
        server = next((line for line in own if line.client is None), None)
        measured = {name: [row for line in clients for row in line.rows.get(name, ())] for name in MEASURES.values()}
        accuracy = over_clients(measured["test_accuracy"], average_on_same)
        advantage = over_clients(measured["advantage"], average)
        cells = [line.advantage for line in clients]
        excluded = [cell.note or "" for cell in cells if cell is not None and cell.value is None]
        sized = by_size(measured["advantage"])
        result.append(Federated(own[0].labels, server, accuracy, advantage, len(clients), attack, excluded, sized))
    return result


def not_attacked(rows: Sequence[Row]) -> list[Federated]:
    """Federations of which only accuracy is known, by the last round that was evaluated."""
    groups: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    attacked = {tuple(labels_of(row).items()) for row in rows if "scope" in row.extra and row.attack}
    for row in rows:
        key = tuple(labels_of(row).items())
        if is_submodel(row) and "round" in row.extra and not row.extra.get("advice") and key not in attacked:
            groups.setdefault(key, []).append(row)
    result = []
    for key, own in groups.items():
        last = max(row.extra["round"] for row in own)
        end = [row for row in own if row.extra["round"] == last and row.extra.get("client") is None]
        server, clients = (
            over_seeds([row for row in end if row.metric == metric]) for metric in ("test_accuracy", "client_accuracy")
        )
        labels = dict(key)
        party = Party(labels, None, "", 0, "", server, None, None, {})
        result.append(Federated(labels, party, clients, None, 0))
    return result


def plain_views(rows: Iterable[Row]) -> dict[Asker, tuple[str, int]]:
    """How each attack asked as it was told to: its first row is of that view, and those for comparison come later."""
    found: dict[Asker, tuple[str, int]] = {}
    for row in rows:
        if (way := way_of(row)) is not None:
            found.setdefault(asker_of(row), way)
    return found


def way_of(row: Row) -> tuple[str, int] | None:
    """With whom examples were scored and how many updates were held; None where a row is of no such thing."""
    batches = row.extra.get("batches") if "scope" in row.extra else None
    return None if batches is None else (batches, row.extra.get("updates", 1))


def asker_of(row: Row) -> Asker:
    """The attack that a row is of."""
    return Asker(tuple(labels_of(row).items()), row.attack or "")


def labels_of(row: Row) -> dict[str, Any]:
    """What tells a federation from others."""
    names = ("run", "submodels", "large_clients", "uncovered", "augment")
    extra = {key: row.extra[key] for key in names if key in row.extra}
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense} | extra
