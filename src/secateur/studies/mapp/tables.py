"""Results of mapp_fl's federations, and tables with the paper's claims, judged against intervals.

They are about exposure by dataset and model size (Fig. 1, Table 3) and about channel rules (Tables 2, 4, 5 and 6,
Figs. 3 and 4). Two are not in the paper: stronger attackers, and further defenses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from operator import sub
from typing import Any, ClassVar, Literal, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import (
    SMALLEST,
    Measure,
    average_on_same,
    combine,
    exposure_correlation,
    mean,
    mean_correlation,
)
from secateur.metrics.membership import Estimate
from secateur.report.summary import estimate
from secateur.runs.rows import Row
from secateur.studies import read_data
from secateur.studies.results import Results
from secateur.studies.table import Cases, Cells, TableLine, Tabulated, find_printed, negate

MIXED = "mixed"  # the batches in which examples are scored
INDEPENDENT = ":coupling=independent"
FIXED_OVER_DRAWN = {"heterofl-r": "osr", "mapp-fl-r": "gsr", "ufr": "fdropout"}  # rules with fixed channel sets
YEOM_ONLY = "met Yeom only; LiRA and RMIA with shadow federations are stronger"
QUERIES = "How the attacker asks: Yeom's advantage on the average client and server, over all federations here"


class MappFederation(NamedTuple):
    """One federation over its seeds."""

    submodels: str
    model: str
    large: int
    defense: str = "none"
    uncovered: str = "zero"

    @property
    def unit(self) -> int:
        """U of the server's network."""
        last = self.model.rpartition("-")[2]
        return int(last) if last.isdigit() else 0

    @property
    def title(self) -> str:
        """The name in tables."""
        rule = "fedavg" if self.submodels == "none" else self.submodels
        kept = "" if self.uncovered == "zero" else f" (uncovered: {self.uncovered})"
        return (rule if self.defense == "none" else f"{rule} + {self.defense}") + kept

    @property
    def alone(self) -> bool:
        """True if the clients train alone."""
        return name_of(self.submodels) == "local"


class Query(NamedTuple):
    """The queries of an attack; the defaults are those of the paper's numbers."""

    attack: str = "yeom"
    batches: str = MIXED
    updates: int = 1


class Metric(NamedTuple):
    """A measure of a federation's server, of its average client, or of the average client with a smaller model."""

    name: str
    query: Query | None = None  # None: not a measure of an attack
    of: Literal["server", "clients", "small"] = "clients"


YEOM = Query()
METRICS = {
    "server_accuracy": Metric("test_accuracy", of="server"),
    "server_advantage": Metric("advantage", YEOM, "server"),
    "client_accuracy": Metric("test_accuracy"),
    "client_advantage": Metric("advantage", YEOM),
    "small_accuracy": Metric("test_accuracy", of="small"),
}
ACCURACY, EXPOSURE, SERVER = (METRICS[name] for name in ("client_accuracy", "client_advantage", "server_accuracy"))


