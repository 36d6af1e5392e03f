"""Tables of priprune on attacks on base prunings: Figs. 3, A1, A2 and A3."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from secateur.metrics.estimates import combine, correlation
from secateur.metrics.membership import Estimate
from secateur.studies.claims import UNDECIDED, Finding, judge
from secateur.studies.priprune.results import NMI, PSNR, PripruneFederation, PripruneResults, attackers, lines
from secateur.studies.table import TableLine

GI, SGI = "gi-priprune", "sgi"
LITTLE = 0.02  # a negligible NMI above chance
CERTAIN = 0.5  # a correlation above which two measures agree
Cases = dict[str, Estimate | None]


def fig3(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 3: GI against SGI by base pruning and rate, with dense and with masked broadcast."""
    findings = []
    for broadcast in ("dense", "masked"):
        cases: Cases = {
            f"{federation.base} {federation.rate:g}": results.apart(
                results.course(federation, NMI, SGI), results.course(federation, NMI, GI)
            )
            for federation in results.select(broadcast=broadcast)
        }
        claim = f"SGI infers more than GI at every rate of every base pruning, {broadcast} broadcast"
        findings.append(judge(claim, cases, "every", unit=""))
    return marked(results), [*findings, _falls(results, SGI), agree(results, SGI)]


def figa1(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. A1: the classic attack on pruned models, by pruning rate."""
    not_above: Cases = {
        f"{federation.base} {federation.rate:g}": combine(
            lambda above: -above, {seed: _above(results, federation, seed) for seed in _seeds(results, federation)}
        )
        for federation in results.select()
        if federation.rate > 0
    }
    claim = "the classic GI attack fails from low pruning rates on: its NMI is not above chance"
    return lines(results), [judge(claim, not_above, "every", bound=-LITTLE, unit=""), _falls(results, GI)]


def figa2(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. A2: NMI and PSNR by pruning rate, and their agreement."""
    return lines(results), [_falls(results, GI), _falls(results, GI, PSNR, "PSNR"), agree(results, GI)]


def figa3(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. A3: scores of the pictures by pruning rate and base pruning; the page shows the pictures."""
    return lines(results), [_falls(results, SGI), _falls(results, SGI, "ssim", "SSIM")]


def agree(results: PripruneResults, attack: str) -> Finding:
    """Judge that NMI and PSNR are correlated over federations, with one pair per federation and seed."""
    pairs = []
    for federation in results.courses:
        for seed, nmi in results.over(federation, NMI, attack).items():
            if seed in (psnr := results.over(federation, PSNR, attack)):
                pairs.append((nmi.value, psnr[seed].value))
    r = correlation(pairs) if len(pairs) > 1 else None
    claim = f"NMI and PSNR agree: their correlation over federations is above {CERTAIN:g}"
    if r is None:
        return Finding(claim, "not measured here", UNDECIDED)
    return judge(claim, {f"r over {len(pairs)} federations": r}, "every", CERTAIN, unit="")


def marked(results: PripruneResults) -> list[TableLine]:
    """Return the lines, with a mark where GI and SGI are the same attack."""
    table = lines(results)
    for number, line in enumerate(table):
        federation = _federation(results, number)
        gi, sgi = (results.course(federation, NMI, name) for name in (GI, SGI))
        if gi and gi == sgi:
            table[number] = TableLine(line.labels, line.cells, line.paper, "GI and SGI are the same here")
    return table


def _federation(results: PripruneResults, line: int) -> PripruneFederation:
    """Return the federation of a line."""
    owners = [federation for federation in results.courses for _ in attackers(results, federation)]
    return owners[line]


def _falls(results: PripruneResults, attack: str, metric: str = NMI, name: str = "NMI") -> Finding:
    """Judge that a measure falls from each pruning rate to the next higher one."""
    cases: Cases = {}
    for group in _by_rate(results):
        for low, high in pairwise(group):
            case = f"{low.base}, {low.broadcast}, {low.rate:g} to {high.rate:g}"
            cases[case] = results.apart(results.course(low, metric, attack), results.course(high, metric, attack))
    return judge(f"{name} falls with the pruning rate, in most steps", cases, unit="")


def _by_rate(results: PripruneResults) -> list[Sequence[PripruneFederation]]:
    """Group the federations that differ only in the pruning rate, ordered by rate."""
    groups: dict[PripruneFederation, list[PripruneFederation]] = {}
    for federation in results.courses:
        groups.setdefault(federation._replace(rate=0.0), []).append(federation)
    return [sorted(group, key=lambda federation: federation.rate) for group in groups.values()]


def _seeds(results: PripruneResults, federation: PripruneFederation) -> list[int]:
    return list(results.over(federation, NMI, GI))


def _above(results: PripruneResults, federation: PripruneFederation, seed: int) -> Estimate:
    """Return NMI minus its chance level, for one seed."""
    course, chance = results.course(federation, NMI, GI), results.course(federation, "nmi_256_chance", GI)
    of_seed = {key: value for key, value in course.items() if key[0] == seed}
    apart = results.apart(of_seed, chance)
    assert apart is not None
    return apart
