"""Federations over sub-models: accuracy and exposure of clients and servers, as means over clients and seeds.

An attack may score in several ways. The tables show the configured way, and `compare_scorings` the others beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from secateur.evaluation.limits import average_trainings
from secateur.evaluation.submodel_advice import Advice
from secateur.metrics.estimates import SMALLEST, Correlation, average_on_same, exposure_correlation
from secateur.metrics.membership import Estimate
from secateur.report import summary, table
from secateur.report.summary import SummaryCell, SummaryLine, group_by, select_rows, summarise, summarise_cell
from secateur.report.table import Column, ReportTable, TableCell, label_column, measure_column
from secateur.report.verdict import describe_unmet
from secateur.runs.rows import Row

FEDERATION = ("run", "submodels", "large_clients", "uncovered", "augment")  # labels that tell federations apart
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


def is_submodel(row: Row) -> bool:
    """Return True if a row is of a federation over sub-models."""
    return "submodels" in row.extra


def read_federation(row: Row) -> dict[str, Any]:
    """Return the labels that tell a federation from others."""
    extra = {key: row.extra[key] for key in FEDERATION if key in row.extra}
    return {"model": row.model, "dataset": row.dataset, "defense": row.defense} | extra


def _read_attack(row: Row) -> dict[str, Any]:
    return read_federation(row) | {"attack": row.attack}


def _read_party(row: Row) -> dict[str, Any]:
    return read_federation(row) | {"client": row.extra["client"], "attack": row.attack}


def _read_scoring(row: Row) -> Scoring | None:
    """Return the other examples of a scoring batch and the number of updates held; None if a row has neither."""
    batches = row.extra.get("batches") if "scope" in row.extra else None
    return None if batches is None else (batches, row.extra.get("updates", 1))


def name_federation(labels: summary.Labels) -> str:
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


def summarise_parties(rows: Sequence[Row]) -> list[SummaryLine]:
    """Return every client and server (client None), one line for each attack, scored in the configured way."""
    configured: dict[str, Scoring] = {}  # an attack's first row has it; comparisons come later
    for row in rows:
        if (scoring := _read_scoring(row)) is not None:
            configured.setdefault(str(_read_attack(row)), scoring)
    scoped = [
        row
        for row in rows
        if "scope" in row.extra and _read_scoring(row) in (None, configured.get(str(_read_attack(row))))
    ]
    lines = summarise(scoped, _read_party)
    unattacked = {str(line.labels): line for line in lines if not line.labels["attack"]}
    parties = []
    for line in lines:
        if line.labels["attack"]:
            before = unattacked.get(str(line.labels | {"attack": None}), SummaryLine({}))
            accuracy = {name: cell for name, cell in before.cells.items() if name == "test_accuracy"}
            cells = line.cells | accuracy | {"client_advantage": line.cells["advantage"]}
            parties.append(SummaryLine(line.labels, cells, [*before.rows, *line.rows]))
    return parties


def summarise_federations(rows: Sequence[Row]) -> list[SummaryLine]:
    """Return one line a federation and attack, in the order they were run: its server, and its average client.

    Clients share the test examples, and attacks on them the non-members, so their results are not independent.
    Federations that were not attacked come last, with the accuracy of the last evaluated round.
    """
    parties = summarise_parties(rows)
    lines = []
    for group in group_by(parties, lambda line: str(line.labels | {"client": None})).values():
        clients = [row for line in group if line.labels["client"] is not None for row in line.rows]
        cells = {
            "client_accuracy": average_clients(select_rows(clients, "test_accuracy")),
            "client_advantage": average_clients(select_rows(clients, "advantage")),
        }
        for server in (line.cells for line in group if line.labels["client"] is None):
            cells |= {"server_accuracy": server.get("test_accuracy"), "server_advantage": server["advantage"]}
        known = {name: cell for name, cell in cells.items() if cell is not None}
        lines.append(SummaryLine(group[0].labels, known, clients))
    return lines + _summarise_unattacked(rows)


def _summarise_unattacked(rows: Sequence[Row]) -> list[SummaryLine]:
    attacked = {str(read_federation(row)) for row in rows if "scope" in row.extra and row.attack}
    evaluated = (row for row in rows if is_submodel(row) and "round" in row.extra and not row.extra.get("advice"))
    lines = []
    for line in summarise(evaluated, read_federation):
        if str(line.labels) not in attacked:
            last = max(row.extra["round"] for row in line.rows)
            server, clients = (
                select_rows(line.rows, name, round=last, client=None) for name in ("test_accuracy", "client_accuracy")
            )
            cells = {"server_accuracy": summarise_cell(server), "client_accuracy": summarise_cell(clients)}
            lines.append(SummaryLine(line.labels | {"attack": None}, cells))
    return lines


def compare_scorings(rows: Sequence[Row]) -> list[SummaryLine]:
    """Return the ways of scoring of every attack that has several: the configured one, then the others."""
    scored = [row for row in rows if _read_scoring(row) is not None]
    results = []
    for attack in summarise(scored, _read_attack):
        scorings = group_by(attack.rows, _read_scoring)
        for scoring, same in scorings.items() if len(scorings) > 1 else ():
            measures = {"server_advantage": ("advantage", "server"), "client_advantage": ("advantage", "client")}
            cells = {
                name: summary.average_cell(row.value for row in select_rows(same, metric, scope=scope))
                for name, (metric, scope) in (measures | {"auc": ("auc", "client")}).items()
            }
            labels = dict(zip(("batches", "updates"), scoring or (), strict=True))
            results.append(SummaryLine(attack.labels | labels, cells, same))
    return results


def list_excluded(line: SummaryLine) -> tuple[int, list[str]]:
    """Return the number of clients of a federation, and the reason of each client that could not be attacked."""
    advantages = [row for row in line.rows if row.metric == "advantage"]
    clients = [summarise_cell(same) for same in group_by(advantages, lambda row: row.extra["client"]).values()]
    return len(clients), [cell.note or "" for cell in clients if cell.value is None]


def average_clients(rows: Iterable[Row]) -> SummaryCell | None:
    """Return the average client, with the joint interval of one seed's clients, or that over trainings of several."""
    seeds = group_by(rows, lambda row: row.seed).values()
    means = [average_on_same([_estimate(row.value, row) for row in same if row.value is not None]) for same in seeds]
    return SummaryCell(*average_trainings(means, (-1.0, 1.0))[:3]) if means else None


