"""Tables that are not in priprune: what it leaves unstated, and all defenses of what a client sends on one axis."""

from __future__ import annotations

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.measured import mean
from secateur.studies.priprune_defended import LITTLE, SGI, Cases, best_balance, setting
from secateur.studies.priprune_found import NMI, WITHHELD, Course, Federation, Seen
from secateur.studies.priprune_lines import lines
from secateur.studies.tables import Line


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
