"""First screen of an audit: the answer, one sentence with a magnitude, three numbers, and what they rest on.

The answer is that a model leaks, that it is within limits, or that the evidence is inconclusive. It is never "safe".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from secateur.evaluation.limits import (
    CLAIM,
    LEVEL,
    UNTESTED,
    Check,
    Evidence,
    Outcome,
    check_claims,
    collect,
    outcome,
    p_of_guessing,
    subject_of,
    uses_shadows,
)
from secateur.evaluation.validity import METRIC, SWAPPED, Validity, doubt_leaks, failures
from secateur.metrics.estimates import holm
from secateur.report.summary import group_by, name_deed
from secateur.report.table import WORST, name_measure
from secateur.report.verdict import GUESSING, Badge, describe_unmet
from secateur.runs.rows import Row

# Above these an attack is better than guessing. A guess has a TPR that equals the FPR on average, but at a threshold
# that is the (k + 1)-th of n non-members, (k + 1) / (n + 1) lie beyond it: up to twice the FPR.
GUESSES = {"auc": GUESSING, "tpr_at_fpr_0.01": 0.02, "tpr_at_fpr_0.001": 0.002}
MEASURES = tuple(GUESSES)
MEANINGS = {
    "auc": "how well members are told from others: 0.5 is guessing, 1 is always right",
    "tpr_at_fpr_0.01": "share of members that are named while 1 of 100 others is accused",
    "tpr_at_fpr_0.001": "share of members that are named while 1 of 1,000 others is accused",
}
STRONG_AUC, STRONG_TPR = 0.7, 0.1  # a leak that anyone would call large
FPR = 0.01  # of the sentence with a magnitude
CROWD = 1000  # people of the sentence with a magnitude
ANSWERS = {
    Outcome.ABOVE: Badge("FAIL: above a limit", "bad"),
    Outcome.INCONCLUSIVE: Badge("INCONCLUSIVE", "doubtful"),
    Outcome.WITHIN: Badge("WITHIN THE LIMITS, against these attackers", "good"),
}


REFUTED = Badge("FAIL: a claimed epsilon is refuted", "bad")
FINE_TUNING = "The proved epsilon covers fine-tuning only, not the original's training; it is not tested by this audit."


@dataclass(frozen=True)
class Headline:
    """The first screen."""

    badge: Badge
    sentences: list[str]
    numbers: list[tuple[str, str, str]] = field(default_factory=list)  # measure, value with interval, attack and model
    limits: list[str] = field(default_factory=list)  # one line a model
    checks: list[tuple[bool, str]] = field(default_factory=list)  # validity: holds, and a sentence


def build_headline(rows: Sequence[Row], limits: Sequence[Check] | None = None) -> Headline:
    """Return the first screen of an audit's rows; `limits` are the checks of its limits, None if there are none."""
    claims = [item for run in group_by(rows, lambda row: row.extra.get("run")).values() for item in check_claims(run)]
    headline = _build_measured(rows, [item for item in limits or [] if item.measure != CLAIM])
    refuted = any(item.outcome is Outcome.ABOVE for item in claims)
    unmet = describe_unmet(rows, lambda row: str(row.defense))
    untested = [FINE_TUNING] if any(row.metric == "epsilon" and UNTESTED in (row.note or "") for row in rows) else []
    return replace(
        headline,
        badge=REFUTED if refuted else headline.badge,
        sentences=[*headline.sentences, *unmet, *(f"{_capitalise(item.sentence)}." for item in claims), *untested],
    )


def _build_measured(rows: Sequence[Row], limits: Sequence[Check]) -> Headline:
    """Return the first screen without the claims."""
    collected = _collect(rows, MEASURES)
    shipped = [item for item in collected if item.estimate is not None]
    if not shipped:
        badge = ANSWERS[outcome(limits)] if limits else Badge("INCONCLUSIVE: no attack was run", "doubtful")
        sentences = [] if limits else ["Nothing is known of these models' leakage."]
        return Headline(badge, sentences, limits=_list_limits(limits))
    originals = _collect([row for row in rows if row.pruner == "none"], MEASURES)
    before = originals if any(item.subject not in {o.subject for o in originals} for item in shipped) else []
    leaking = select_leaking(shipped)
    badge = ANSWERS[outcome(limits)] if limits else _choose_badge(shipped, leaking, rows)
    top = select_strongest(_split(shipped).get("auc", []))
    deed = name_deed((row.pruner, row.sparsity) for row in rows)
    sentences = [_describe_magnitude(shipped, before, leaking, deed), _describe_change(rows, top, deed)]
    sentences += [_describe_doubt(rows, leaking)]
    if swapped := failures(rows, SWAPPED):
        sentences = [f"Nothing is known of leakage: {sentence}." for sentence in swapped[:1]]
    sentences.append(_describe_attacker(rows, top, shipped))
    numbers = [_format_strongest(items) for items in _split(collected).values()]
    return Headline(
        badge,
        [sentence for sentence in sentences if sentence],
        numbers,
        _list_limits(limits),
        [(check.holds, check.sentence) for check in list_checks(rows)],
    )


