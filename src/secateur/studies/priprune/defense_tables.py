"""Tables of priprune about defenses: Table 2, Table A1, Figs. 6, 8, 9, A4 and A5, and two that are not in the paper.

The two are `alpha`, about settings that the paper does not state, and `defenses`, with all defenses on one axis.
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
from secateur.studies.priprune.results import (
    ACCURACY,
    LOSS,
    NMI,
    WITHHELD,
    Course,
    PripruneFederation,
    PripruneResults,
    lines,
)
from secateur.studies.table import TableLine

NETWORKS = {"femnist": "conv-2", "cifar10": "vgg-11"}  # of the paper, by data set
REAL = ("largest", "random", "mix")
LITTLE = 0.02  # of accuracy or NMI: a smaller difference is none
SGI = "sgi"
Cases = dict[str, Estimate | None]


def table2(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Table 2: NMI of base prunings with and without PriPrune."""
    private: Cases = {
        _case(federation): results.less(results.with_defense(federation, "none"), federation, NMI, SGI)
        for federation in results.select(defense="priprune")
    }
    findings = [judge("PriPrune reduces NMI on every base pruning", private, "every", unit="")]
    for (data, base), share in SAVED.items():
        for federation in results.select(defense="priprune", base=base):
            if results.stands.get((federation.model, federation.data)) == data:
                saved = results.saved(results.with_defense(federation, "none"), federation)
                claim = f"PriPrune takes {100 * share:g} % of NMI away from {base}, {data}: at least half of that"
                findings.append(judge(claim, {federation.data: saved}, "every", share / 2))
    return lines(results, lambda federation: _printed(results, federation)), findings


