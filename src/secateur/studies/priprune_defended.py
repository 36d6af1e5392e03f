"""Tables of priprune about defenses over the rounds: Figs. 6, 8, A4 and A5."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge, verdict
from secateur.studies.measured import combine, mean, name_of
from secateur.studies.priprune_found import ACCURACY, LOSS, NMI, WITHHELD, Federation, Seen
from secateur.studies.priprune_lines import lines
from secateur.studies.tables import Line

REAL = ("largest", "random", "mix")
LITTLE = 0.02  # of accuracy or NMI: comparable
SGI = "sgi"
Cases = dict[str, Estimate | None]


def fig6(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Three ways to choose what is withheld, each as real pruning and as pseudo-pruning."""
    own = {name_of(each.defense): each for each in found.courses}
    pairs = {name: (own.get(f"pseudo-{name}"), own.get(name)) for name in REAL}
    others = [name for name in own if name not in ("none", "pseudo-largest")]
    return lines(found), [
        judge("pseudo-pruning is more accurate than real pruning", {n: found.gain(*p) for n, p in pairs.items()}),
        judge(
            "of the real ones Largest is the most private",
            {name: found.less(own.get(name), own.get("largest"), NMI, SGI) for name in ("random", "mix")},
            "every",
            unit="",
        ),
        judge(
            "of the real ones Largest is the least accurate",
            {name: found.gain(own.get(name), own.get("largest")) for name in ("random", "mix")},
            "every",
        ),
        judge(
            f"Largest (Pseudo) is the most private of all (to {LITTLE:g} of NMI)",
            {name: found.less(own[name], own.get("pseudo-largest"), NMI, SGI) for name in others},
            "every",
            -LITTLE,
            unit="",
        ),
    ]