@dataclass(frozen=True)
class MappResults(Results[MappFederation]):
    """The rows of one study about clients and servers after the last round."""

    paper: ClassVar[str] = "mapp"
    smallest: int = SMALLEST  # examples of a client that counts in a correlation

    def key_of(self, row: Row) -> MappFederation | None:
        """Return the federation of a row about a last model; None for other rows."""
        extra = row.extra
        if "scope" not in extra:
            return None
        defense, uncovered = row.defense or "none", extra.get("uncovered", "zero")
        return MappFederation(extra["submodels"], row.model, extra["large_clients"], defense, uncovered)

    def attack_of(self, row: Row) -> Query | None:
        """Return the queries of a row's attack."""
        if row.attack is None:
            return None
        return Query(row.attack, row.extra.get("batches", MIXED), row.extra.get("updates", 1))

    def client(self, federation: MappFederation, client: int, metric: str, query: Query | None = None) -> Measure:
        """Return the metric of one client, by seed."""
        return self.of(federation, metric, query, scope="client", client=client)

    def clients(
        self, federation: MappFederation, metric: str, query: Query | None = None, small: bool = False
    ) -> dict[int, dict[int, Estimate]]:
        """Return the metric of every client, or of those with smaller models, by seed and client."""
        by_seed: dict[int, dict[int, Estimate]] = {}
        for row in self.rows_of(federation, metric, query, scope="client"):
            if not (small and row.extra["rate"] == 1):
                by_seed.setdefault(row.seed, {})[row.extra["client"]] = estimate(row)
        return by_seed

    def value(self, federation: MappFederation | None, metric: Metric) -> Measure:
        """Return a metric by seed; it is empty if it was not measured.

        Clients share the test examples, and attacks on them the non-members, so one seed's mean over clients is no more
        certain than each. Only small clients count in a federation of clients that train alone, as in the paper.
        """
        if federation is None or metric.of == "server":
            return self.of(federation, metric.name, metric.query, scope="server")
        by_seed = self.clients(federation, metric.name, metric.query, federation.alone or metric.of == "small")
        return {seed: average_on_same(list(clients.values())) for seed, clients in by_seed.items()}

    def points(self, federation: MappFederation) -> dict[int, list[tuple[int, float]]]:
        """Return (dataset size, advantage) of every client, by seed."""
        points: dict[int, dict[int, tuple[int, float]]] = {}  # by seed and client: joined runs may both have a client
        for row in self.rows_of(federation, "advantage", YEOM, scope="client"):
            points.setdefault(row.seed, {})[row.extra["client"]] = (row.extra["data_size"], row.value or 0.0)
        return {seed: [*clients.values()] for seed, clients in points.items()}

    def less(
        self, one: MappFederation | None, other: MappFederation | None, metric: Any, than: Any = None
    ) -> Estimate | None:
        """Return one federation's metric less the other's.

        `metric` is a Metric or the title of one; `than` is the other's metric, if it is another one.
        """
        chosen = METRICS[metric] if isinstance(metric, str) else metric
        return combine(sub, self.value(one, chosen), self.value(other, than or chosen))


def mark_unmet(tabulate: Callable[[MappResults], Tabulated]) -> Callable[[MappResults], Tabulated]:
    """Return a table's function that marks lines of exposure where only Yeom's attack was met."""

    @wraps(tabulate)
    def tabulate_marked(results: MappResults) -> Tabulated:
        lines, findings = tabulate(results)
        if {name_of(query.attack) for query in results.attacks} == {YEOM.attack}:
            lines = [_mark_exposed(line) for line in lines]
        return lines, findings

    return tabulate_marked


def _mark_exposed(line: TableLine) -> TableLine:
    """Return a line with the mark, if it has a measure of an attack."""
    measured = {name for name, cell in line.cells.items() if isinstance(cell, Estimate)}
    if YEOM_ONLY in line.mark or all(name.endswith("accuracy") for name in measured):
        return line
    return replace(line, mark="; ".join(filter(None, (line.mark, YEOM_ONLY))))


@mark_unmet
def rules(results: MappResults) -> Tabulated:
    """Return Table 5 and Fig. 4: every channel rule with two large clients."""
    lines = [_rule_line(results, federation, "table_5") for federation in results.keys]
    known = {federation.submodels: federation for federation in results.select(defense="none", model="mapp-cnn-16")}
    fixed = {f"{x} over {y}": results.less(known.get(x), known.get(y), ACCURACY) for x, y in FIXED_OVER_DRAWN.items()}
    served = {
        name: results.less(rule, known.get("none"), SERVER)
        for name, rule in known.items()
        if name not in ("none", "local")
    }
    findings = [
        *results.judge("rules", trade_off=trade_off(results, "rules")),
        *results.judge("all_rules", fixed=fixed, served=served),
        *results.judge("baselines"),
    ]
    return lines, [finding for finding in findings if finding.measured != "not measured here"]


def trade_off(results: MappResults, table: str) -> Cases:
    """Return the cases of the best trade-off: as private as FDropout, and as accurate as HeteroFL.

    The paper gives no measure of it, but these words (Section 5.3). Each difference is moved by the bound of its own
    claim, and a case has the lower ends of the two: it lies above 0 only if both do, and below 0 if one does.
    """
    claims = read_data(results.paper, "claims")[table]
    moved: dict[str, list[list[float]]] = {}
    for claim in (claims[name] for name in ("as_private", "as_accurate")):
        for case, less in results.compare(claim, {}).items():
            if less is not None:
                moved.setdefault(case, []).append([number - claim["bound"] for number in less[:3]])
    return {case: Estimate(*map(min, *both)) for case, both in moved.items() if len(both) == 2}