def list_checks(rows: Sequence[Row]) -> list[Validity]:
    """Return the validity checks of a run: one line a check that holds, and each that does not with its model.

    Checks of several models or seeds differ in their numbers; the first stands for those that hold.
    """
    lines = []
    checked = [row for row in rows if row.metric == METRIC]
    for name, same in group_by(checked, lambda row: str(row.extra.get("check"))).items():
        several = len({_name_model(row) for row in same}) > 1
        held = group_by([row for row in same if row.value == 1], lambda row: row.note or "")
        for note, alike in list(held.items())[:1]:
            others = sum(map(len, held.values())) - 1
            more = f" [{_name_model(alike[0])}; the check holds for {others} more]" if len(held) > 1 else ""
            lines.append(Validity(name, True, note + more))
        failed = group_by([row for row in same if row.value != 1], lambda row: row.note or "")
        for note, alike in failed.items():
            names = f"{'; '.join(map(_name_model, alike))}: " if several else ""
            lines.append(Validity(name, False, names + note))
    return lines


def _name_model(row: Row) -> str:
    run = f"{row.extra['run']}, " if row.extra.get("run") else ""
    return f"{run}{subject_of(row)}, seed {row.seed}"


def select_leaking(items: Sequence[Evidence]) -> set[str]:
    """Return the models on which an attack is better than guessing, at one level for all comparisons (Holm)."""
    known = [item for item in items if item.supported]
    adjusted = holm([p_of_guessing(item, GUESSES[item.measure]) for item in known])
    return {item.subject for item, p in zip(known, adjusted, strict=True) if p <= LEVEL}


def select_strongest(items: Sequence[Evidence]) -> Evidence | None:
    """Return the evidence with the highest value that sample and score support."""
    known = [item for item in items if item.supported and item.estimate is not None]
    return max(known, key=lambda item: item.estimate.value if item.estimate else 0.0, default=None)


def _collect(rows: Sequence[Row], measures: Sequence[str]) -> list[Evidence]:
    """Return the evidence on these measures; on a page of several runs each run's models carry its name."""
    runs = group_by(rows, lambda row: row.extra.get("run"))
    return [
        item if run is None else replace(item, subject=f"{run}: {item.subject}")
        for run, same in runs.items()
        for item in collect(same, measures)
    ]


def _split(items: Sequence[Evidence]) -> Mapping[str, list[Evidence]]:
    return group_by(items, lambda item: item.measure)


def _choose_badge(shipped: Sequence[Evidence], leaking: set[str], rows: Sequence[Row]) -> Badge:
    """Return the answer without limits; of members that differ by themselves no leak can be told."""
    if leaking and not doubt_leaks(rows):
        tops = {measure: select_strongest(items) for measure, items in _split(shipped).items()}
        auc, tpr = (top.estimate.value if (top := tops.get(m)) and top.estimate else 0.0 for m in MEASURES[:2])
        large = auc >= STRONG_AUC or tpr >= STRONG_TPR
        return Badge("LEAKS STRONGLY", "bad") if large else Badge("LEAKS", "bad")
    if failures(rows) or not any(item.attack and uses_shadows(item.attack) for item in shipped):
        return Badge("INCONCLUSIVE", "doubtful")
    return Badge("NO LEAK SHOWN by these attackers", "doubtful")


def _describe_magnitude(shipped: Sequence[Evidence], before: Sequence[Evidence], leaking: set[str], deed: str) -> str:
    """Return the sentence that a board understands: how many members an attacker names, at what price."""
    top = select_strongest(_split(shipped).get("tpr_at_fpr_0.01", []))
    if not leaking:
        return "No attack that was run was shown to be better than guessing; a stronger attack might be."
    if top is None or top.estimate is None:
        return "An attacker recognises members better than by guessing; rare accusations could not be measured."
    auc = select_strongest(_split(shipped).get("auc", []))
    if top.estimate.low <= FPR and auc is not None and auc.estimate is not None and auc.estimate.low > GUESSING:
        value, low, high = auc.estimate[:3]
        shown = f"AUC {value:.3f} [{low:.3f}, {high:.3f}] under {auc.attack}"
        rare = f"Where {round(CROWD * FPR)} of {CROWD:,} others are accused, it is not shown to be better."
        return f"An attacker recognises members better than by guessing: {shown}. {rare}"
    named, price = round(CROWD * top.estimate.value), round(CROWD * FPR)
    text = f"Of {CROWD:,} members an attacker names {named}, with {price} false accusations among {CROWD:,} others"
    original = select_strongest(_split(before).get("tpr_at_fpr_0.01", []))
    if original is not None and original.estimate is not None:
        text += f"; before {deed} {round(CROWD * original.estimate.value)}"
    return text + "."