def fig9(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 9: Table 2 with the accuracies, on the trade-off plane of the page."""
    table, findings = table2(results)
    kept: Cases = {
        _case(federation): results.gain(federation, results.with_defense(federation, "none"))
        for federation in results.select(defense="priprune")
    }
    claim = f"PriPrune preserves accuracy (at most {100 * LITTLE:g} points less)"
    return table, [judge(claim, kept, "every", -LITTLE), *findings]


def tablea1(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Table A1: NMI by the three lambdas."""

    def lambdas(federation: PripruneFederation) -> tuple[float, float, float]:
        return (
            setting(federation, "accuracy", 5),
            setting(federation, "privacy", 15),
            setting(federation, "sharing", 2e-5),
        )

    by_lambdas = {lambdas(federation): federation for federation in results.select(defense="priprune")}
    cases: Cases = {}
    for (accuracy, privacy, sharing), federation in by_lambdas.items():
        higher = [key for key in by_lambdas if key[0] == accuracy and key[1] > privacy and key[2] == sharing]
        if higher:
            after = min(higher)
            case = f"{accuracy:g}, {sharing:g}: {privacy:g} to {after[1]:g}"
            cases[case] = results.less(federation, by_lambdas[after], NMI, SGI)
    printed = {by_lambdas[key]: value for key, value in _nearest(by_lambdas).items()}
    claim = "a higher lambda_pri lowers NMI, in most steps"
    return lines(results, lambda federation: printed.get(federation, "")), [judge(claim, cases, unit="")]


def fig6(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 6: three ways to choose the withheld entries, each as real pruning and as pseudo-pruning."""
    by_defense = {name_of(federation.defense): federation for federation in results.courses}
    pairs = {name: (by_defense.get(f"pseudo-{name}"), by_defense.get(name)) for name in REAL}
    others = [name for name in by_defense if name not in ("none", "pseudo-largest")]
    return lines(results), [
        judge("pseudo-pruning is more accurate than real pruning", {n: results.gain(*p) for n, p in pairs.items()}),
        judge(
            "of the real ones Largest is the most private",
            {
                name: results.less(by_defense.get(name), by_defense.get("largest"), NMI, SGI)
                for name in ("random", "mix")
            },
            "every",
            unit="",
        ),
        judge(
            "of the real ones Largest is the least accurate",
            {name: results.gain(by_defense.get(name), by_defense.get("largest")) for name in ("random", "mix")},
            "every",
        ),
        judge(
            f"Largest (Pseudo) is the most private of all (to {LITTLE:g} of NMI)",
            {name: results.less(by_defense[name], by_defense.get("pseudo-largest"), NMI, SGI) for name in others},
            "every",
            -LITTLE,
            unit="",
        ),
    ]


def fig8(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. 8: fixed defense rates and PriPrune on PruneFL, over the rounds."""
    bare, learnt = results.one(defense="none"), results.one(defense="priprune")
    fixed = sorted(results.select(defense="pseudo-largest"), key=rate_of)
    least: Cases = {f"{rate_of(federation):g}": results.gain(federation, bare) for federation in fixed}
    worse: Cases = {step: results.gain(low, high) for step, low, high in steps(fixed)}
    hides: Cases = {step: results.less(low, high, NMI, SGI) for step, low, high in steps(fixed)}
    most = fixed[-1] if fixed else None
    points = f"(at most {100 * LITTLE:g} points less)"
    findings = [
        judge(
            f"PriPrune is as accurate as PruneFL alone {points}",
            {"accuracy": results.gain(learnt, bare)},
            "every",
            -LITTLE,
        ),
        judge("a higher fixed rate costs accuracy, in most steps", worse),
        judge("no fixed rate reaches PruneFL's accuracy", {n: _minus(case) for n, case in least.items()}, "every"),
        judge(
            "PriPrune's NMI is lower than PruneFL's", {"NMI": results.less(bare, learnt, NMI, SGI)}, "every", unit=""
        ),
        in_every_round(results, bare, learnt),
        judge(
            f"PriPrune's NMI is comparable to the highest fixed rate's (at most {LITTLE:g} more)",
            {"NMI": results.less(most, learnt, NMI, SGI)},
            "every",
            -LITTLE,
            unit="",
        ),
        judge("a higher fixed rate hides more, in most steps", hides, unit=""),
        best_balance(results, learnt, fixed),
        moves(results, learnt),
    ]
    return lines(results), findings


def figa4(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. A4: mixes of largest and random at one rate."""
    federations = sorted(results.select(defense="mix"), key=lambda federation: setting(federation, "largest", 0.5))
    if not federations:
        return lines(results), []
    first, last = federations[0], federations[-1]
    accurate: Cases = {_share(federation): results.gain(first, federation) for federation in federations[1:]}
    private: Cases = {_share(federation): results.less(federation, last, NMI, SGI) for federation in federations[:-1]}
    hard: Cases = {_share(federation): results.less(last, federation, LOSS, SGI) for federation in federations[:-1]}
    return lines(results), [
        judge("0 % largest with 30 % random is the most accurate", accurate, "every"),
        judge("30 % largest with 0 % random is the most private", private, "every", unit=""),
        judge("30 % largest with 0 % random leaves the attack the highest loss", hard, "every", unit=""),
    ]


def figa5(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return Fig. A5: largest at rising rates."""
    federations = [*results.select(defense="none"), *sorted(results.select(defense="largest"), key=rate_of)]
    private: Cases = {step: results.less(low, high, NMI, SGI) for step, low, high in steps(federations)}
    hard: Cases = {step: results.less(high, low, LOSS, SGI) for step, low, high in steps(federations)}
    worse: Cases = {step: results.gain(low, high) for step, low, high in steps(federations)}
    return lines(results), [
        judge("the more of the largest are pruned the lower NMI is, in most steps", private, unit=""),
        judge("the more of the largest are pruned the higher the attack's loss is, in most steps", hard, unit=""),
        judge("the more of the largest are pruned the lower the accuracy is, in most steps", worse),
    ]


def alpha(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return the effect of alpha's start, its step and the temperature: the paper states none of them."""
    rates = {
        federation.defense: mean(results.last(federation, WITHHELD))
        for federation in results.select(defense="priprune")
    }
    started = [setting(federation, "alpha", 0.5) for federation in results.select(defense="priprune")]
    findings = []
    for name, usual in (("alpha", 0.5), ("step", 0.01), ("temperature", 5.0)):
        by_value = {
            setting(federation, name, usual): rates[federation.defense]
            for federation in results.select(defense="priprune")
            if only(federation, name)
        }
        values = [rate.value for rate in by_value.values() if rate is not None]
        spread = max(values, default=0.0) - min(values, default=0.0)
        case = Estimate(spread, spread, spread) if len(values) > 1 else None  # one value has no spread
        title = {"alpha": "alpha_0", "step": "its step", "temperature": "the temperature"}[name]
        tried = f"{title} ({', '.join(f'{value:g}' for value in sorted(by_value))})"
        findings.append(
            judge(f"ours: {tried} moves the rate in the end by more than 10 points", {"rate": case}, bound=0.1)
        )
    bare = results.one(defense="none")
    cases: Cases = {
        federation.defense: results.less(bare, federation, NMI, SGI)
        for federation in results.select(defense="priprune")
    }
    claim = f"PriPrune hides more than PruneFL alone, whatever they are (alpha_0 {', '.join(map(str, set(started)))})"
    return lines(results), [*findings, judge(claim, cases, "every", unit="")]


def defenses(results: PripruneResults) -> tuple[list[TableLine], list[Finding]]:
    """Return every defense of an update on one axis, under its strongest attacker, and the sum of a round's updates."""
    bare, learnt = (results.one(defense=name, view="update") for name in ("none", "priprune"))
    alone = list(results.select(view="update"))
    others = [federation for federation in alone if federation not in (bare, learnt)]
    cases: Cases = {federation.defense: worst(results, federation, learnt) for federation in others}
    paid: Cases = {federation.defense: results.gain(learnt, federation) for federation in others}
    return lines(results), [
        judge("ours: PriPrune hides more than every other defense", cases, "every", unit=""),
        judge("ours: PriPrune is more accurate than every other defense", paid, "every"),
        best_balance(results, learnt, [federation for federation in alone if federation != learnt]),
        *aggregated(results, learnt),
    ]


def _case(federation: PripruneFederation) -> str:
    """Return the name of a federation among the cases of a claim."""
    return f"{federation.base}, {federation.model} on {federation.data}"


def _printed(results: PripruneResults, federation: PripruneFederation) -> str:
    """Return the cell of Table 2, with the paper's network if that is another one."""
    data = results.stands.get((federation.model, federation.data), "")
    pair = TABLE_2.get((data, federation.base))
    if pair is None:
        return ""
    value, spread = pair[federation.defense != "none"]
    other = "" if federation.model == NETWORKS[data] and federation.data == data else f" ({NETWORKS[data]} on {data})"
    return f"{value:g} ± {spread:g}{other}"


def _nearest(by_lambdas: dict[tuple[float, float, float], PripruneFederation]) -> dict[tuple[float, float, float], str]:
    """Return the paper's cells; lambda_sha is matched by its order, since it is larger for a smaller network."""
    ranks = sorted({key[2] for key in by_lambdas}, reverse=True)
    names = sorted({key[2] for key in TABLE_A1}, reverse=True)
    chosen = names if len(ranks) == len(names) else [names[0], names[-1]][: len(ranks)]
    sharing = dict(zip(ranks, chosen, strict=False))
    cells = {key: TABLE_A1.get((int(key[0]), int(key[1]), sharing.get(key[2], 0.0))) for key in by_lambdas}
    return {key: f"{value:.3f}" for key, value in cells.items() if value is not None}


def setting(federation: PripruneFederation, name: str, usual: float) -> float:
    """Return a hyper-parameter from the text of the defense; `usual` if it is not there."""
    pairs = dict(pair.split("=") for pair in federation.defense.split(":")[1:])
    return float(pairs.get(name, usual))


def in_every_round(
    results: PripruneResults, bare: PripruneFederation | None, learnt: PripruneFederation | None
) -> Finding:
    """Judge if the defended update leaks less in all attacked rounds."""
    claim = "PriPrune's NMI is the lower one throughout all rounds"
    if bare is None or learnt is None:
        return judge(claim, {})
    before, after = (results.course(federation, NMI, SGI) for federation in (bare, learnt))
    lower = [after[key] < before[key] for key in before if key in after]
    count = f"in {sum(lower)} of {len(lower)} attacked updates"
    return Finding(claim, count, verdict(sum(lower), len(lower) - sum(lower), len(lower), "every"))


def best_balance(
    results: PripruneResults, learnt: PripruneFederation | None, others: Iterable[PripruneFederation]
) -> Finding:
    """Judge that no other is both as accurate and as private, by the means."""
    claim = "PriPrune has the best balance: no other is at least as accurate and as private"
    if learnt is None:
        return judge(claim, {})
    accuracy, hidden = worth(results, learnt)
    rivals = {federation.defense: worth(results, federation) for federation in others}
    beaten = [name for name, rival in rivals.items() if rival[0] >= accuracy and rival[1] >= hidden]
    measured = f"at least as good in both: {', '.join(beaten)}" if beaten else "none is as good in both"
    return Finding(claim, measured, verdict(0, 1, 1) if beaten else verdict(1, 0, 1))


def worth(results: PripruneResults, federation: PripruneFederation) -> tuple[float, float]:
    """Return the accuracy, and the negative NMI under the strongest attacker."""
    accuracy, leak = (
        mean(results.last(federation, ACCURACY)),
        mean(results.over(federation, NMI, results.strongest(federation))),
    )
    return (accuracy.value if accuracy else -math.inf, -leak.value if leak else -math.inf)


def moves(results: PripruneResults, learnt: PripruneFederation | None) -> Finding:
    """Judge Fig. 8d: the rate changes over the rounds."""
    claim = "PriPrune's defense rate adapts: it changes over the rounds by more than 1 point"
    course = {} if learnt is None else results.course(learnt, WITHHELD)
    if not course:
        return judge(claim, {})
    values = [value for _, value in sorted(course.items())]
    measured = f"from {100 * values[0]:.1f}% to {100 * values[-1]:.1f}%, between {100 * min(values):.1f}% and "
    case = Estimate(spread := max(values) - min(values), spread, spread)
    return Finding(claim, f"{measured}{100 * max(values):.1f}%", judge(claim, {"": case}, bound=0.01).verdict)


def steps(federations: list[PripruneFederation]) -> Iterable[tuple[str, PripruneFederation, PripruneFederation]]:
    """Return pairs of federations with neighbouring rates, each with its name."""
    return [(f"{rate_of(low):g} to {rate_of(high):g}", low, high) for low, high in pairwise(federations)]


def rate_of(federation: PripruneFederation) -> float:
    """Return the defense rate; 0 without a defense."""
    return 0.0 if federation.defense == "none" else setting(federation, "rate", 0.3)


def _share(federation: PripruneFederation) -> str:
    return f"{100 * setting(federation, 'largest', 0.5) * rate_of(federation):.0f} % largest"


def _minus(case: Estimate | None) -> Estimate | None:
    return combine(lambda value: -value, {0: case}) if case is not None else None


def only(federation: PripruneFederation, name: str) -> bool:
    """Return True if no other setting that the paper leaves open is set."""
    others = {"alpha", "step", "temperature", "normalise"} - {name}
    return not others & {pair.partition("=")[0] for pair in federation.defense.split(":")[1:]}


def aggregated(results: PripruneResults, learnt: PripruneFederation | None) -> list[Finding]:
    """Judge how much secure aggregation hides, alone and with each defense, of all clients' pictures by round."""
    sums = list(results.select(view="sum"))
    less: Cases = {
        federation.defense: in_rounds(results, federation._replace(view="update"), federation) for federation in sums
    }
    bare = results.one(defense="none", view="sum")
    enough: Cases = {"NMI": None if learnt is None or bare is None else in_rounds(results, learnt, bare)}
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


def in_rounds(results: PripruneResults, one: PripruneFederation, other: PripruneFederation) -> Estimate | None:
    """Return one's NMI less the other's under the strongest attackers, both as means over the victims of a round."""
    if not {one, other} <= results.courses.keys():
        return None
    return results.apart(
        *(by_round(results.course(federation, NMI, results.strongest(federation))) for federation in (one, other))
    )


def by_round(course: Course) -> Course:
    """Return the mean over the clients of each round."""
    rounds: dict[tuple[int, int, int], list[float]] = {}
    for (seed, number, _), value in course.items():
        rounds.setdefault((seed, number, -1), []).append(value)
    return {key: sum(values) / len(values) for key, values in rounds.items()}


def worst(
    results: PripruneResults, one: PripruneFederation | None, other: PripruneFederation | None
) -> Estimate | None:
    """Return one's NMI less the other's, each under its strongest attacker."""
    if one is None or other is None:
        return None
    return results.apart(
        *(results.course(federation, NMI, results.strongest(federation)) for federation in (one, other))
    )