@mark_unmet
def rules_and_clients(results: MappResults) -> Tabulated:
    """Return Table 5 as `rules` does, and Table 2 of the rules that it shows."""
    shown = ("none", "local", "mapp-fl")
    lines, findings = rules(results)
    more, others = by_client(
        replace(results, rows=[row for row in results.rows if row.extra.get("submodels") in shown])
    )
    clients = [replace(line, part="Client by client (Table 2)") for line in more if "client" in line.labels]
    return [*lines, *clients], [*findings, *others]


@mark_unmet
def by_client(results: MappResults) -> Tabulated:
    """Return Table 2: client by client, two of them large."""
    lines = []
    rows = results.rows_of(results.keys[0], "test_accuracy", scope="client")
    first = min(row.seed for row in rows)
    for client, size in sorted((row.extra["client"], row.extra["data_size"]) for row in rows if row.seed == first):
        cells: Cells = {}
        for federation in results.keys:
            name = f"{federation.title} ({federation.unit})"
            cells[f"{name} accuracy"] = mean(results.client(federation, client, "test_accuracy"))
            cells[f"{name} advantage"] = mean(results.client(federation, client, "advantage", YEOM))
        labels = {"client": str(client), "data size": str(size)}
        lines.append(TableLine(labels, cells, _table2(size, client)))
    lines += [
        replace(_rule_line(results, federation, "table_2_server"), part="Server and average client")
        for federation in results.keys
    ]
    mapp, local = (results.one(submodels=name) for name in ("mapp-fl", "local"))
    gains: Cases = {}
    if mapp is not None and local is not None:
        alone = results.clients(local, "test_accuracy", small=True)
        for client in sorted(next(iter(alone.values()), {})):
            accuracy = [results.client(federation, client, "test_accuracy") for federation in (mapp, local)]
            gains[f"client {client}"] = combine(sub, *accuracy)
    return lines, [*results.judge("every_client", gains=gains), *results.judge("clients")]


@mark_unmet
def by_large(results: MappResults) -> Tabulated:
    """Return Table 4 and Fig. 3: FDropout, HeteroFL and MaPP-FL by the number of large clients.

    The paper's numbers and claims are those of zeroed cells; federations that keep them have lines of their own.
    """
    lines = []
    for federation in sorted(results.keys, key=lambda federation: federation.large):
        labels = {"large clients": str(federation.large), "rule": federation.title}
        numbers = find_printed("mapp", "table_4", results.rows[0].dataset, str(federation.large), federation.submodels)
        paper = _paper(numbers) if federation.uncovered == "zero" else ""
        lines.append(TableLine(labels, summary(results, federation), paper))
    small, hetero = (results.one(submodels=name, large=0, uncovered="zero") for name in ("mapp-fl", "heterofl"))
    worse = {"average client": results.less(small, small, ACCURACY, SERVER)}
    as_good = {"average client": results.less(hetero, hetero, SERVER, ACCURACY)}
    large = results.judge("large", trade_off=trade_off(results, "large"))
    return lines, [*large, *results.judge("no_large", worse=worse, as_good=as_good)]


@mark_unmet
def couple_channels(results: MappResults) -> Tabulated:
    """Return Table 6: channels drawn layer by layer, or inputs and outputs independently."""
    lines, cases = [], Cases()
    for federation in results.keys:
        rule = federation.submodels.removesuffix(INDEPENDENT)
        coupling = "layer by layer" if rule == federation.submodels else "independent"
        labels = {"rule": rule, "inputs and outputs": coupling}
        paper = _paper(find_printed("mapp", "table_6", rule, coupling))
        lines.append(TableLine(labels, summary(results, federation), paper))
        if rule != federation.submodels:
            cases[rule] = results.less(results.other(federation, submodels=rule), federation, ACCURACY)
    return lines, results.judge("couplings", coupled=cases)


