"""Selection of a recipe: the Pareto front by intervals, the limits, and the choice among the recipes that hold them.

All measures are better if lower. A measure that is missing neither holds nor breaks a limit, and loses no comparison.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from secateur.evaluation.limits import Check, Evidence, Outcome
from secateur.metrics.membership import TOO_FEW, Estimate
from secateur.runs.rows import Row

DROP, AUC, TPR, BYTES, LATENCY = "accuracy_drop", "auc", "tpr_at_fpr_0.01", "bytes", "latency"
PSNR, RECOGNISABLE = "psnr", "recognisable"
NAMES = {
    DROP: "accuracy drop",
    AUC: "AUC",
    TPR: "TPR at 1 % FPR",
    RECOGNISABLE: "share of recognisable pictures",
    PSNR: "PSNR",
    BYTES: "share of the original's bytes",
    LATENCY: "share of the original's latency",
}
OBJECTIVES = (DROP, AUC, BYTES)
GUESSES = {AUC: 0.5, TPR: 0.01, RECOGNISABLE: 0.0, PSNR: 0.0}  # of an attacker that guesses, the order of leaks
PREFIX = "search_"  # of metrics of the search, which no limit and no verdict reads
COMPARED = "compared_"  # of metrics of recipes that stand beside the recommended one, on the same rows
IMPORTANCE, SPENT = "importance", "seconds_spent"  # the other metrics of a search
LEAST = 0.01  # unit of an excess over a limit of 0


@dataclass(frozen=True)
class Assessment:
    """One recipe's measures on the rows of the search, and the rung of the search that it reached."""

    number: int
    title: str
    rung: int  # -1 if it could not be made, and `note` says why
    measures: Mapping[str, Estimate]
    note: str | None = None

    def value(self, measure: str) -> float:
        """Return a measure for comparisons; a missing one is above every other."""
        return self.measures[measure].value if measure in self.measures else math.inf


def is_search(row: Row) -> bool:
    """Return True if a row is of a search for recipes, not of the audit of the recommended one."""
    return row.metric.startswith((PREFIX, COMPARED)) or row.metric in (IMPORTANCE, SPENT)


def find_strongest(rows: Iterable[Row], names: Sequence[str]) -> dict[str, Estimate]:
    """Return measures by name from rows of several attacks: the strongest counts.

    The upper end is the highest of all attacks: a score that ties has an interval without width. A measure that the
    sample does not support is left out.
    """
    rows, measures = list(rows), {}
    for name in names:
        known = [row for row in rows if row.metric == name and not (row.note or "").startswith(TOO_FEW)]
        known = [row for row in known if row.value is not None]
        if known:
            top = max(known, key=lambda row: row.value or 0.0)
            low, high = (top.value if end is None else end for end in (top.low, top.high))
            assert top.value is not None and low is not None and high is not None
            highest = max([high, *(row.high for row in known if row.high is not None)])
            measures[name] = Estimate(top.value, low, highest, top.attack)
    return measures


def beats(one: Assessment, other: Assessment, objectives: Sequence[str] = OBJECTIVES) -> bool:
    """Return True if one recipe is nowhere worse, and in one measure better by whole intervals."""
    if any(name not in item.measures for item in (one, other) for name in objectives):
        return False
    both = [(one.measures[name], other.measures[name]) for name in objectives]
    return all(a.value <= b.value for a, b in both) and any(a.high < b.low for a, b in both)


def select_front(items: Sequence[Assessment], objectives: Sequence[str] = OBJECTIVES) -> list[Assessment]:
    """Return the recipes that no other one beats."""
    return [item for item in items if not any(beats(other, item, objectives) for other in items)]


def list_excesses(item: Assessment, limits: Mapping[str, float], end: str = "value") -> dict[str, float]:
    """Return by measure how far a recipe lies above its limits, in units of the limit; only those that it breaks.

    `end` is the end of the interval that is held against a limit: value or high.
    """
    excesses = {}
    for name, limit in limits.items():
        if name in item.measures and (value := getattr(item.measures[name], end)) > limit:
            excesses[name] = (value - limit) / max(abs(limit), LEAST)
    return excesses


def rank(item: Assessment, limits: Mapping[str, float], shown: Collection[str] = ()) -> tuple[float, ...]:
    """Return a recipe's place in the order of choice: by its excess over the limits, its leakage, then its accuracy.

    The limits named in `shown` are to be held by whole intervals: recipes that show it come first.
    Below guessing, recipes leak alike: there only chance would order them.
    """
    whole = list_excesses(item, {name: limit for name, limit in limits.items() if name in shown}, "high")
    leaks = (max(item.value(name), guess) for name, guess in GUESSES.items())  # a kind of recipe has some of them
    excesses = (math.fsum(broken.values()) for broken in (list_excesses(item, limits), whole))
    return (*excesses, *leaks, item.value(DROP), item.value(BYTES))


