"""Federations over sub-models: accuracy and exposure of clients and servers, as means over clients and seeds.

An attack may score in several ways. The tables show the configured way, and `compare_scorings` the others beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.evaluation.submodel_advice import Advice
from secateur.metrics.estimates import SMALLEST, Correlation, average_on_same, exposure_correlation
from secateur.metrics.estimates import average as average_estimates
from secateur.metrics.membership import Estimate
from secateur.report import table
from secateur.report.summary import Labels, SummaryCell, average, group_by, select_rows, summarise_cell
from secateur.report.table import Column, ReportTable, TableCell, share_column, value_column
from secateur.runs.rows import Row

FEDERATION = ("run", "submodels", "large_clients", "uncovered", "augment")  # labels that tell federations apart
FederationKey = tuple[tuple[str, Any], ...]  # the labels of a federation
Scoring = tuple[str, int]  # the other examples of a scoring batch, and the number of updates held


class SizeCorrelation(NamedTuple):
    """The correlation of advantage and data size over clients of one model size."""

    parameters: int
    correlation: Correlation
    smallest: int  # number of examples of a client that counts

    @property
    def clients(self) -> str:
        """The clients that r is computed over, in words."""
        least = f" with {self.smallest} examples or more" if self.smallest else ""
        return f"{self.correlation.clients} of size {self.parameters:,}{least}"


@dataclass(frozen=True)
class Party:
    """A client or a server under one attack: means over seeds, and the range of several or one seed's interval."""

    labels: Labels
    client: int | None  # None: the server
    attack: str
    rows: Mapping[str, Sequence[Row]]  # by metric

    @property
    def rule(self) -> str:
        """The rule and the network of the federation."""
        return name_federation(self.labels)

    @property
    def name(self) -> str:
        """The name on the page."""
        return "server" if self.client is None else f"client {self.client}"

    @property
    def data_size(self) -> str:
        """The number of examples; of several seeds the least and the most."""
        sizes = sorted({row.extra["data_size"] for row in self.rows["advantage"]})
        return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"

    @property
    def parameters(self) -> int:
        """The size of the model."""
        return int(self.rows["advantage"][0].extra["parameters"])

    def cell(self, metric: str) -> SummaryCell | None:
        """Return a measure over the seeds; None if no seed has it."""
        rows = self.rows.get(metric)
        return summarise_cell(rows) if rows else None


@dataclass(frozen=True)
class SubmodelPoint:
    """One federation under one attack, a point on the plane: its server, and its average client."""

    labels: Labels
    server: Party | None
    accuracy: SummaryCell | None
    advantage: SummaryCell | None
    clients: int
    attack: str = ""
    excluded: Sequence[str] = ()  # reasons of clients outside the mean advantage, one each
    by_size: Sequence[SizeCorrelation] = ()  # Pearson's r of advantage and data size, by model size

    @property
    def name(self) -> str:
        """The rule, the network and a defense on top."""
        return name_federation(self.labels)

    def server_cell(self, metric: str) -> SummaryCell | None:
        """Return a measure of the server; None if it has none."""
        return self.server.cell(metric) if self.server else None


@dataclass(frozen=True)
class ScoringResult:
    """The result of one way of scoring of one attack, as means over clients and seeds."""

    labels: Labels
    attack: str
    batches: str  # the other examples of a scoring batch
    updates: int  # number that the attacker holds
    server: float | None  # advantage
    clients: float | None
    auc: float | None  # of the clients


def is_submodel(row: Row) -> bool:
    """Return True if a row is of a federation over sub-models."""
    return "submodels" in row.extra


def list_parties(rows: Sequence[Row]) -> list[Party]:
    """Return every client and server, one line for each attack that was run."""
    configured = _find_configured(rows)
    scoped = [
        row
        for row in rows
        if "scope" in row.extra and _read_scoring(row) in (None, configured.get((_federation_key(row), row.attack)))
    ]
    groups = group_by(scoped, lambda row: (_federation_key(row), row.extra["client"], row.attack))
    parties = []
    for (federation, client, attack), same in groups.items():
        if attack:
            unattacked = groups.get((federation, client, None), [])
            accuracy = [row for row in unattacked if row.metric == "test_accuracy"]
            by_metric = group_by(same, lambda row: row.metric) | {"test_accuracy": accuracy}
            parties.append(Party(dict(federation), client, attack, by_metric))
    return parties


