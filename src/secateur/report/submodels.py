"""Federations over sub-models: accuracy and exposure of clients and servers, as means over clients and seeds.

An attack may score in several ways. The tables show the way that was configured, and `asked` the others beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.metrics.estimates import SMALLEST, Correlation, average, average_on_same, exposure_correlation
from secateur.metrics.membership import Estimate
from secateur.report.summary import SummaryCell
from secateur.runs.rows import Row

MEASURES = {"accuracy": "test_accuracy", "advantage": "advantage", "auc": "auc"}  # metrics by the fields of a party


class BySize(NamedTuple):
    """The correlation of advantage and data size over clients of one model size."""

    parameters: int
    found: Correlation
    smallest: int  # number of examples of a client that counts

    @property
    def whom(self) -> str:
        """The clients that r is computed over, in words."""
        least = f" with {self.smallest} examples or more" if self.smallest else ""
        return f"{self.found.clients} of size {self.parameters:,}{least}"


class AttackedFederation(NamedTuple):
    """An attack on a federation."""

    labels: tuple[tuple[str, Any], ...]
    attack: str


class Who(NamedTuple):
    """A federation and one of its clients; None is the server."""

    labels: tuple[tuple[str, Any], ...]
    client: int | None


@dataclass(frozen=True)
class Party:
    """A client or a server, a line of the table: means over seeds, and the range of several or one seed's interval."""

    labels: Mapping[str, Any]
    client: int | None
    data_size: str
    parameters: int
    attack: str
    accuracy: SummaryCell | None
    advantage: SummaryCell | None
    auc: SummaryCell | None
    rows: Mapping[str, Sequence[Row]]  # of these cells, by metric

    @property
    def rule(self) -> str:
        """The rule and the network of the federation."""
        return name(self.labels)

    @property
    def name(self) -> str:
        """The name on the page."""
        return "server" if self.client is None else f"client {self.client}"


@dataclass(frozen=True)
class SubmodelPoint:
    """One federation under one attack, a point on the plane: its server, and its average client."""

    labels: Mapping[str, Any]
    server: Party | None
    accuracy: SummaryCell | None
    advantage: SummaryCell | None
    clients: int
    attack: str = ""
    excluded: Sequence[str] = ()  # reasons of clients outside the mean advantage, one each
    by_size: Sequence[BySize] = ()  # Pearson's r of advantage and data size, by model size

    @property
    def name(self) -> str:
        """The rule, the network and a defense on top."""
        return name(self.labels)


class ScoringResult(NamedTuple):
    """The result of one way of scoring, as means over clients and seeds."""

    batches: str  # the other examples of a scoring batch
    updates: int  # number that the attacker holds
    server: float | None  # advantage
    clients: float | None
    auc: float | None  # of the clients


@dataclass(frozen=True)
class ScoringComparison:
    """One attack on one federation in several ways of scoring: the one of the other tables, then the others."""

    labels: Mapping[str, Any]
    attack: str
    found: Sequence[ScoringResult]

    @property
    def name(self) -> str:
        """The rule and the network of the federation."""
        return name(self.labels)


def is_submodel(row: Row) -> bool:
    """Return True if a row is of a federation over sub-models."""
    return "submodels" in row.extra


def parties(rows: Sequence[Row]) -> list[Party]:
    """Return every client and server, one line for each attack that was run."""
    groups: dict[tuple[Who, str], dict[str, list[Row]]] = {}
    plain = plain_views(rows)
    for row in rows:
        if "scope" in row.extra and way_of(row) in (None, plain.get(asker_of(row))):
            who = Who(tuple(labels_of(row).items()), row.extra["client"])
            groups.setdefault((who, row.attack or ""), {}).setdefault(row.metric, []).append(row)
    lines = []
    for (who, attack), measures in groups.items():
        if attack:
            accuracy = groups.get((who, ""), {}).get("test_accuracy", [])
            first = next(iter(measures.values()))[0]
            sizes = sorted({row.extra["data_size"] for row in measures["advantage"]})
            size = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            rows_by_metric = measures | {"test_accuracy": accuracy}
            cells = {field: over_seeds(rows_by_metric.get(metric, [])) for field, metric in MEASURES.items()}
            labels, parameters = dict(who.labels), first.extra["parameters"]
            lines.append(Party(labels, who.client, size, parameters, attack, **cells, rows=rows_by_metric))
    return lines


