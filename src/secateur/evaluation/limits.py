"""Limits on leakage, and claims of privacy: what finished runs show, held against them.

A limit is within, above or inconclusive. By default the whole interval decides: its upper end must lie within the
limit, so that fewer rows never pass more easily, and a limit inside the interval is inconclusive. Silence never
passes: a measure that is missing, or that the sample does not support, is inconclusive.

A claimed epsilon is refuted where an attack shows more (`metrics/epsilon.py`). No attack can prove a claim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal
from xml.etree import ElementTree

from secateur.catalogue import methods, name_of
from secateur.config.base import Limits, PrivacyClaim, Unit
from secateur.evaluation.attack_strength import hides_members, list_missing, measure_strength, read_unmet
from secateur.evaluation.membership import COUNTS
from secateur.evaluation.validity import SWAPPED, doubt_leaks, failures
from secateur.metrics.epsilon import LEVEL as EPSILON_LEVEL
from secateur.metrics.epsilon import Counts, bound_of, one_run_bound
from secateur.metrics.estimates import average, average_on_same, holm, mean_of, p_above
from secateur.metrics.membership import TOO_FEW, UNSUPPORTED, Estimate
from secateur.runs.rows import Row

Decider = Literal["high", "value", "low"]
Attacker = Literal["shadows", "no-shadows"]
LEVEL = 0.025  # one side of a 95 % interval
SHARES = (0.0, 1.0)  # range of AUC, TPR, accuracies and shares
NO_SHADOWS = "no attack with shadow models was run; give it shadows, or state `attacker: no-shadows` in the policy"
UNAWARE = "it was attacked plainly only; one who knows of it (--adaptive) may see more"
UTILITY = ("accuracy_drop", "epsilon")  # measures of the model itself, without an attack
BELOW_ZERO = ("advantage", "accuracy_drop", "auc_change")  # differences of shares
UNBOUNDED = ("psnr", "epsilon")
PICTURES = ("recognisable", "psnr")  # measures of pictures, which a weak attack understates
CLAIM = "claimed_epsilon"
CANARIES = "the canaries' training"
CANARY_COUNTS = ("canaries", "canary_guesses", "canary_right")
UNMEASURED = {
    "accuracy_drop": "it was not measured, as this run has no model before a compression to compare with; "
    "name one (--before), or leave this limit out"
}
UNTESTED = "not tested by this audit"


class Outcome(StrEnum):
    """Answer to one limit, or to all of them."""

    WITHIN = "within"
    INCONCLUSIVE = "inconclusive"
    ABOVE = "above"


@dataclass(frozen=True)
class Policy:
    """Limits by measure, the end of the interval that decides, and the attacker that they are meant for."""

    limits: Mapping[str, float]
    decide: Decider = "high"
    attacker: Attacker = "shadows"
    claim: PrivacyClaim | None = None  # of models as they were brought, beside the claims that runs state themselves


def policy_of(limits: Limits, claim: PrivacyClaim | None = None) -> Policy:
    """Return the limits of a run file or policy file as a policy."""
    return Policy(limits.by_measure(), limits.decide, limits.attacker, claim)


@dataclass(frozen=True)
class Evidence:
    """One measure of one model or defense under one attack, over all seeds."""

    subject: str
    measure: str
    attack: str | None
    estimate: Estimate | None  # None: it could not be measured, and `note` says why
    trainings: int = 1
    by_rows: Estimate | None = None  # of these trainings alone: the interval covers their rows
    rows: int | None = None  # members and non-members that were asked about
    note: str = ""

    @property
    def supported(self) -> bool:
        """True if there are enough rows for the measure; of a score that ties it is then at least the value."""
        return self.estimate is not None and not self.note.startswith(TOO_FEW)

    @property
    def exact(self) -> bool:
        """True if the score is fine enough too, so that the measure may be shown to be within a limit."""
        return self.estimate is not None and not self.note.startswith(UNSUPPORTED)


@dataclass(frozen=True)
class Check:
    """One limit for one model or defense, decided by the strongest attack for this measure."""

    subject: str
    measure: str
    limit: float
    outcome: Outcome
    evidence: Evidence | None = None
    reason: str = ""  # of an inconclusive outcome
    unmet: str = ""  # stronger attackers that were not met, of a limit that holds against those that were

    @property
    def passed(self) -> bool:
        """True if the evidence shows that the limit holds."""
        return self.outcome is Outcome.WITHIN

    @property
    def sentence(self) -> str:
        """The check as a sentence."""
        if self.measure == CLAIM:
            return f"{self.subject}: {self.reason}"
        if self.evidence is None or self.evidence.estimate is None:
            return f"{self.subject}: {self.measure} is inconclusive for the limit {self.limit:g}: {self.reason}"
        value, low, high = (f"{end:.3f}" for end in self.evidence.estimate[:3])
        under = f" under {self.evidence.attack}" if self.evidence.attack else ""
        shown = f"{self.subject}: {self.measure} {value} [{low}, {high}]{under}"
        if self.outcome is Outcome.INCONCLUSIVE:
            return f"{shown} is inconclusive for the limit {self.limit:g}: {self.reason}"
        return f"{shown} is {self.outcome} the limit {self.limit:g}" + (f"; it {self.unmet}" if self.unmet else "")


@dataclass
class _Group:
    """Rows of one measure of one subject under one attack, by seed."""

    values: dict[int, list[Estimate]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Add a row; one without a value leaves its note."""
        if row.note:
            self.notes.append(row.note)
        if row.value is not None:
            low, high = (row.value if end is None else end for end in (row.low, row.high))
            self.values.setdefault(row.seed, []).append(Estimate(row.value, low, high))


