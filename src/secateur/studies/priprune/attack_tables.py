"""Tables of priprune about attacks on base prunings: Figs. 3, A1, A2 and A3."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from secateur.metrics.estimates import combine, correlation
from secateur.metrics.membership import Estimate
from secateur.studies.claims import UNDECIDED, Finding, judge
from secateur.studies.priprune.results import NMI, PSNR, Federation, Seen, attackers, lines
from secateur.studies.table import Line

GI, SGI = "gi-priprune", "sgi"
LITTLE = 0.02  # of NMI
CERTAIN = 0.5  # of a correlation: two measures agree
Cases = dict[str, Estimate | None]


def fig3(found: Seen) -> tuple[list[Line], list[Finding]]:
    """GI against SGI by base pruning and rate, where the broadcast is dense and where it is masked."""
    findings = []
    for broadcast in ("dense", "masked"):
        cases: Cases = {
            f"{each.base} {each.rate:g}": found.apart(found.course(each, NMI, SGI), found.course(each, NMI, GI))
            for each in found.select(broadcast=broadcast)
        }
        claim = f"SGI infers more than GI at every rate of every base pruning, {broadcast} broadcast"
        findings.append(judge(claim, cases, "every", unit=""))
    return marked(found), [*findings, _falls(found, SGI), agree(found, SGI)]


def figa1(found: Seen) -> tuple[list[Line], list[Finding]]:
    """The classic attack fails on pruned models."""
    none: Cases = {
        f"{each.base} {each.rate:g}": combine(
            lambda above: -above, {seed: _above(found, each, seed) for seed in _seeds(found, each)}
        )
        for each in found.select()
        if each.rate > 0
    }
    claim = "the classic GI attack fails from low pruning rates on: its NMI is not above chance"
    return lines(found), [judge(claim, none, "every", bound=-LITTLE, unit=""), _falls(found, GI)]


def figa2(found: Seen) -> tuple[list[Line], list[Finding]]:
    """NMI and PSNR agree, and both fall with the pruning rate."""
    return lines(found), [_falls(found, GI), _falls(found, GI, PSNR, "PSNR"), agree(found, GI)]


def figa3(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Pictures by pruning rate and base pruning; they are on the page, and here are their scores."""
    return lines(found), [_falls(found, SGI), _falls(found, SGI, "ssim", "SSIM")]


def agree(found: Seen, attack: str) -> Finding:
    """NMI and PSNR say the same of federations, one pair each."""
    pairs = []
    for each in found.courses:
        for seed, nmi in found.over(each, NMI, attack).items():
            if seed in (psnr := found.over(each, PSNR, attack)):
                pairs.append((nmi.value, psnr[seed].value))
    r = correlation(pairs) if len(pairs) > 1 else None
    claim = f"NMI and PSNR agree: their correlation over federations is above {CERTAIN:g}"
    if r is None:
        return Finding(claim, "not measured here", UNDECIDED)
    return judge(claim, {f"r over {len(pairs)} federations": r}, "every", CERTAIN, unit="")


def marked(found: Seen) -> list[Line]:
    """The lines, with a mark where both attacks are one and the same."""
    made = lines(found)
    for number, line in enumerate(made):
        each = _federation(found, number)
        gi, sgi = (found.course(each, NMI, name) for name in (GI, SGI))
        if gi and gi == sgi:
            made[number] = Line(line.labels, line.cells, line.paper, "GI and SGI are the same here")
    return made


def _federation(found: Seen, line: int) -> Federation:
    """Whose line it is."""
    owners = [each for each in found.courses for _ in attackers(found, each)]
    return owners[line]


def _falls(found: Seen, attack: str, metric: str = NMI, name: str = "NMI") -> Finding:
    """A measure from one rate to the next higher one."""
    cases: Cases = {}
    for own in _by_rate(found):
        for low, high in pairwise(own):
            case = f"{low.base}, {low.broadcast}, {low.rate:g} to {high.rate:g}"
            cases[case] = found.apart(found.course(low, metric, attack), found.course(high, metric, attack))
    return judge(f"{name} falls with the pruning rate, in most steps", cases, unit="")


def _by_rate(found: Seen) -> list[Sequence[Federation]]:
    """Federations that differ in their rate alone, in its order."""
    groups: dict[Federation, list[Federation]] = {}
    for each in found.courses:
        groups.setdefault(each._replace(rate=0.0), []).append(each)
    return [sorted(own, key=lambda each: each.rate) for own in groups.values()]


def _seeds(found: Seen, each: Federation) -> list[int]:
    return list(found.over(each, NMI, GI))


def _above(found: Seen, each: Federation, seed: int) -> Estimate:
    """How far NMI lies above chance."""
    course, chance = found.course(each, NMI, GI), found.course(each, "nmi_256_chance", GI)
    own = {key: value for key, value in course.items() if key[0] == seed}
    apart = found.apart(own, chance)
    assert apart is not None
    return apart
