"""Tables of mapp_fl with the paper's claims, judged against intervals.

They are about exposure by dataset and model size (Fig. 1, Table 3) and about channel rules (Tables 2, 4, 5 and 6,
Figs. 3 and 4). Two are not in the paper: stronger attackers, and further defenses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from operator import sub

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, average_on_same, combine, exposure_correlation, mean
from secateur.metrics.membership import Estimate
from secateur.studies import read_data
from secateur.studies.claims import Cases, Finding, judge_claims, negate
from secateur.studies.mapp.results import (
    ACCURACY,
    EXPOSURE,
    METRICS,
    SERVER,
    YEOM,
    MappFederation,
    MappResults,
    Metric,
    Query,
)
from secateur.studies.table import Cells, TableLine, Tabulated, find_printed

INDEPENDENT = ":coupling=independent"
QUERIES = "How the attacker asks: Yeom's advantage on the average client and server, over all federations here"


def rules(results: MappResults) -> Tabulated:
    """Return Table 5 and Fig. 4: every channel rule with two large clients."""
    lines = [_rule_line(results, federation, "table_5") for federation in results.keys]
    known, named = _rules(results), _by_name(results)
    resampled = (("osr", "heterofl-r"), ("gsr", "mapp-fl-r"), ("fdropout", "ufr"))
    fixed = {f"{f} over {new}": results.compare(known.get(f), known.get(new), ACCURACY) for new, f in resampled}
    served = {name: results.compare(rule, named.get("large"), SERVER) for name, rule in known.items()}
    findings = [
        *_judge_pairs(results, "rules"),
        *judge_claims("mapp", "all_rules", fixed=fixed, served=served),
        *_judge_pairs(results, "baselines"),
    ]
    return lines, [finding for finding in findings if finding.measured != "not measured here"]


def rules_and_clients(results: MappResults) -> Tabulated:
    """Return Table 5 as `rules` does, and Table 2 of the rules that it shows."""
    shown = ("none", "local", "mapp-fl")
    lines, findings = rules(results)
    more, others = by_client(MappResults([row for row in results.rows if row.extra.get("submodels") in shown]))
    clients = [replace(line, part="Client by client (Table 2)") for line in more if "client" in line.labels]
    return [*lines, *clients], [*findings, *others]


def by_client(results: MappResults) -> Tabulated:
    """Return Table 2: client by client, two of them large."""
    lines = []
    sizes = results.sizes(results.keys[0])
    first = sizes[min(sizes)]
    for client in sorted(first):
        cells: Cells = {}
        for federation in results.keys:
            name = f"{federation.title} ({federation.unit})"
            cells[f"{name} accuracy"] = mean(results.client(federation, client, "test_accuracy"))
            cells[f"{name} advantage"] = mean(results.client(federation, client, "advantage", YEOM))
        labels = {"client": str(client), "data size": str(first[client])}
        lines.append(TableLine(labels, cells, _table2(first[client], client)))
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
    return lines, [*judge_claims("mapp", "every_client", gains=gains), *_judge_pairs(results, "clients")]


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
    mapp = {f"{x.large} large": x for x in results.select(submodels="mapp-fl", uncovered="zero")}
    cases: dict[str, Cases] = {}
    for name, claim in read_data("mapp", "claims")["large"].items():
        cases[name] = {}
        for case, x in mapp.items():
            higher, lower = (results.other(x, submodels=claim[side]) for side in ("higher", "lower"))
            cases[name][case] = results.compare(higher, lower, METRICS[claim["metric"]])
    small = mapp.get("0 large")
    hetero = None if small is None else results.other(small, submodels="heterofl")
    worse = {"average client": results.compare(small, small, ACCURACY, SERVER)}
    as_good = {"average client": results.compare(hetero, hetero, SERVER, ACCURACY)}
    findings = judge_claims("mapp", "large", **cases)
    return lines, [*findings, *judge_claims("mapp", "no_large", worse=worse, as_good=as_good)]


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
            cases[rule] = results.compare(results.other(federation, submodels=rule), federation, ACCURACY)
    return lines, judge_claims("mapp", "couplings", coupled=cases)


def correlations(results: MappResults, smallest: int) -> Tabulated:
    """Return Table 3: Pearson's r of log10 dataset size and advantage by network."""
    lines, cases = [], Cases()
    for federation in results.keys:
        result = exposure_correlation(results.points(federation), smallest)
        cells: Cells = {"r": "too few clients", "p": "", "clients": "", "excluded": ""}
        if result is not None:
            cells = {"r": result.r, "p": f"{result.p:.2g}"}
            cells |= {"clients": str(result.clients), "excluded": str(result.excluded)}
        cases[federation.model] = None if result is None else negate(result.r)
        paper = find_printed("mapp", "table_3", results.rows[0].dataset, federation.model)
        parameters = find_printed("mapp", "parameters", federation.model) or ""
        labels = {"network": federation.model, "parameters": parameters}
        lines.append(TableLine(labels, cells, "" if paper is None else f"{paper:.2f}"))
    return lines, judge_claims("mapp", "sizes", correlation=cases)