def fig8(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Fixed defense rates and PriPrune on PruneFL, over the rounds."""
    bare, learnt = found.one(defense="none"), found.one(defense="priprune")
    fixed = sorted(found.select(defense="pseudo-largest"), key=rate_of)
    least: Cases = {f"{rate_of(each):g}": found.gain(each, bare) for each in fixed}
    worse: Cases = {step: found.gain(low, high) for step, low, high in steps(fixed)}
    hides: Cases = {step: found.less(low, high, NMI, SGI) for step, low, high in steps(fixed)}
    most = fixed[-1] if fixed else None
    points = f"(at most {100 * LITTLE:g} points less)"
    findings = [
        judge(
            f"PriPrune is as accurate as PruneFL alone {points}",
            {"accuracy": found.gain(learnt, bare)},
            "every",
            -LITTLE,
        ),
        judge("a higher fixed rate costs accuracy, in most steps", worse),
        judge("no fixed rate reaches PruneFL's accuracy", {n: _minus(case) for n, case in least.items()}, "every"),
        judge("PriPrune's NMI is lower than PruneFL's", {"NMI": found.less(bare, learnt, NMI, SGI)}, "every", unit=""),
        in_every_round(found, bare, learnt),
        judge(
            f"PriPrune's NMI is comparable to the highest fixed rate's (at most {LITTLE:g} more)",
            {"NMI": found.less(most, learnt, NMI, SGI)},
            "every",
            -LITTLE,
            unit="",
        ),
        judge("a higher fixed rate hides more, in most steps", hides, unit=""),
        best_balance(found, learnt, fixed),
        moves(found, learnt),
    ]
    return lines(found), findings


def figa4(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Mixes of largest and random at one rate."""
    own = sorted(found.select(defense="mix"), key=lambda each: setting(each, "largest", 0.5))
    if not own:
        return lines(found), []
    first, last = own[0], own[-1]
    accurate: Cases = {_share(each): found.gain(first, each) for each in own[1:]}
    private: Cases = {_share(each): found.less(each, last, NMI, SGI) for each in own[:-1]}
    hard: Cases = {_share(each): found.less(last, each, LOSS, SGI) for each in own[:-1]}
    return lines(found), [
        judge("0 % largest with 30 % random is the most accurate", accurate, "every"),
        judge("30 % largest with 0 % random is the most private", private, "every", unit=""),
        judge("30 % largest with 0 % random leaves the attack the highest loss", hard, "every", unit=""),
    ]


def figa5(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Largest at rising rates."""
    own = [*found.select(defense="none"), *sorted(found.select(defense="largest"), key=rate_of)]
    private: Cases = {step: found.less(low, high, NMI, SGI) for step, low, high in steps(own)}
    hard: Cases = {step: found.less(high, low, LOSS, SGI) for step, low, high in steps(own)}
    worse: Cases = {step: found.gain(low, high) for step, low, high in steps(own)}
    return lines(found), [
        judge("the more of the largest are pruned the lower NMI is, in most steps", private, unit=""),
        judge("the more of the largest are pruned the higher the attack's loss is, in most steps", hard, unit=""),
        judge("the more of the largest are pruned the lower the accuracy is, in most steps", worse),
    ]


def in_every_round(found: Seen, bare: Federation | None, learnt: Federation | None) -> Finding:
    """In which of the attacked rounds the defended update gave away less."""
    claim = "PriPrune's NMI is the lower one throughout all rounds"
    if bare is None or learnt is None:
        return judge(claim, {})
    before, after = (found.course(each, NMI, SGI) for each in (bare, learnt))
    lower = [after[key] < before[key] for key in before if key in after]
    told = f"in {sum(lower)} of {len(lower)} attacked updates"
    return Finding(claim, told, verdict(sum(lower), len(lower) - sum(lower), len(lower), "every"))


def best_balance(found: Seen, learnt: Federation | None, others: Iterable[Federation]) -> Finding:
    """Whether no other is both more accurate and more private, by its means."""
    claim = "PriPrune has the best balance: no other is at least as accurate and as private"
    if learnt is None:
        return judge(claim, {})
    accuracy, hidden = worth(found, learnt)
    rivals = {each.defense: worth(found, each) for each in others}
    beaten = [name for name, own in rivals.items() if own[0] >= accuracy and own[1] >= hidden]
    told = f"at least as good in both: {', '.join(beaten)}" if beaten else "none is as good in both"
    return Finding(claim, told, verdict(0, 1, 1) if beaten else verdict(1, 0, 1))


def worth(found: Seen, each: Federation) -> tuple[float, float]:
    """Accuracy, and how little is given away."""
    accuracy, leak = mean(found.last(each, ACCURACY)), mean(found.over(each, NMI, found.strongest(each)))
    return (accuracy.value if accuracy else -math.inf, -leak.value if leak else -math.inf)


def moves(found: Seen, learnt: Federation | None) -> Finding:
    """Fig. 8d: the rate changes over the rounds."""
    claim = "PriPrune's defense rate adapts: it changes over the rounds by more than 1 point"
    course = {} if learnt is None else found.course(learnt, WITHHELD)
    if not course:
        return judge(claim, {})
    values = [value for _, value in sorted(course.items())]
    told = f"from {100 * values[0]:.1f}% to {100 * values[-1]:.1f}%, between {100 * min(values):.1f}% and "
    case = Estimate(spread := max(values) - min(values), spread, spread)
    return Finding(claim, f"{told}{100 * max(values):.1f}%", judge(claim, {"": case}, bound=0.01).verdict)


def steps(own: list[Federation]) -> Iterable[tuple[str, Federation, Federation]]:
    """Each with the next higher rate."""
    return [(f"{rate_of(low):g} to {rate_of(high):g}", low, high) for low, high in pairwise(own)]


def rate_of(each: Federation) -> float:
    """The defense rate; 0 without one."""
    return 0.0 if each.defense == "none" else setting(each, "rate", 0.3)


def setting(each: Federation, name: str, usual: float) -> float:
    """A hyper-parameter of a defense as it is written."""
    pairs = dict(pair.split("=") for pair in each.defense.split(":")[1:])
    return float(pairs.get(name, usual))


def _share(each: Federation) -> str:
    return f"{100 * setting(each, 'largest', 0.5) * rate_of(each):.0f} % largest"


def _minus(case: Estimate | None) -> Estimate | None:
    return combine(lambda value: -value, {0: case}) if case is not None else None
