"""Tables of priprune about base prunings with and without PriPrune: Table 2, Fig. 9 and Table A1.

Tables of priprune about defenses over the rounds: Figs. 6, 8, A4 and A5.

Tables that are not in priprune: what it leaves unstated, and all defenses of what a client sends on one axis.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

from secateur.catalogue import name_of
from secateur.metrics.estimates import combine, mean
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge, verdict
from secateur.studies.priprune.paper_numbers import SAVED, TABLE_2, TABLE_A1
from secateur.studies.priprune.results import ACCURACY, LOSS, NMI, WITHHELD, Course, Federation, Seen, lines
from secateur.studies.table import Line

Cases = dict[str, Estimate | None]
NETWORKS = {"femnist": "conv-2", "cifar10": "vgg-11"}  # the paper's

REAL = ("largest", "random", "mix")
LITTLE = 0.02  # of accuracy or NMI: comparable
SGI = "sgi"


def table2(found: Seen) -> tuple[list[Line], list[Finding]]:
    """NMI of base prunings with and without PriPrune."""
    private: Cases = {
        f"{each.base}, {each.model} on {each.data}": found.less(found.with_defense(each, "none"), each, NMI, SGI)
        for each in found.select(defense="priprune")
    }
    findings = [judge("PriPrune reduces NMI on every base pruning", private, "every", unit="")]
    for (data, base), share in SAVED.items():
        for each in found.select(defense="priprune", base=base):
            if found.stands.get((each.model, each.data)) == data:
                saved = found.saved(found.with_defense(each, "none"), each)
                claim = f"PriPrune takes {100 * share:g} % of NMI away from {base}, {data}: at least half of that"
                findings.append(judge(claim, {each.data: saved}, "every", share / 2))
    return lines(found, lambda each: _printed(found, each)), findings


def fig9(found: Seen) -> tuple[list[Line], list[Finding]]:
    """The same with the accuracies, on the trade-off plane of the page."""
    made, findings = table2(found)
    kept: Cases = {
        f"{each.base}, {each.model} on {each.data}": found.gain(each, found.with_defense(each, "none"))
        for each in found.select(defense="priprune")
    }
    claim = f"PriPrune preserves accuracy (at most {100 * LITTLE:g} points less)"
    return made, [judge(claim, kept, "every", -LITTLE), *findings]


def tablea1(found: Seen) -> tuple[list[Line], list[Finding]]:
    """NMI by the three lambdas."""

    def lambdas(each: Federation) -> tuple[float, float, float]:
        return setting(each, "accuracy", 5), setting(each, "privacy", 15), setting(each, "sharing", 2e-5)

    own = {lambdas(each): each for each in found.select(defense="priprune")}
    cases: Cases = {}
    for (accuracy, privacy, sharing), each in own.items():
        higher = [key for key in own if key[0] == accuracy and key[1] > privacy and key[2] == sharing]
        if higher:
            after = min(higher)
            case = f"{accuracy:g}, {sharing:g}: {privacy:g} to {after[1]:g}"
            cases[case] = found.less(each, own[after], NMI, SGI)
    printed = {own[key]: value for key, value in _nearest(own).items()}
    claim = "a higher lambda_pri lowers NMI, in most steps"
    return lines(found, lambda each: printed.get(each, "")), [judge(claim, cases, unit="")]


def _nearest(own: dict[tuple[float, float, float], Federation]) -> dict[tuple[float, float, float], str]:
    """The paper's cells; lambda_sha is matched by its order, since it is larger for a smaller network."""
    ranks = sorted({key[2] for key in own}, reverse=True)
    names = sorted({key[2] for key in TABLE_A1}, reverse=True)
    chosen = names if len(ranks) == len(names) else [names[0], names[-1]][: len(ranks)]
    sharing = dict(zip(ranks, chosen, strict=False))
    cells = {key: TABLE_A1.get((int(key[0]), int(key[1]), sharing.get(key[2], 0.0))) for key in own}
    return {key: f"{value:.3f}" for key, value in cells.items() if value is not None}


def _printed(found: Seen, each: Federation) -> str:
    """Table 2's cell, with its network where that is another one."""
    data = found.stands.get((each.model, each.data), "")
    pair = TABLE_2.get((data, each.base))
    if pair is None:
        return ""
    value, spread = pair[each.defense != "none"]
    other = "" if each.model == NETWORKS[data] and each.data == data else f" ({NETWORKS[data]} on {data})"
    return f"{value:g} ± {spread:g}{other}"


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