def complexity(results: MappResults, smallest: int) -> Tabulated:
    """Return Fig. 1: correlation of dataset size and advantage, and the average accuracy and advantage, by network."""
    lines, findings = correlations(results, smallest)
    for line, federation in zip(lines, results.keys, strict=True):
        line.cells.update(summary(results, federation))
    pairs = list(pairwise(sorted(results.keys, key=lambda federation: federation.unit)))
    for name, metric in (("advantage", EXPOSURE), ("clients' accuracy", ACCURACY)):
        cases = {f"{b.model} over {a.model}": results.compare(b, a, metric) for a, b in pairs}
        findings += judge_claims("mapp", "sizes", {"measure": name}, rises=cases)
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
            cells["client_accuracy"] = mean(results.value(federation, ACCURACY))
            labels = {"rule": federation.title, "network": federation.model, "attack": query.attack}
            lines.append(TableLine(labels, cells))
    mapp = results.one(submodels="mapp-fl")
    others = [x for x in results.keys if x != mapp and x.submodels in ("heterofl", "none")]

    def over(metric: str, compared: Iterable[Query]) -> Cases:
        """Return the metric of the other rules minus that of MaPP-FL."""
        return {
            f"{query.attack}: {other.title} {other.unit}": results.compare(other, mapp, Metric(metric, query))
            for query in (compared if mapp else ())
            for other in others
        }

    thresholds = [query for query in queries if name_of(query.attack) == YEOM.attack]
    # A threshold does not change the scores: all of Yeom's thresholds share one AUC.
    ranked = [query for query in queries if query == YEOM or query not in thresholds]
    lira = next((query for query in queries if query.attack == "lira"), None)
    stronger: Cases = {
        f"{x.title} {x.unit}": results.compare(x, x, Metric("auc", lira), Metric("auc", YEOM)) if lira else None
        for x in results.keys
    }
    ranked_cases, anywhere = over("auc", ranked), over("advantage", thresholds)
    return lines, judge_claims("mapp", "attackers", ranked=ranked_cases, anywhere=anywhere, stronger=stronger)


def add_defenses(results: MappResults) -> Tabulated:
    """Return a table of sub-models with pruned uploads and with withheld weights (not in the paper)."""
    lines = [
        TableLine({"rule": federation.submodels, "defense": federation.defense}, summary(results, federation))
        for federation in results.keys
    ]
    private, costly = Cases(), Cases()
    for federation in results.keys:
        if federation.defense != "none":
            bare = results.other(federation, defense="none")
            private[federation.title] = results.compare(bare, federation, EXPOSURE)
            costly[federation.title] = results.compare(bare, federation, SERVER)
    return lines, judge_claims("mapp", "defenses", private=private, costly=costly)


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


def _rules(results: MappResults) -> dict[str, MappFederation]:
    """Return the federations with a channel rule and without a defense, by rule."""
    return {x.submodels: x for x in results.select(defense="none") if x.submodels not in ("none", "local")}


def _by_name(results: MappResults) -> dict[str, MappFederation | None]:
    """Return the federations by the names that claims have for them."""
    small, large = results.fedavg()
    return {**_rules(results), "small": small, "large": large, "local": results.one(submodels="local")}


def _judge_pairs(results: MappResults, table: str) -> list[Finding]:
    """Judge the claims of a table that are about a metric of two federations each."""
    named, cases = _by_name(results), {}
    for name, claim in read_data("mapp", "claims")[table].items():
        metric = METRICS[claim["metric"]]
        case = claim.get("case", "server" if metric.of == "server" else "average client")
        cases[name] = {case: results.compare(named.get(claim["higher"]), named.get(claim["lower"]), metric)}
    return judge_claims("mapp", table, **cases)


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
