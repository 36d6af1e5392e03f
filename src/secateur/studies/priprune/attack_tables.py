"""Tables of priprune on attacks on base prunings: Figs. 3, A1, A2 and A3."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from secateur.metrics.estimates import combine, correlation
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Cases, Finding, judge_claims
from secateur.studies.priprune.results import (
    CHANCE,
    GI,
    NMI,
    PSNR,
    SGI,
    PripruneFederation,
    PripruneResults,
    attackers,
    lines,
    paired_difference,
)
from secateur.studies.table import TableLine, Tabulated


def fig3(results: PripruneResults) -> Tabulated:
    """Return Fig. 3: GI against SGI by base pruning and rate, with dense and with masked broadcast."""
    findings: list[Finding] = []
    for broadcast in ("dense", "masked"):
        cases: Cases = {
            f"{federation.base} {federation.rate:g}": paired_difference(
                *(results.course(federation, NMI, attack) for attack in (SGI, GI))
            )
            for federation in results.select(broadcast=broadcast)
        }
        findings += judge_claims("priprune", "attacks", {"broadcast": broadcast}, sgi=cases)
    return _marked_lines(results), [*findings, *_judge_falls(results, SGI), *_judge_agreement(results, SGI)]


def figa1(results: PripruneResults) -> Tabulated:
    """Return Fig. A1: the classic attack on pruned models, by pruning rate."""
    cases: Cases = {}
    for federation in results.cells:
        if federation.rate > 0:
            above = {seed: _above_chance(results, federation, seed) for seed in results.over(federation, NMI, GI)}
            cases[f"{federation.base} {federation.rate:g}"] = combine(lambda value: -value, above)
    return lines(results), [*judge_claims("priprune", "attacks", fails=cases), *_judge_falls(results, GI)]


def figa2(results: PripruneResults) -> Tabulated:
    """Return Fig. A2: NMI and PSNR by pruning rate, and their agreement."""
    falls = [*_judge_falls(results, GI), *_judge_falls(results, GI, PSNR, "PSNR")]
    return lines(results), [*falls, *_judge_agreement(results, GI)]


def figa3(results: PripruneResults) -> Tabulated:
    """Return Fig. A3: scores of the pictures by pruning rate and base pruning; the page shows the pictures."""
    return lines(results), [*_judge_falls(results, SGI), *_judge_falls(results, SGI, "ssim", "SSIM")]


def _judge_agreement(results: PripruneResults, attack: str) -> list[Finding]:
    """Judge that NMI and PSNR are correlated over federations, with one pair per federation and seed."""
    pairs = []
    for federation in results.cells:
        nmi, psnr = (results.over(federation, metric, attack) for metric in (NMI, PSNR))
        pairs += [(nmi[seed].value, psnr[seed].value) for seed in nmi if seed in psnr]
    r = correlation(pairs) if len(pairs) > 1 else None
    return judge_claims("priprune", "attacks", agree={f"r over {len(pairs)} federations": r})


def _marked_lines(results: PripruneResults) -> list[TableLine]:
    """Return the lines, with a mark where GI and SGI are the same attack."""
    owners = [federation for federation in results.cells for _ in attackers(results, federation)]
    table = []
    for federation, line in zip(owners, lines(results), strict=True):
        gi, sgi = (results.course(federation, NMI, attack) for attack in (GI, SGI))
        table.append(replace(line, mark="GI and SGI are the same here") if gi and gi == sgi else line)
    return table


def _judge_falls(results: PripruneResults, attack: str, metric: str = NMI, name: str = "NMI") -> list[Finding]:
    """Judge that a measure falls from each pruning rate to the next higher one, all else being equal."""
    groups: dict[PripruneFederation, list[PripruneFederation]] = {}
    for federation in results.cells:
        groups.setdefault(federation._replace(rate=0.0), []).append(federation)
    cases: Cases = {}
    for group in groups.values():
        for low, high in pairwise(sorted(group, key=lambda federation: federation.rate)):
            case = f"{low.base}, {low.broadcast}, {low.rate:g} to {high.rate:g}"
            cases[case] = results.less(low, high, metric, attack)
    return judge_claims("priprune", "attacks", {"measure": name}, falls=cases)


def _above_chance(results: PripruneResults, federation: PripruneFederation, seed: int) -> Estimate:
    """Return NMI minus its chance level, for one seed."""
    course, chance = (results.course(federation, metric, GI) for metric in (NMI, CHANCE))
    difference = paired_difference({key: value for key, value in course.items() if key[0] == seed}, chance)
    assert difference is not None
    return difference