def federations(lines: Sequence[Party]) -> list[SubmodelPoint]:
    """Return one line a federation and attack, in the order they were run.

    Clients share the test examples, so their accuracies are not independent. An attack uses each client's members.
    """
    groups: dict[AttackedFederation, list[Party]] = {}
    for line in lines:
        groups.setdefault(AttackedFederation(tuple(line.labels.items()), line.attack), []).append(line)
    result = []
    for (_, attack), group in groups.items():
        clients = [line for line in group if line.client is not None]
        server = next((line for line in group if line.client is None), None)
        measured = {name: [row for line in clients for row in line.rows.get(name, ())] for name in MEASURES.values()}
        accuracy = over_clients(measured["test_accuracy"], average_on_same)
        advantage = over_clients(measured["advantage"], average)
        cells = [line.advantage for line in clients]
        excluded = [cell.note or "" for cell in cells if cell is not None and cell.value is None]
        sized = by_size(measured["advantage"])
        result.append(
            SubmodelPoint(group[0].labels, server, accuracy, advantage, len(clients), attack, excluded, sized)
        )
    return result


def not_attacked(rows: Sequence[Row]) -> list[SubmodelPoint]:
    """Return federations with known accuracy only, by the last round that was evaluated."""
    groups: dict[tuple[tuple[str, Any], ...], list[Row]] = {}
    attacked = {tuple(labels_of(row).items()) for row in rows if "scope" in row.extra and row.attack}
    for row in rows:
        key = tuple(labels_of(row).items())
        if is_submodel(row) and "round" in row.extra and not row.extra.get("advice") and key not in attacked:
            groups.setdefault(key, []).append(row)
    result = []
    for key, group in groups.items():
        last = max(row.extra["round"] for row in group)
        end = [row for row in group if row.extra["round"] == last and row.extra.get("client") is None]
        server, clients = (
            over_seeds([row for row in end if row.metric == metric]) for metric in ("test_accuracy", "client_accuracy")
        )
        labels = dict(key)
        party = Party(labels, None, "", 0, "", server, None, None, {})
        result.append(SubmodelPoint(labels, party, clients, None, 0))
    return result


def asked(rows: Sequence[Row]) -> list[ScoringComparison]:
    """Return every attack that scored in several ways."""
    plain = plain_views(rows)
    groups: dict[AttackedFederation, dict[tuple[str, int], list[Row]]] = {
        asker: {view: []} for asker, view in plain.items()
    }
    for row in rows:
        if (view := way_of(row)) is not None:
            groups[asker_of(row)].setdefault(view, []).append(row)
    return [
        ScoringComparison(
            dict(asker.labels), asker.attack, [_found(*view, view_rows) for view, view_rows in views.items()]
        )
        for asker, views in groups.items()
        if len(views) > 1
    ]


def _found(batches: str, updates: int, rows: Sequence[Row]) -> ScoringResult:
    def mean(metric: str, scope: str) -> float | None:
        measured = [row.value for row in rows if row.metric == metric and row.extra["scope"] == scope]
        values = [value for value in measured if value is not None]
        return sum(values) / len(values) if values else None

    return ScoringResult(
        batches, updates, mean("advantage", "server"), mean("advantage", "client"), mean("auc", "client")
    )