def summarise_federations(parties: Sequence[Party]) -> list[SubmodelPoint]:
    """Return one line a federation and attack, in the order they were run.

    Clients share the test examples, so their accuracies are not independent. An attack uses each client's members.
    """
    groups = group_by(parties, lambda party: (tuple(party.labels.items()), party.attack))
    result = []
    for (_, attack), group in groups.items():
        clients = [party for party in group if party.client is not None]
        server = next((party for party in group if party.client is None), None)
        accuracies, advantages = (
            [row for party in clients for row in party.rows.get(metric, ())]
            for metric in ("test_accuracy", "advantage")
        )
        cells = [party.cell("advantage") for party in clients]
        excluded = [cell.note or "" for cell in cells if cell is not None and cell.value is None]
        accuracy = average_clients(accuracies, average_on_same)
        advantage, sized = average_clients(advantages, average_estimates), correlate_by_size(advantages)
        point = SubmodelPoint(group[0].labels, server, accuracy, advantage, len(clients), attack, excluded, sized)
        result.append(point)
    return result


def summarise_unattacked(rows: Sequence[Row]) -> list[SubmodelPoint]:
    """Return federations with known accuracy only, by the last round that was evaluated."""
    attacked = {_federation_key(row) for row in rows if "scope" in row.extra and row.attack}
    evaluated = (row for row in rows if is_submodel(row) and "round" in row.extra and not row.extra.get("advice"))
    result = []
    for key, group in group_by(evaluated, _federation_key).items():
        if key not in attacked:
            last = max(row.extra["round"] for row in group)
            server, clients = (
                select_rows(group, metric, round=last, client=None) for metric in ("test_accuracy", "client_accuracy")
            )
            party = Party(dict(key), None, "", {"test_accuracy": server})
            result.append(SubmodelPoint(dict(key), party, summarise_cell(clients) if clients else None, None, 0))
    return result


def compare_scorings(rows: Sequence[Row]) -> list[ScoringResult]:
    """Return the ways of scoring of every attack that has several: the configured one, then the others."""
    scored = [row for row in rows if _read_scoring(row) is not None]
    results = []
    for (federation, attack), same in group_by(scored, lambda row: (_federation_key(row), row.attack or "")).items():
        scorings = group_by(same, lambda row: (row.extra["batches"], row.extra.get("updates", 1)))
        for (batches, updates), group in scorings.items() if len(scorings) > 1 else ():
            server, clients, auc = (
                average(row.value for row in select_rows(group, metric, scope=scope))
                for metric, scope in (("advantage", "server"), ("advantage", "client"), ("auc", "client"))
            )
            results.append(ScoringResult(dict(federation), attack, batches, updates, server, clients, auc))
    return results


def _find_configured(rows: Iterable[Row]) -> dict[tuple[FederationKey, str | None], Scoring]:
    """Return each attack's configured way of scoring: its first row has it, and comparisons come later."""
    scorings: dict[tuple[FederationKey, str | None], Scoring] = {}
    for row in rows:
        if (scoring := _read_scoring(row)) is not None:
            scorings.setdefault((_federation_key(row), row.attack), scoring)
    return scorings


def _read_scoring(row: Row) -> Scoring | None:
    """Return the other examples of a scoring batch and the number of updates held; None if a row has neither."""
    batches = row.extra.get("batches") if "scope" in row.extra else None
    return None if batches is None else (batches, row.extra.get("updates", 1))


def _federation_key(row: Row) -> FederationKey:
    return tuple(read_federation(row).items())


def read_federation(row: Row) -> dict[str, Any]:
    """Return the labels that tell a federation from others."""
    extra = {key: row.extra[key] for key in FEDERATION if key in row.extra}
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense} | extra


def name_federation(labels: Labels) -> str:
    """Return the name of a federation: a channel rule on the server's network, augmentation, and the defense on top.

    Without large clients the name also says if uncovered cells are kept.

    Example:
        >>> name_federation({"submodels": "none", "model": "mapp-cnn-8", "defense": "none"})
        'fedavg, mapp-cnn-8'
    """
    rule = "fedavg" if labels["submodels"] == "none" else str(labels["submodels"])
    text = f"{rule}, {labels['model']}"
    if labels.get("large_clients") == 0 and labels.get("uncovered") == "keep" and not rule.startswith("local"):
        text += ", uncovered kept"
    text += ", crops and flips" if labels.get("augment") else ""
    return text if labels["defense"] in ("none", None) else f"{text}, {labels['defense']}"


def average_clients(rows: Iterable[Row], combine: Callable[[Sequence[Estimate]], Estimate]) -> SummaryCell | None:
    """Return the average client: one seed has the clients' joint interval, several the range of their means."""
    seeds = group_by((row for row in rows if row.value is not None), lambda row: row.seed)
    means = [combine(list(map(_estimate, same))) for same in seeds.values()]
    if not means:
        return None
    values = [mean.value for mean in means]
    return SummaryCell(*means[0][:3]) if len(means) == 1 else SummaryCell(average(values), min(values), max(values))


def _estimate(row: Row) -> Estimate:
    """Return a row's value; a missing end of its interval is the value."""
    assert row.value is not None
    return Estimate(row.value, row.value if row.low is None else row.low, row.value if row.high is None else row.high)