def check(rows: Sequence[Row], policy: Policy) -> list[Check]:
    """Hold every limit against every shipped model or defense: pruned models, or the originals if nothing was pruned.

    A run whose validity checks fail passes no limit. Where only the low end decides, all comparisons together keep the
    level by Holm's method.
    """
    by_subject: dict[tuple[str, str], list[Evidence]] = {}
    for item in collect(rows, policy.limits):
        by_subject.setdefault((item.subject, item.measure), []).append(item)
    invalid, shifted = failures(rows), doubt_leaks(rows)
    surpassed = _find_surpassed([item for items in by_subject.values() for item in items], policy.limits)
    checks = []
    for (subject, measure), items in by_subject.items():
        decided = _decide(subject, measure, items, policy, surpassed)
        unaided = policy.attacker == "shadows" and _lack_shadows(items)
        nearest = failures([row for row in rows if subject_of(row) == subject])  # before those of other models
        doubts = nearest + [f"of another model: {sentence}" for sentence in invalid if sentence not in nearest]
        doubts += [NO_SHADOWS] if unaided and measure not in UTILITY else []
        plainly = policy.attacker == "shadows" and measure not in UTILITY and _meets_unaware_only(rows, subject)
        doubts += [UNAWARE] if plainly else []
        doubts += _list_weaknesses(rows, subject) if measure in PICTURES else []
        if decided.outcome is Outcome.ABOVE:
            doubts = shifted if measure not in UTILITY else []  # a shift looks like a leak; other faults only hide one
        if doubts and decided.outcome is not Outcome.INCONCLUSIVE:
            decided = replace(decided, outcome=Outcome.INCONCLUSIVE, reason=doubts[0])
        if decided.passed and measure not in UTILITY:
            decided = replace(decided, unmet=_find_unmet(rows, subject))
        checks.append(decided)
    return checks + _list_missing(checks, policy.limits) + check_claims(rows, policy.claim)


def claim_rows(labels: dict[str, Any], claim: PrivacyClaim) -> list[Row]:
    """Return a claim about a model as rows."""
    note = f"for one {claim.unit}"
    return [
        Row(**labels, metric=CLAIM, value=claim.epsilon, note=note),
        Row(**labels, metric="claimed_delta", value=claim.delta, note=note),
    ]


def check_claims(rows: Sequence[Row], brought: PrivacyClaim | None = None) -> list[Check]:
    """Hold every claimed epsilon against the lower bounds of all attacks, which keep one level for a model.

    Args:
        rows: of a run, with the claims that it states.
        brought: a claim about the models as they were brought: given, or not pruned.
    """
    deltas = {subject_of(row): row.value or 0.0 for row in rows if row.metric == "claimed_delta"}
    claims: dict[str, PrivacyClaim] = {}
    for row in rows:
        subject = subject_of(row)
        if row.metric == CLAIM and row.value is not None:
            unit: Unit = "client" if row.note == "for one client" else "example"
            claims[subject] = PrivacyClaim(epsilon=row.value, delta=deltas.get(subject, 0.0), unit=unit)
        elif brought is not None and row.pruner in ("none", "given") and row.attack is not None:
            claims.setdefault(subject, brought)
    shifted, swapped = doubt_leaks(rows), failures(rows, SWAPPED)
    return [
        _check_claim(name, claim, _bounds(rows, name, claim.delta), shifted, swapped) for name, claim in claims.items()
    ]