def _estimate(value: float, row: Row) -> Estimate:
    """Return a row's value; a missing end of its interval is the value."""
    return Estimate(value, value if row.low is None else row.low, value if row.high is None else row.high)


def correlate_by_size(rows: Iterable[Row]) -> list[SizeCorrelation]:
    """Return Pearson's r by model size: of clients with at least the paper's number of examples, or of all.

    All clients count where too few are that large.
    """
    correlations = []
    sizes = group_by(select_rows(rows, "advantage"), lambda row: row.extra["parameters"])
    for parameters, same in sizes.items():
        points = [(row.extra["data_size"], row.value) for row in same if row.value is not None]
        tried = ((exposure_correlation(points, least), least) for least in (SMALLEST, 0))
        correlations += [SizeCorrelation(parameters, r, least) for r, least in tried if r is not None][:1]
    return correlations


def build_tables(rows: Sequence[Row]) -> dict[str, ReportTable]:
    """Return the tables of federations, of ways of scoring, and of clients; only those that have lines."""
    names = [
        Column("rule", lambda line: name_federation(line.labels)),
        label_column("large_clients", "large clients", number=True),
        Column("attack", lambda line: line.labels["attack"] or "-"),
    ]
    federations = [
        *(label_column("dataset", "data"), measure_column("server_accuracy"), measure_column("server_advantage")),
        *(measure_column("client_accuracy"), Column(table.name_measure("client_advantage"), _build_advantage, True)),
        Column("r with data size", _build_correlation, number=True),
    ]
    scorings = [
        *(label_column("batches", "scoring batches"), label_column("updates", number=True)),
        *(measure_column("server_advantage"), measure_column("client_advantage", "client advantage")),
        measure_column("auc", "client AUC"),
    ]
    parties = [
        Column("party", lambda line: name_party(line.labels["client"])),
        Column("data size", _describe_size, number=True),
        Column("model size", lambda line: f"{line.rows[-1].extra['parameters']:,}", number=True),
        *(measure_column("test_accuracy"), measure_column("client_advantage", "advantage"), measure_column("auc")),
    ]
    plans = {
        "submodel-federations": ("Federations over sub-models", summarise_federations(rows), federations),
        "submodel-scorings": ("Ways of scoring", compare_scorings(rows), scorings),
        "submodel-clients": ("Clients and servers", summarise_parties(rows), parties),
    }
    return {
        key: table.build_table(caption, lines, names + columns, id=key, wide=True)
        for key, (caption, lines, columns) in plans.items()
        if lines
    }