def name(labels: Mapping[str, Any]) -> str:
    """Return the name of a federation: a channel rule on the server's network, augmentation, and the defense on top.

    Without large clients the name also says if uncovered cells are kept.

    Without large clients, whether cells are kept.

    Example:
        >>> name({"submodels": "none", "model": "mapp-cnn-8", "defense": "none"})
        'fedavg, mapp-cnn-8'
    """
    rule = "fedavg" if labels["submodels"] == "none" else str(labels["submodels"])
    text = f"{rule}, {labels['model']}"
    if labels.get("large_clients") == 0 and labels.get("uncovered") == "keep" and not rule.startswith("local"):
        text += ", uncovered kept"
    text += ", crops and flips" if labels.get("augment") else ""
    return text if labels["defense"] in ("none", None) else f"{text}, {labels['defense']}"


def labels_of(row: Row) -> dict[str, Any]:
    """Return the labels that tell a federation from others."""
    names = ("run", "submodels", "large_clients", "uncovered", "augment")
    extra = {key: row.extra[key] for key in names if key in row.extra}
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense} | extra


def plain_views(rows: Iterable[Row]) -> dict[AttackedFederation, tuple[str, int]]:
    """Return each attack's configured way of scoring: its first row has it, and comparisons come later."""
    views: dict[AttackedFederation, tuple[str, int]] = {}
    for row in rows:
        if (view := way_of(row)) is not None:
            views.setdefault(asker_of(row), view)
    return views


def way_of(row: Row) -> tuple[str, int] | None:
    """Return the other examples of a scoring batch and the number of updates held; None if a row has neither."""
    batches = row.extra.get("batches") if "scope" in row.extra else None
    return None if batches is None else (batches, row.extra.get("updates", 1))


def asker_of(row: Row) -> AttackedFederation:
    """Return the attack that a row is of."""
    return AttackedFederation(tuple(labels_of(row).items()), row.attack or "")


def over_seeds(rows: Sequence[Row]) -> SummaryCell | None:
    """Return the mean over seeds; its interval is that of a single seed, or the range of several."""
    known = _estimates(rows)
    note = next((row.note for row in rows if row.note), None)
    if not known:
        return SummaryCell(None, None, None, note) if rows else None
    if len(known) == 1:
        (row,) = (row for row in rows if row.value is not None)
        return SummaryCell(row.value, row.low, row.high, note)
    return _cell([estimate.value for estimate in known], note)


def over_clients(rows: Iterable[Row], average: Callable[[Sequence[Estimate]], Estimate]) -> SummaryCell | None:
    """Return the average client: one seed has the clients' joint interval, several the range of their means."""
    seeds: dict[int, list[Row]] = {}
    for row in rows:
        seeds.setdefault(row.seed, []).append(row)
    means = [average(known) for known in map(_estimates, seeds.values()) if known]
    if not means:
        return None
    return SummaryCell(*means[0][:3]) if len(means) == 1 else _cell([mean.value for mean in means])


def by_size(rows: Iterable[Row]) -> list[BySize]:
    """Return Pearson's r by model size: of clients with at least the paper's number of examples, or of all.

    All clients count where too few are that large.
    """
    points: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if row.value is not None:
            points.setdefault(row.extra["parameters"], []).append((row.extra["data_size"], row.value))
    tried = [
        (size, exposure_correlation(clients, least), least)
        for size, clients in points.items()
        for least in (SMALLEST, 0)
    ]
    correlations = [BySize(size, r, least) for size, r, least in tried if r is not None]
    return list({x.parameters: x for x in reversed(correlations)}.values())[::-1]


def _cell(values: Sequence[float], note: str | None = None) -> SummaryCell:
    return SummaryCell(sum(values) / len(values), min(values), max(values), note)


def _estimates(rows: Iterable[Row]) -> list[Estimate]:
    return [
        Estimate(row.value, row.value if row.low is None else row.low, row.value if row.high is None else row.high)
        for row in rows
        if row.value is not None
    ]