def choose(items: Sequence[Assessment], limits: Mapping[str, float], shown: Collection[str] = ()) -> Assessment:
    """Return the recipe that leaks least among those that hold all limits; if none does, the nearest one."""
    return min(items, key=lambda item: (*rank(item, limits, shown), item.number))


def tighten_limits(limits: Mapping[str, float], reference: Assessment) -> dict[str, float]:
    """Return limits that only recipes hold which are nowhere worse than a reference, by values."""
    bounds = {name: reference.value(name) for name in (DROP, AUC, TPR, BYTES) if name in reference.measures}
    return {**limits, **{name: min(bound, limits.get(name, bound)) for name, bound in bounds.items()}}


def choose_better(
    items: Sequence[Assessment], reference: Assessment, limits: Mapping[str, float], end: str
) -> Assessment:
    """Return the least leaking recipe that is better than a reference; the reference itself if none is.

    It holds the limits by values. `end` of the intervals, value or high, of its accuracy drop and of its AUC is no
    higher than the reference's value. With high, chance seldom makes a recipe look better than the reference.
    """
    bounds = {name: reference.value(name) for name in (DROP, AUC)}
    able = [item for item in items if not list_excesses(item, limits) and not list_excesses(item, bounds, end)]
    able = [item for item in able if item.value(AUC) < reference.value(AUC)]
    return choose(able, limits) if able else reference


def explain_limits(items: Sequence[Assessment], limits: Mapping[str, float]) -> list[str]:
    """Return sentences on limits that no recipe holds, alone or together; none if one recipe holds them all."""
    if any(not list_excesses(item, limits) for item in items):
        return []
    sentences = []
    for name, limit in limits.items():
        best = min(items, key=lambda item: (item.value(name), item.number))
        if best.value(name) > limit and math.isfinite(best.value(name)):
            lowest = f"the lowest value is {write_estimate(best.measures[name])}, by {best.title}"
            sentences.append(f"No recipe holds the limit {limit:g} on {NAMES[name]}: {lowest}.")
    if sentences:
        return sentences
    for name in limits:
        others = {other: limit for other, limit in limits.items() if other != name}
        able = [item for item in items if not list_excesses(item, others)]
        if able:
            best = min(able, key=lambda item: (item.value(name), item.number))
            value = f"{best.title} holds the others and has {write_estimate(best.measures[name])}"
            sentences.append(f"The limits hold one by one but not together. Without that on {NAMES[name]}, {value}.")
    return sentences or ["The limits hold one by one but not together, also if any one of them is left out."]


def find_gain(items: Iterable[Assessment], limit: float) -> Assessment | None:
    """Return the most accurate recipe if it gains more than a limit over its original, by its whole interval.

    Such an original was not trained out, and a recipe that only imitates it seems to lose nothing.
    """
    gains = [item for item in items if DROP in item.measures and item.measures[DROP].high < -limit]
    return min(gains, key=lambda item: (item.value(DROP), item.number), default=None)


def check_measures(
    subject: str, measures: Mapping[str, Estimate], limits: Mapping[str, float], decide: str = "value"
) -> list[Check]:
    """Hold limits against measures of the recommended recipe; `decide` is the end of the interval that decides."""
    checks = []
    for name, limit in limits.items():
        estimate = measures.get(name)
        evidence = Evidence(subject, name, estimate.note if estimate else None, estimate)
        if estimate is None:
            checks.append(Check(subject, name, limit, Outcome.INCONCLUSIVE, evidence, "it was not measured"))
        elif getattr(estimate, decide) <= limit:
            checks.append(Check(subject, name, limit, Outcome.WITHIN, evidence))
        elif decide == "value" or estimate.low > limit:
            checks.append(Check(subject, name, limit, Outcome.ABOVE, evidence))
        else:
            checks.append(Check(subject, name, limit, Outcome.INCONCLUSIVE, evidence, "the limit is in its interval"))
    return checks


def compare_values(one: Estimate, other: Estimate) -> str:
    """Return what a measure is beside another: by values, and beyond the intervals.

    Example:
        >>> compare_values(Estimate(0.5, 0.4, 0.6), Estimate(0.55, 0.45, 0.65))
        'no worse'
        >>> compare_values(Estimate(0.7, 0.6, 0.8), Estimate(0.5, 0.4, 0.55))
        'worse'
    """
    if one.high < other.low:
        return "better"
    return "worse" if one.low > other.high else "no worse" if one.value <= other.value else "worse, within"


def write_estimate(estimate: Estimate) -> str:
    """Return a value with its interval, if it has a width.

    Example:
        >>> write_estimate(Estimate(0.5, 0.4, 0.6)), write_estimate(Estimate(0.25, 0.25, 0.25))
        ('0.500 [0.400, 0.600]', '0.250')
    """
    ends = "" if estimate.low == estimate.high else f" [{estimate.low:.3f}, {estimate.high:.3f}]"
    return f"{estimate.value:.3f}{ends}"