def describe_unmet_clients(rows: Sequence[Row]) -> list[str]:
    """Return a sentence for each attacker known to be stronger than those that federations met."""
    return describe_unmet(filter(is_submodel, rows), _name_rule)


def _name_rule(row: Row) -> str:
    """Return the channel rule of a row, and the defense on top."""
    rule = "fedavg" if row.extra["submodels"] == "none" else str(row.extra["submodels"])
    return rule if row.defense in ("none", None) else f"{rule} with {row.defense}"


def name_party(client: int | None) -> str:
    """Return the name of a client, or of the server if there is none."""
    return "server" if client is None else f"client {client}"


def _describe_size(line: SummaryLine) -> str:
    """Return the number of examples; of several seeds the least and the most."""
    sizes = sorted({row.extra["data_size"] for row in line.rows if row.attack})
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def _build_advantage(line: SummaryLine) -> TableCell:
    """Return the average client's advantage, with the number of clients if some could not be attacked."""
    cell = table.build_measure(line, "client_advantage")
    clients, excluded = list_excluded(line)
    counted = (f"{clients - len(excluded)} of {clients} clients",) if excluded else ()
    return replace(cell, small=cell.small + counted)


def _build_correlation(line: SummaryLine) -> TableCell:
    """Return r of each model size with its interval and its clients, the first as the cell's value."""
    sized = [(x.correlation.r, x.clients) for x in correlate_by_size(line.rows)]
    texts = [text for r, clients in sized for text in (f"{r.value:.2f}", f"[{r.low:.2f}, {r.high:.2f}]", clients)]
    return TableCell(texts[0] if texts else "-", tuple(texts[1:]), sized[0][0].value if sized else None, measured=True)


def build_advice_table(advice: Sequence[Advice]) -> ReportTable:
    """Return the table of the expected values of each client at each model size, with the advised size."""
    columns = [
        Column("client", lambda one: str(one.client), number=True),
        Column("data size", lambda one: str(one.data_size), number=True),
    ]
    for number, option in enumerate(advice[0].options):
        size = "whole model" if option.rate == 1 else f"{option.rate:g} of the channels"
        columns.append(Column(f"accuracy, {size}", partial(_build_option, number, "accuracy"), number=True))
        columns.append(Column(f"advantage, {size}", partial(_build_option, number, "advantage"), number=True))
    columns.append(Column("advice", lambda one: one.words))
    return table.build_table("Advice for every client", advice, columns, wide=True)


def _build_option(number: int, field: str, one: Advice) -> TableCell:
    """Return the expected accuracy or advantage of one model size for a client."""
    estimate = getattr(one.options[number], field)
    metric = f"client_{field}"
    cell = SummaryCell(None, None, None) if estimate is None else SummaryCell(*estimate)
    return table.build_measure(SummaryLine({}, {metric: cell}), metric)
