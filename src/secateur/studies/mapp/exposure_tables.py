"""Tables of mapp_fl on exposure: by dataset and model size, to stronger attackers, and under further defenses."""

from __future__ import annotations

from itertools import pairwise
from operator import sub

from secateur.catalogue import name_of
from secateur.metrics.estimates import Correlation, Measure, average_on_same, combine, exposure_correlation, mean
from secateur.metrics.membership import Estimate
from secateur.studies.claims import judge
from secateur.studies.mapp.paper_numbers import PARAMETERS, TABLE_3
from secateur.studies.mapp.results import (
    YEOM,
    Cases,
    MappFederation,
    MappResults,
    Tabulated,
    Way,
    accurate,
    clients,
    exposed,
    less,
    points,
    served,
    summary,
)
from secateur.studies.table import Cells, TableLine

ASKED = "How the attacker asks: Yeom's advantage on the average client and server, over all federations here"


def correlations(results: MappResults, smallest: int) -> Tabulated:
    """Return Table 3: Pearson's r of log10 dataset size and advantage by network."""
    lines, cases = [], {}
    for federation in results.federations:
        result = exposure_correlation(points(results, federation), smallest)
        cases[federation.model] = None if result is None else _turned(result.r)
        data = results.rows[0].dataset
        paper = TABLE_3.get((data, federation.model))
        labels = {"network": federation.model, "parameters": PARAMETERS.get(federation.model, "")}
        lines.append(TableLine(labels, _correlated(result), "" if paper is None else f"{paper:.2f}"))
    claim = "clients with less data are exposed more: r of log10 dataset size and advantage is negative (-r is shown)"
    return lines, [judge(claim, cases, "every", unit="")]


def complexity(results: MappResults, smallest: int) -> Tabulated:
    """Return Fig. 1: correlation of dataset size and advantage, and the average accuracy and advantage, by network."""
    lines, findings = correlations(results, smallest)
    order = sorted(results.federations, key=lambda federation: federation.unit)
    for line, federation in zip(lines, results.federations, strict=True):
        line.cells.update(summary(results, federation))
    pairs = list(pairwise(order))
    return lines, [
        *findings,
        judge(
            "the advantage rises with the model's size (Fig. 1b)",
            {f"{b.model} over {a.model}": less(results, b, a, exposed) for a, b in pairs},
        ),
        judge(
            "the clients' accuracy rises with the model's size (Fig. 1b)",
            {f"{b.model} over {a.model}": less(results, b, a, accurate) for a, b in pairs},
        ),
    ]


def attackers(results: MappResults) -> Tabulated:
    """Return a table of the methods under stronger attackers, to test their ranking (not in the paper)."""
    lines = []
    ways = [way for way in results.ways if way.batches == YEOM.batches and way.updates == 1]
    for federation in results.federations:
        for way in ways:
            cells: Cells = {"client_advantage": mean(clients(results, federation, "advantage", way))}
            for metric in ("auc", "tpr_at_fpr_0.01"):
                cells[metric] = mean(clients(results, federation, metric, way))
            cells["client_accuracy"] = mean(accurate(results, federation))
            lines.append(
                TableLine({"rule": federation.title, "network": federation.model, "attack": way.attack}, cells)
            )
    mapp = next((federation for federation in results.federations if federation.submodels == "mapp-fl"), None)
    others = [
        federation
        for federation in results.federations
        if federation != mapp and federation.submodels in ("heterofl", "none")
    ]

    def over(metric: str, compared: list[Way]) -> Cases:
        """Return the metric of the other rules minus that of MaPP-FL."""
        if mapp is None:
            return {}
        return {
            f"{way.attack}: {other.title} {other.unit}": combine(
                sub, *(clients(results, federation, metric, way) for federation in (other, mapp))
            )
            for way in compared
            for other in others
        }

    thresholds = [way for way in ways if name_of(way.attack) == YEOM.attack]
    # A threshold does not change the scores: all of Yeom's thresholds share one AUC.
    ranked = [way for way in ways if way == YEOM or way not in thresholds]
    stronger: Cases = {
        f"{federation.title} {federation.unit}": _over(results, federation, ways) for federation in results.federations
    }
    return lines, [
        judge(
            "MaPP-FL's clients are less exposed than FedAvg's and HeteroFL's, whoever attacks",
            over("auc", ranked),
            "every",
            unit="",
        ),
        judge(
            "and wherever Yeom's threshold lies (advantage; not in the paper)", over("advantage", thresholds), "every"
        ),
        judge("Yeom finds less than LiRA does (not in the paper)", stronger, unit=""),
    ]


def joined(results: MappResults) -> Tabulated:
    """Return a table of sub-models with pruned uploads and with withheld weights (not in the paper)."""
    lines = [
        TableLine({"rule": federation.submodels, "defense": federation.defense}, summary(results, federation))
        for federation in results.federations
    ]
    defended = [federation for federation in results.federations if federation.defense != "none"]
    bare = {federation: results.other(federation, defense="none") for federation in defended}
    return lines, [
        judge(
            "a defense on top exposes sub-model clients less (not in the paper)",
            {federation.title: less(results, bare[federation], federation, exposed) for federation in defended},
        ),
        judge(
            "and it costs the server accuracy (not in the paper)",
            {federation.title: less(results, bare[federation], federation, served) for federation in defended},
        ),
    ]


def asked(results: MappResults) -> list[TableLine]:
    """Return one line per mode of Yeom's attack: batches in which examples are scored, and number of updates."""
    ways = [way for way in results.ways if way.attack == "yeom"]
    lines, senders = (
        [],
        [sender for sender in results.federations if sender.submodels != "local"],
    )  # clients that send updates are attacked in all modes
    for way in ways if len(ways) > 1 else []:
        cells: Cells = {
            "client_advantage": _overall([clients(results, sender, "advantage", way) for sender in senders]),
            "server_advantage": _overall([results.server(sender, "advantage", way) for sender in senders]),
            "client_auc": _overall([clients(results, sender, "auc", way) for sender in senders]),
        }
        labels = {"scoring batches": way.batches, "updates": str(way.updates)}
        lines.append(TableLine(labels, cells, mark="as above" if way == YEOM else "", part=ASKED))
    return lines


def _overall(measures: list[Measure]) -> Estimate | None:
    """Return the mean over federations, whose clients hold the same examples, then over seeds."""
    known = [measure for measure in measures if measure]
    seeds = set[int].intersection(*map(set, known)) if known else set()
    return mean({seed: average_on_same([measure[seed] for measure in known]) for seed in sorted(seeds)})


def _over(results: MappResults, federation: MappFederation, ways: list[Way]) -> Estimate | None:
    """Return LiRA's AUC minus Yeom's, for the average client."""
    lira = next((way for way in ways if way.attack == "lira"), None)
    if lira is None:
        return None
    return combine(lambda a, b: a - b, *(clients(results, federation, "auc", way) for way in (lira, YEOM)))


def _correlated(result: Correlation | None) -> Cells:
    if result is None:
        return {"r": "too few clients", "p": "", "clients": "", "excluded": ""}
    return {"r": result.r, "p": f"{result.p:.2g}", "clients": str(result.clients), "excluded": str(result.excluded)}


def _turned(estimate: Estimate) -> Estimate:
    return Estimate(-estimate.value, -estimate.high, -estimate.low)