@mark_unmet
def correlations(results: MappResults) -> Tabulated:
    """Return Table 3: Pearson's r of log10 dataset size and advantage by network, of FedAvg's clients.

    Clients of one repeat share a model, so r is taken within a repeat, with Student's interval over repeats; of one
    repeat it is Fisher's over its clients. The paper's r is over the clients of all repeats, as is p.
    """
    lines, cases = [], Cases()
    for federation in results.keys:
        points = results.points(federation)
        known = {seed: exposure_correlation(clients, results.smallest) for seed, clients in points.items()}
        repeats = [one.r for one in known.values() if one is not None]
        r = repeats[0] if len(points) == len(repeats) == 1 else mean_correlation([one.value for one in repeats])
        together = exposure_correlation([pair for clients in points.values() for pair in clients], results.smallest)
        cells: Cells = {"r": "too few clients", "r over all clients": "", "p": "", "clients": "", "excluded": ""}
        if r is not None and together is not None:
            cells = {"r": r, "r over all clients": together.r, "p": f"{together.p:.2g}"}
            cells |= {"clients": str(together.clients), "excluded": str(together.excluded)}
        cases[federation.model] = None if r is None else negate(r)
        paper = find_printed("mapp", "table_3", results.rows[0].dataset, federation.model)
        parameters = find_printed("mapp", "parameters", federation.model) or ""
        labels = {"network": federation.model, "parameters": parameters}
        lines.append(TableLine(labels, cells, "" if paper is None else f"{paper:.2f}"))
    return lines, results.judge("correlations", negative=cases)


@mark_unmet
def complexity(results: MappResults) -> Tabulated:
    """Return Fig. 1: correlation of dataset size and advantage, and the average accuracy and advantage, by network."""
    lines, findings = correlations(results)
    for line, federation in zip(lines, results.keys, strict=True):
        line.cells.update(summary(results, federation))
    pairs = list(pairwise(sorted(results.keys, key=lambda federation: federation.unit)))
    for name, metric in (("advantage", EXPOSURE), ("clients' accuracy", ACCURACY)):
        cases = {f"{b.model} over {a.model}": results.less(b, a, metric) for a, b in pairs}
        findings += results.judge("sizes", {"measure": name}, rises=cases)
    return lines, findings


def attackers(results: MappResults) -> Tabulated:
    """Return a table of the methods under stronger attackers, to test their ranking (not in the paper)."""
    lines = []
    queries = [query for query in results.attacks if query.batches == YEOM.batches and query.updates == 1]
    for federation in results.keys:
        for query in queries:
            names = {"client_advantage": "advantage", "auc": "auc", "tpr_at_fpr_0.01": "tpr_at_fpr_0.01"}
            cells: Cells = {
                title: mean(results.value(federation, Metric(name, query))) for title, name in names.items()
            }
            cells["server_auc"] = mean(results.value(federation, Metric("auc", query, "server")))
            cells["client_accuracy"] = mean(results.value(federation, ACCURACY))
            labels = {"rule": federation.title, "network": federation.model, "attack": query.attack}
            lines.append(TableLine(labels, cells))
    mapp, hetero = (results.one(submodels=name) for name in ("mapp-fl", "heterofl"))
    large, small = (results.one(submodels="none", model=f"mapp-cnn-{unit}") for unit in (16, 8))

    def over(one: MappFederation | None, other: MappFederation | None, metric: str, asked: Iterable[Query]) -> Cases:
        """Return one federation's metric minus the other's, by attack; no cases without both."""
        if one is None or other is None:
            return {}
        return {
            f"{query.attack}: {one.title} {one.unit}": results.less(one, other, Metric(metric, query))
            for query in asked
        }

    thresholds = [query for query in queries if name_of(query.attack) == YEOM.attack]
    shadowed = [query for query in queries if query not in thresholds]
    ranked, anywhere = Cases(), Cases()
    for other in (large, small, hetero):
        # A threshold does not change the scores: all of Yeom's thresholds share one AUC.
        ranked |= over(other, mapp, "auc", [YEOM, *shadowed])
        anywhere |= over(other, mapp, "advantage", thresholds)
    lira = next((query for query in queries if query.attack == "lira"), None)
    stronger: Cases = {
        f"{x.title} {x.unit}": results.less(x, x, Metric("auc", lira), Metric("auc", YEOM)) if lira else None
        for x in results.keys
    }
    private, exposed = over(hetero, mapp, "auc", shadowed), over(large, small, "auc", shadowed)
    cases = {"ranked": ranked, "anywhere": anywhere, "stronger": stronger, "private": private, "exposed": exposed}
    return lines, results.judge("attackers", **cases)