def _describe_doubt(rows: Sequence[Row], leaking: set[str]) -> str:
    """Return that a leak is in doubt, if members and non-members differ by themselves."""
    return (
        "This may not be the model's doing: the blind check below fails." if leaking and failures(rows, "blind") else ""
    )


def _describe_change(rows: Sequence[Row], top: Evidence | None, deed: str) -> str:
    """Return whether the compression changed the strongest attack, paired over the same rows."""
    changes = [item for item in _collect(rows, ["auc_change"]) if item.estimate is not None]
    most = next((x for x in changes if top and (x.subject, x.attack) == (top.subject, top.attack)), None)
    if most is None or most.estimate is None:
        return ""
    value, low, high = most.estimate[:3]
    verb = "raised" if low > 0 else "lowered" if high < 0 else "did not measurably change"
    change = f"AUC {value:+.3f} [{low:+.3f}, {high:+.3f}] on {most.subject} under {most.attack}"
    return f"{_capitalise(deed)} {verb} the leakage: {change}."


def _describe_attacker(rows: Sequence[Row], top: Evidence | None, shipped: Sequence[Evidence]) -> str:
    """Return how many rows were asked about, how many trainings the numbers cover, and what the attacker had."""
    counts = [
        max((row.value or 0 for row in rows if row.metric == name), default=0) for name in ("members", "nonmembers")
    ]
    asked = f"{counts[0]:,.0f} members and {counts[1]:,.0f} non-members were asked about. " if all(counts) else ""
    trainings = len({row.seed for row in rows})
    covers = (
        f"{trainings} trainings and their rows" if trainings > 1 else "the rows of one training; another may differ"
    )
    shadowed = top is not None and top.attack is not None and uses_shadows(top.attack)
    beaten = any(item.attack and uses_shadows(item.attack) for item in shipped)
    without = "needs no shadow models; attackers with shadow models were weaker" if beaten else "has no shadow models"
    knows = "has shadow models of its own" if shadowed else without
    public = max((row.value or 0 for row in rows if row.metric == "population"), default=0)
    knows += f", trained with {public:,.0f} more rows of its own" if public and shadowed else ""
    asked += "Members are the records that the model was trained on. " if asked else ""
    return f"{asked}The strongest attacker sees the model's answers and {knows}. Intervals cover {covers}."


def _capitalise(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]


def _format_strongest(items: Sequence[Evidence]) -> tuple[str, str, str]:
    """Return a measure, its value under the strongest attack, and that attack; or why the sample has no value."""
    item = select_strongest(items)
    if item is None or item.estimate is None:
        return name_measure(items[0].measure), "not known", items[0].note
    value, low, high = item.estimate[:3]
    if item.measure == "auc":
        text = f"{value:.3f} [{low:.3f}, {high:.3f}]"
    else:
        text = f"{100 * value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
    subject = "the model" if item.subject == "the original, none" else item.subject  # given, and not compressed here
    return name_measure(item.measure), text, f"{item.attack} on {subject}"


def _list_limits(checks: Sequence[Check]) -> list[str]:
    """Return one line a model: its limits that are passed first, else those that are inconclusive.

    Where all limits hold, the lines say which these are.
    """
    kinds = [(Outcome.ABOVE, "above the limit"), (Outcome.INCONCLUSIVE, "inconclusive")]
    kinds = [(Outcome.WITHIN, "within the limits")] if outcome(checks) is Outcome.WITHIN else kinds
    lines = []
    for subject, items in group_by(checks, lambda check: check.subject).items():
        for kind, verb in kinds:
            decided = [item for item in items if item.outcome is kind]
            if decided:
                lines.append(f"{subject}: {verb}: " + "; ".join(map(_describe_check, decided)))
                break
    return lines


def _describe_check(check: Check) -> str:
    reason = f" ({check.reason})" if check.reason else ""
    if check.evidence is None or check.evidence.estimate is None:
        return f"{name_measure(check.measure)}, limit {check.limit:g}{reason}"
    value, low, high = check.evidence.estimate[:3]
    under = f" under {check.evidence.attack}" if check.evidence.attack else ""
    if check.measure.startswith(WORST) and check.evidence.note:
        under += f" ({check.evidence.note.partition(';')[0]})"
    return f"{name_measure(check.measure)} {value:.3f} [{low:.3f}, {high:.3f}]{under}, limit {check.limit:g}{reason}"
