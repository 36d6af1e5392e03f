"""Federations over sub-models: how accurate and how exposed everybody is, and who trains which cells.

What clients and seeds come to together, for the tables of federations over sub-models.

How an attack on sub-models asked: the view that the tables show, and what the others found beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.metrics.estimates import SMALLEST, Correlation, average, average_on_same, exposure_correlation
from secateur.metrics.membership import Estimate
from secateur.report.summary import Cell
from secateur.runs.rows import Row

MEASURES = {"accuracy": "test_accuracy", "advantage": "advantage", "auc": "auc"}  # a party's fields


def over_seeds(rows: Sequence[Row]) -> Cell | None:
    """The mean over seeds; its interval is the one seed's, or the range of several."""
    known = _estimates(rows)
    note = next((row.note for row in rows if row.note), None)
    if not known:
        return Cell(None, None, None, note) if rows else None
    if len(known) == 1:
        (row,) = (row for row in rows if row.value is not None)
        return Cell(row.value, row.low, row.high, note)
    return _cell([each.value for each in known], note)


def over_clients(rows: Iterable[Row], average: Callable[[Sequence[Estimate]], Estimate]) -> Cell | None:
    """The average client: of one seed with the clients' intervals together, of several the range of their means."""
    seeds: dict[int, list[Row]] = {}
    for row in rows:
        seeds.setdefault(row.seed, []).append(row)
    means = [average(known) for known in map(_estimates, seeds.values()) if known]
    if not means:
        return None
    return Cell(*means[0][:3]) if len(means) == 1 else _cell([each.value for each in means])


class BySize(NamedTuple):
    """How advantage and data size go together over clients of one model size."""

    parameters: int
    found: Correlation
    smallest: int  # examples of those that count

    @property
    def whom(self) -> str:
        """Over whom r is."""
        least = f" with {self.smallest} examples or more" if self.smallest else ""
        return f"{self.found.clients} of size {self.parameters:,}{least}"


def by_size(rows: Iterable[Row]) -> list[BySize]:
    """Pearson's r by model size: of clients with as many examples as the paper wants, or of all where these are few."""
    points: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if row.value is not None:
            points.setdefault(row.extra["parameters"], []).append((row.extra["data_size"], row.value))
    tried = [(size, exposure_correlation(own, least), least) for size, own in points.items() for least in (SMALLEST, 0)]
    found = [BySize(size, r, least) for size, r, least in tried if r is not None]
    return list({each.parameters: each for each in reversed(found)}.values())[::-1]


def _cell(values: Sequence[float], note: str | None = None) -> Cell:
    return Cell(sum(values) / len(values), min(values), max(values), note)


def _estimates(rows: Iterable[Row]) -> list[Estimate]:
    return [
        Estimate(row.value, row.value if row.low is None else row.low, row.value if row.high is None else row.high)
        for row in rows
        if row.value is not None
    ]


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


class Found(NamedTuple):
    """What one way of asking came to, as means over clients and seeds."""

    batches: str  # with whom an example is scored
    updates: int  # that the attacker holds
    server: float | None  # advantage
    clients: float | None
    auc: float | None  # of the clients


@dataclass(frozen=True)
class Asked:
    """One attack on one federation, asked in several ways: as in the other tables, then the others."""

    labels: Mapping[str, Any]
    attack: str
    found: Sequence[Found]

    @property
    def name(self) -> str:
        """Its federation's rule and network."""
        return name(self.labels)


def asked(rows: Sequence[Row]) -> list[Asked]:
    """Every attack that was asked in several ways."""
    plain = plain_views(rows)
    groups: dict[Asker, dict[tuple[str, int], list[Row]]] = {asker: {view: []} for asker, view in plain.items()}
    for row in rows:
        if (way := way_of(row)) is not None:
            groups[asker_of(row)].setdefault(way, []).append(row)
    return [
        Asked(dict(asker.labels), asker.attack, [_found(*way, own) for way, own in ways.items()])
        for asker, ways in groups.items()
        if len(ways) > 1
    ]


def _found(batches: str, updates: int, rows: Sequence[Row]) -> Found:
    def mean(metric: str, scope: str) -> float | None:
        own = [row.value for row in rows if row.metric == metric and row.extra["scope"] == scope]
        values = [value for value in own if value is not None]
        return sum(values) / len(values) if values else None

    return Found(batches, updates, mean("advantage", "server"), mean("advantage", "client"), mean("auc", "client"))