def alpha(found: Seen) -> tuple[list[Line], list[Finding]]:
    """What alpha's start, its step and the temperature decide: the paper states none of them."""
    rates = {each.defense: mean(found.last(each, WITHHELD)) for each in found.select(defense="priprune")}
    started = [setting(each, "alpha", 0.5) for each in found.select(defense="priprune")]
    findings = []
    for name, usual in (("alpha", 0.5), ("step", 0.01), ("temperature", 5.0)):
        own = {
            setting(each, name, usual): rates[each.defense]
            for each in found.select(defense="priprune")
            if only(each, name)
        }
        values = [rate.value for rate in own.values() if rate is not None]
        spread = max(values, default=0.0) - min(values, default=0.0)
        case = Estimate(spread, spread, spread) if len(values) > 1 else None  # one alone moves nothing
        title = {"alpha": "alpha_0", "step": "its step", "temperature": "the temperature"}[name]
        told = f"{title} ({', '.join(f'{value:g}' for value in sorted(own))})"
        findings.append(
            judge(f"ours: {told} moves the rate in the end by more than 10 points", {"rate": case}, bound=0.1)
        )
    bare, cases = found.one(defense="none"), dict[str, Estimate | None]()
    for each in found.select(defense="priprune"):
        cases[each.defense] = found.less(bare, each, NMI, SGI)
    claim = f"PriPrune hides more than PruneFL alone, whatever they are (alpha_0 {', '.join(map(str, set(started)))})"
    return lines(found), [*findings, judge(claim, cases, "every", unit="")]


def defenses(found: Seen) -> tuple[list[Line], list[Finding]]:
    """Every defense of what a client sends on one axis, each under its strongest attacker; and the sum of a round's."""
    bare, learnt = (found.one(defense=name, view="update") for name in ("none", "priprune"))
    alone = list(found.select(view="update"))
    others = [each for each in alone if each not in (bare, learnt)]
    cases: Cases = {each.defense: worst(found, each, learnt) for each in others}
    paid: Cases = {each.defense: found.gain(learnt, each) for each in others}
    return lines(found), [
        judge("ours: PriPrune hides more than every other defense", cases, "every", unit=""),
        judge("ours: PriPrune is more accurate than every other defense", paid, "every"),
        best_balance(found, learnt, [each for each in alone if each != learnt]),
        *aggregated(found, learnt),
    ]


def aggregated(found: Seen, learnt: Federation | None) -> list[Finding]:
    """What secure aggregation hides by itself and of each defense, the pictures of all its clients, round by round."""
    sums = list(found.select(view="sum"))
    less: Cases = {each.defense: in_rounds(found, each._replace(view="update"), each) for each in sums}
    bare = found.one(defense="none", view="sum")
    enough: Cases = {"NMI": None if learnt is None or bare is None else in_rounds(found, learnt, bare)}
    return [
        judge("ours: a server that sees only the sum of a round's clients finds less of each", less, "every", unit=""),
        judge(
            f"ours: the sum of clients without a defense hides as much as PriPrune alone (to {LITTLE:g} of NMI)",
            enough,
            "every",
            -LITTLE,
            unit="",
        ),
    ]


def in_rounds(found: Seen, one: Federation, other: Federation) -> Estimate | None:
    """One's NMI less the other's under the strongest attackers, both as means of their rounds' victims."""
    if not {one, other} <= found.courses.keys():
        return None
    return found.apart(*(by_round(found.course(each, NMI, found.strongest(each))) for each in (one, other)))


def by_round(course: Course) -> Course:
    """The mean over the clients of each round."""
    rounds: dict[tuple[int, int, int], list[float]] = {}
    for (seed, number, _), value in course.items():
        rounds.setdefault((seed, number, -1), []).append(value)
    return {key: sum(values) / len(values) for key, values in rounds.items()}


def worst(found: Seen, one: Federation | None, other: Federation | None) -> Estimate | None:
    """One's NMI less the other's, each under the attacker that finds most."""
    if one is None or other is None:
        return None
    return found.apart(*(found.course(each, NMI, found.strongest(each)) for each in (one, other)))


def only(each: Federation, name: str) -> bool:
    """Whether no other of what the paper leaves open is set."""
    others = {"alpha", "step", "temperature", "normalise"} - {name}
    return not others & {pair.partition("=")[0] for pair in each.defense.split(":")[1:]}