@mark_unmet
def add_defenses(results: MappResults) -> Tabulated:
    """Return a table of sub-models with pruned uploads and with withheld weights (not in the paper)."""
    lines = [
        TableLine({"rule": federation.submodels, "defense": federation.defense}, summary(results, federation))
        for federation in results.keys
    ]
    return lines, results.judge("defenses")


def by_query(results: MappResults) -> list[TableLine]:
    """Return one line per mode of Yeom's attack: batches in which examples are scored, and number of updates."""
    queries = [query for query in results.attacks if query.attack == "yeom"]
    # Clients that send updates are attacked in all modes.
    senders = [federation for federation in results.keys if federation.submodels != "local"]
    lines = []
    for query in queries if len(queries) > 1 else []:
        cells: Cells = {
            title: average_all([results.value(sender, metric) for sender in senders])
            for title, metric in (
                ("client_advantage", Metric("advantage", query)),
                ("server_advantage", Metric("advantage", query, "server")),
                ("client_auc", Metric("auc", query)),
            )
        }
        labels = {"scoring batches": query.batches, "updates": str(query.updates)}
        lines.append(TableLine(labels, cells, mark="as above" if query == YEOM else "", part=QUERIES))
    return lines


def average_all(measures: list[Measure]) -> Estimate | None:
    """Return the mean over federations, whose clients hold the same examples, then over seeds."""
    known = [measure for measure in measures if measure]
    seeds = set[int].intersection(*map(set, known)) if known else set()
    return mean({seed: average_on_same([measure[seed] for measure in known]) for seed in sorted(seeds)})


def summary(results: MappResults, federation: MappFederation) -> Cells:
    """Return the accuracy and advantage of the server and of the average client."""
    metrics = {title: metric for title, metric in METRICS.items() if metric.of != "small"}
    return {
        title: None if federation.alone and metric.of == "server" else mean(results.value(federation, metric))
        for title, metric in metrics.items()
    }


def _rule_line(results: MappResults, federation: MappFederation, table: str) -> TableLine:
    """Return the line of a rule, marked if its average client is not the average of all clients."""
    paper = _paper(find_printed("mapp", table, federation.submodels, federation.model))
    mark = "the average of its small clients" if federation.alone else ""
    labels = {"rule": federation.title, "network": federation.model}
    return TableLine(labels, summary(results, federation), paper, mark)


def _table2(size: int, client: int) -> str:
    """Return the paper's numbers of the client, if its size is that of Table 2's federation."""
    table = find_printed("mapp", "table_2")
    if client >= len(table["sizes"]) or table["sizes"][client] != size:
        return ""
    alone, mapp = table["local"]["accuracy"][client], table["MaPP-FL"]
    numbers: dict[str, tuple[float, ...]] = {
        name: (table[name]["accuracy"], table[name]["advantage"][client]) for name in ("large", "small")
    }
    numbers |= {} if alone is None else {"local": (alone,)}
    numbers |= {"MaPP-FL": (mapp["accuracy"][client], mapp["advantage"][client])}
    return ", ".join(f"{name} {' / '.join(f'{value:.2f}' for value in pair)}" for name, pair in numbers.items())


def _paper(numbers: list[float | None] | None) -> str:
    """Format accuracy and advantage of the server, then of the average client; a side without numbers is left out.

    Example:
        >>> _paper([78.17, 2.03, 76.64, 4.53]), _paper([None, None, 52.52, None])
        ('server 78.17 / 2.03, clients 76.64 / 4.53', 'clients 52.52 / -')
    """
    sides = {"server": (numbers or [])[:2], "clients": (numbers or [])[2:]}
    parts = [
        f"{name} {' / '.join('-' if value is None else f'{value:.2f}' for value in pair)}"
        for name, pair in sides.items()
        if any(value is not None for value in pair)
    ]
    return ", ".join(parts)