def _bounds(rows: Sequence[Row], subject: str, delta: float) -> dict[str, float]:
    """Return by attack the largest lower bound on epsilon at this delta, over all trainings of a model.

    All bounds on the model together keep the level (Bonferroni).
    """
    counts: dict[tuple[str, int, str], dict[str, int]] = {}
    for row in rows:
        if row.metric in (*COUNTS, *CANARY_COUNTS) and row.value is not None and subject_of(row) == subject:
            key = row.attack or CANARIES, row.seed, str(row.extra)
            counts.setdefault(key, {})[row.metric] = int(row.value)
    bounds: dict[str, float] = {}
    for (attack, *_), numbers in counts.items():
        level = EPSILON_LEVEL / len(counts)
        if attack == CANARIES:
            canaries, guesses, right = (numbers[name] for name in CANARY_COUNTS)
            bound = one_run_bound(canaries, guesses, right, delta, level)
        else:
            bound = bound_of(Counts(*(numbers[name] for name in COUNTS)), delta, level)
        bounds[attack] = max(bound, bounds.get(attack, 0.0))
    return bounds


def _check_claim(
    subject: str, claim: PrivacyClaim, bounds: Mapping[str, float], shifted: Sequence[str], swapped: Sequence[str]
) -> Check:
    """Return the answer to one claim: refuted, not refuted, or not tested."""
    text = f"the claimed epsilon {claim.epsilon:.4g} (delta {claim.delta:.3g}, for one {claim.unit})"
    if swapped:
        return Check(subject, CLAIM, claim.epsilon, Outcome.INCONCLUSIVE, reason=f"{text} is {UNTESTED}: {swapped[0]}")
    if claim.unit != "example" or not bounds:
        reason = "attacks ask about single examples" if bounds else "no attack measured an epsilon"
        return Check(subject, CLAIM, claim.epsilon, Outcome.INCONCLUSIVE, reason=f"{text} is {UNTESTED}: {reason}")
    attack = max(bounds, key=lambda name: bounds[name])
    bound = bounds[attack]
    evidence = Evidence(subject, CLAIM, attack, Estimate(bound, bound, math.inf))
    if bound <= claim.epsilon:
        shown = f"{text} is not refuted: {attack} shows at least {bound:.3g}"
        return Check(subject, CLAIM, claim.epsilon, Outcome.WITHIN, evidence, shown)
    shown = f"{text} is refuted: {attack} shows at least {bound:.3g}, at 95 % confidence"
    if shifted:
        doubt = f"{shown}, if members and non-members differ by membership alone: {shifted[0]}"
        return Check(subject, CLAIM, claim.epsilon, Outcome.INCONCLUSIVE, evidence, doubt)
    return Check(subject, CLAIM, claim.epsilon, Outcome.ABOVE, evidence, shown)


def outcome(checks: Iterable[Check]) -> Outcome:
    """Return the answer to all limits: above if one is, else inconclusive if one is."""
    outcomes = {decided.outcome for decided in checks}
    return next((worst for worst in (Outcome.ABOVE, Outcome.INCONCLUSIVE) if worst in outcomes), Outcome.WITHIN)


def _list_missing(checks: Sequence[Check], limits: Mapping[str, float]) -> list[Check]:
    """Return an inconclusive check for every limit that was not measured on a model, or on any."""
    known = {(decided.subject, decided.measure) for decided in checks}
    missing = []
    for name, limit in limits.items():
        anywhere = any(measure == name for _, measure in known)
        subjects = dict.fromkeys(subject for subject, _ in known) if anywhere else ["this run"]
        reason = "it was not measured" if anywhere else UNMEASURED.get(name, "it was not measured")
        missing += [
            Check(subject, name, limit, Outcome.INCONCLUSIVE, reason=reason)
            for subject in subjects
            if (subject, name) not in known
        ]
    return missing


def collect(rows: Sequence[Row], measures: Iterable[str]) -> list[Evidence]:
    """Return the evidence of the run's rows on these measures, by subject, measure, attack and the attacker's guess."""
    wanted, only_originals = set(measures), all(row.pruner == "none" for row in rows if row.attack)
    groups: dict[tuple[str, str, str | None, tuple[Any, ...]], _Group] = {}
    asked: dict[str, int] = {}
    for row in rows:
        if row.pruner == "none" and "round" not in row.extra and not only_originals:
            continue
        if row.metric in ("members", "nonmembers") and row.attack is None and row.seed == rows[0].seed:
            asked[subject_of(row)] = asked.get(subject_of(row), 0) + int(row.value or 0)
        if row.metric in wanted and _sums_up(row) and (row.attack is not None or row.metric in UTILITY):
            groups.setdefault((subject_of(row), row.metric, row.attack, attacker_of(row)), _Group()).add(row)
    return [_evidence(*key[:3], group, asked.get(key[0])) for key, group in groups.items()]