def correlate_by_size(rows: Iterable[Row]) -> list[SizeCorrelation]:
    """Return Pearson's r by model size: of clients with at least the paper's number of examples, or of all.

    All clients count where too few are that large.
    """
    known = (row for row in rows if row.value is not None)
    correlations = []
    for parameters, same in group_by(known, lambda row: row.extra["parameters"]).items():
        points = [(row.extra["data_size"], row.value) for row in same if row.value is not None]
        tried = ((exposure_correlation(points, least), least) for least in (SMALLEST, 0))
        correlations += [SizeCorrelation(parameters, r, least) for r, least in tried if r is not None][:1]
    return correlations


def build_tables(rows: Sequence[Row], parties: Sequence[Party]) -> dict[str, ReportTable]:
    """Return the tables of federations, of ways of scoring, and of clients; only those that have lines."""
    rule, large = Column("rule", lambda line: line.name), _count_column("large clients", "large_clients")
    attack = Column("attack", lambda line: line.attack or "-")
    federations = [
        rule,
        table.label_column("dataset", "data"),
        large,
        attack,
        share_column("server accuracy", lambda line: line.server_cell("test_accuracy")),
        share_column("server advantage", lambda line: line.server_cell("advantage")),
        share_column("average client's accuracy", lambda line: line.accuracy),
        share_column("average client's advantage", lambda line: line.advantage, _count_attacked),
        Column("r with data size", _build_correlation_cell, number=True),
    ]
    scorings = [
        Column("rule", lambda line: name_federation(line.labels)),
        large,
        attack,
        Column("scoring batches", lambda line: line.batches),
        Column("updates", lambda line: str(line.updates), number=True),
        value_column("server advantage", lambda line: line.server, "{:.1%}"),
        value_column("client advantage", lambda line: line.clients, "{:.1%}"),
        value_column("client AUC", lambda line: line.auc, "{:.3f}"),
    ]
    clients = [
        Column("rule", lambda line: line.rule),
        large,
        Column("party", lambda line: line.name),
        Column("data size", lambda line: line.data_size, number=True),
        Column("model size", lambda line: f"{line.parameters:,}", number=True),
        attack,
        share_column("test accuracy", lambda line: line.cell("test_accuracy")),
        share_column("advantage", lambda line: line.cell("advantage")),
        Column("AUC", lambda line: _build_auc_cell(line.cell("auc")), number=True),
    ]
    points = summarise_federations(parties) + summarise_unattacked(rows)
    plans = {
        "submodel-federations": ("Federations over sub-models", points, federations),
        "submodel-scorings": ("Ways of scoring", compare_scorings(rows), scorings),
        "submodel-clients": ("Clients and servers", parties, clients),
    }
    return {
        key: table.build_table(caption, lines, columns, id=key, wide=True)
        for key, (caption, lines, columns) in plans.items()
        if lines
    }


def build_advice_table(advice: Sequence[Advice]) -> ReportTable:
    """Return the table of the expected values of each client at each model size, with the advised size."""
    columns = [
        Column("client", lambda one: str(one.client), number=True),
        Column("data size", lambda one: str(one.data_size), number=True),
    ]
    for number, option in enumerate(advice[0].options):
        size = "whole model" if option.rate == 1 else f"{option.rate:g} of the channels"
        for field in ("accuracy", "advantage"):
            columns.append(share_column(f"{field}, {size}", _read_option(number, field)))
    advised = Column("advice", lambda one: TableCell("", reason=one.words))
    return table.build_table("Advice for every client", advice, [*columns, advised], wide=True)


def _read_option(number: int, field: str) -> Callable[[Advice], Any]:
    return lambda one: getattr(one.options[number], field)


def _count_column(heading: str, label: str) -> Column:
    return Column(heading, lambda line: str(line.labels[label]), number=True)


def _count_attacked(line: SubmodelPoint) -> str:
    return f"{line.clients - len(line.excluded)} of {line.clients} clients" if line.excluded else ""


def _build_auc_cell(cell: SummaryCell | None) -> TableCell:
    value = None if cell is None else cell.value
    return TableCell(
        "-" if value is None else f"{value:.3f}", value=value, measured=True, hover=None if cell is None else cell.note
    )


def _build_correlation_cell(line: SubmodelPoint) -> TableCell:
    """Return r of each model size with its interval and its clients, the first as the cell's value."""
    if not line.by_size:
        return TableCell("-", measured=True)
    texts = [(sized.correlation.r, sized.clients) for sized in line.by_size]
    small = [text for r, clients in texts for text in (f"{r.value:.2f}", f"[{r.low:.2f}, {r.high:.2f}]", clients)]
    return TableCell(small[0], tuple(small[1:]), texts[0][0].value, measured=True)