def uses_shadows(attack: str) -> bool:
    """Return True if the attack's ranking comes from models that the attacker trained."""
    entry = methods("attack").get(name_of(attack))
    return entry is not None and entry.info["shadows"] in ("needed", "in-out or disjoint")


def average_trainings(estimates: Sequence[Estimate], bounds: tuple[float, float] = SHARES) -> Estimate:
    """Return the mean over trainings with an interval over trainings and rows, inside the measure's range.

    It is Student's interval over the trainings, but never narrower than that of their rows alone.
    """
    if len(estimates) == 1:
        return estimates[0]
    trainings, rows = mean_of([estimate.value for estimate in estimates]), average(estimates)
    low, high = min(trainings.low, rows.low), max(trainings.high, rows.high)
    return Estimate(trainings.value, max(low, bounds[0]), min(high, bounds[1]))


def junit(checks: Sequence[Check]) -> str:
    """Return the checks as JUnit XML, which CI servers read; an inconclusive check is an error."""
    counts = {kind: sum(decided.outcome is kind for decided in checks) for kind in Outcome}
    numbers = {"tests": len(checks), "failures": counts[Outcome.ABOVE], "errors": counts[Outcome.INCONCLUSIVE]}
    suite = ElementTree.Element("testsuite", {"name": "secateur"} | {name: str(n) for name, n in numbers.items()})
    for decided in checks:
        case = ElementTree.SubElement(suite, "testcase", classname=decided.subject, name=decided.measure)
        if not decided.passed:
            tag = "failure" if decided.outcome is Outcome.ABOVE else "error"
            ElementTree.SubElement(case, tag, message=decided.sentence)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _decide(subject: str, measure: str, items: Sequence[Evidence], policy: Policy, surpassed: set[int]) -> Check:
    """Return the check of one measure by its strongest evidence."""
    limit = policy.limits[measure]
    supported, exact = [item for item in items if item.supported], [item for item in items if item.exact]
    certain = [item for item in items if item.estimate is not None and item.estimate.low > limit]
    if not supported and not certain:
        reason = next((item.note for item in items if item.note), "it was not measured")
        unsupported = next((item for item in items if item.estimate is not None), None)
        return Check(subject, measure, limit, Outcome.INCONCLUSIVE, unsupported, reason)
    strongest = max(supported or certain, key=_value)
    if policy.decide == "low":
        above = [item for item in items if id(item) in surpassed]
    elif policy.decide == "high":
        above = certain  # where the limit lies inside the interval, the rows decide neither way
    else:
        above = certain + [item for item in supported if _value(item) > limit]
    if above:
        return Check(subject, measure, limit, Outcome.ABOVE, max(above, key=_value))
    if not exact:
        return Check(subject, measure, limit, Outcome.INCONCLUSIVE, strongest, strongest.note)
    widest = max(supported, key=_upper_bound)
    if policy.decide == "high" and _upper_bound(widest) > limit:
        return Check(subject, measure, limit, Outcome.INCONCLUSIVE, widest, _advice(widest, limit))
    return Check(subject, measure, limit, Outcome.WITHIN, widest if policy.decide == "high" else strongest)


def p_value(item: Evidence, bound: float) -> float:
    """Return the p-value of `value <= bound`; over several trainings by Student's distribution."""
    assert item.estimate is not None
    return p_above(item.estimate, bound, item.trainings - 1)


def p_of_guessing(item: Evidence, guess: float) -> float:
    """Return the p-value of an attacker that guesses, over all trainings.

    A guess is a guess on every model, so trainings do not differ then, and their rows alone make the difference.
    """
    assert item.by_rows is not None
    return p_above(item.by_rows, guess)


def _find_surpassed(items: Sequence[Evidence], limits: Mapping[str, float]) -> set[int]:
    """Return ids of the evidence that lies above its limit, at one level for all comparisons (Holm)."""
    known = [item for item in items if item.estimate is not None]
    tests = [p_value(item, limits[item.measure]) for item in known]
    return {id(item) for item, adjusted in zip(known, holm(tests), strict=True) if adjusted <= LEVEL}


def _advice(item: Evidence, limit: float) -> str:
    """Return the number of rows whose interval would decide, if the value stays."""
    assert item.estimate is not None
    room = limit - item.estimate.value
    width = (item.estimate.high if room > 0 else item.estimate.low) - item.estimate.value
    if not room:
        return "the value lies at the limit"
    more = (width / room) ** 2  # intervals narrow with the root of the number of rows
    if item.rows is None:
        return f"about {more:.2g} times the evidence would decide"
    seeds = f" for each of {item.trainings} trainings" if item.trainings > 1 else ""
    return f"about {math.ceil(more * item.rows):,} rows{seeds} would decide (now {item.rows:,})"


def _evidence(subject: str, measure: str, attack: str | None, group: _Group, rows: int | None) -> Evidence:
    """Return the rows of one measure as evidence: the mean over a seed's updates, then over the seeds."""
    low, high = SHARES if measure not in UNBOUNDED else (-math.inf, math.inf)
    bounds = (-1.0, 1.0) if measure in BELOW_ZERO else (low, high)
    seeds = [average_on_same(values) for values in group.values.values()]  # one training's rows are asked again
    note = next((note for note in group.notes if note.startswith(UNSUPPORTED)), next(iter(group.notes), ""))
    estimate = average_trainings(seeds, bounds) if seeds else None
    by_rows = average(seeds) if seeds else None
    return Evidence(subject, measure, attack, estimate, max(1, len(seeds)), by_rows, rows, note)


def _sums_up(row: Row) -> bool:
    """Return True if a row is about a model or defense, not about one picture, target or trial of an attack."""
    return row.extra.get("item") is None and row.extra.get("trial") is None and row.extra.get("target") is None


def _lack_shadows(items: Sequence[Evidence]) -> bool:
    """Return True if there are membership attacks, and none that measured this used shadow models."""
    attacks = [item.attack for item in items if item.attack and item.estimate is not None]
    membership = [attack for attack in attacks if name_of(attack) in methods("attack")]
    return bool(membership) and not any(map(uses_shadows, membership))


def _meets_unaware_only(rows: Sequence[Row], subject: str) -> bool:
    """Return True if a compressed model has a defense that none of the attackers' shadow models has.

    Shadow models of an original are trained as it is.
    """
    attacked = [row for row in rows if row.attack and uses_shadows(row.attack) and subject_of(row) == subject]
    hidden = any(hides_members(str(row.defense)) for row in attacked if row.pruner != "none")
    return hidden and all(row.adaptive is False for row in attacked)


def _find_unmet(rows: Sequence[Row], subject: str) -> str:
    """Return the stronger attackers that a model did not meet; empty if it met them."""
    return next((unmet for row in rows if subject_of(row) == subject and (unmet := read_unmet(row.note))), "")


def _list_weaknesses(rows: Sequence[Row], subject: str) -> list[str]:
    """Return what the attacks on the pictures of one defense lack, as one sentence."""
    attacks: dict[str, list[Row]] = {}
    for row in rows:
        if row.attack is not None and subject_of(row) == subject:
            attacks.setdefault(row.attack, []).append(row)
    scored = {name: same for name, same in attacks.items() if any(row.metric in PICTURES for row in same)}
    defense, base = next(
        ((str(row.defense), row.extra.get("base_pruning", "")) for same in scored.values() for row in same),
        ("none", ""),
    )
    missing = list_missing([measure_strength(name, same) for name, same in scored.items()], defense, base)
    return [f"missing: {'; '.join(missing)}"] if missing else []


def attacker_of(row: Row) -> tuple[Any, ...]:
    """Return the attacker's knowledge of the compression: a weak attacker must not average a strong one away.

    The recipe that an attacker selects for itself differs by seed, and tells no attackers apart.
    """
    protocol = row.extra.get("protocol")
    guess = [] if protocol == "select" else [row.extra.get(f"attacker_{name}") for name in ("pruner", "sparsity")]
    return row.adaptive, protocol, *guess


def subject_of(row: Row) -> str:
    """Return the name of the model or defense that a row is about."""
    if row.pruner is None:
        return f"defense {row.defense}"
    if row.pruner == "given":
        return "the model"
    trained = f" ({row.extra['original']})" if row.extra.get("original") else ""
    pruned = f"{row.pruner} {row.sparsity:g}" if row.sparsity else row.pruner
    compressed = f"the original{trained}" if row.pruner == "none" else pruned
    if row.pruner == "none" and row.sparsity and row.defense == "none":  # trained and pruned elsewhere
        compressed = f"the model as given, {100 * row.sparsity:.0f} % sparse"
    return f"{compressed}, {row.defense}"


def _value(item: Evidence) -> float:
    return -math.inf if item.estimate is None else item.estimate.value


def _upper_bound(item: Evidence) -> float:
    return -math.inf if item.estimate is None else item.estimate.high
