"""The gate of a release: finished runs held against a policy, and against the last release."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

from secateur.config.base import PolicyFile
from secateur.evaluation.limits import (
    CLAIM,
    Check,
    Evidence,
    Outcome,
    attacker_of,
    check,
    collect,
    outcome,
    policy_of,
    uses_shadows,
)
from secateur.evaluation.validity import count_shadows
from secateur.metrics.estimates import difference
from secateur.runs.rows import Row

SARIF = "https://json.schemastore.org/sarif-2.1.0.json"
LEVELS = {
    Outcome.ABOVE: "error",
    Outcome.INCONCLUSIVE: "warning",
    Outcome.WITHIN: "none",
}  # SARIF: what passes has no level
SIGNS = {Outcome.ABOVE: "FAIL", Outcome.INCONCLUSIVE: "INCONCLUSIVE", Outcome.WITHIN: "within the limit"}


@dataclass(frozen=True)
class Gate:
    """Decision on a release: every check, by the run that it is about."""

    policy: PolicyFile
    checks: Mapping[str, Sequence[Check]]  # by run
    reasons: Sequence[str] = field(default_factory=list)  # why nothing can be decided
    remarks: Sequence[str] = field(default_factory=list)  # how the attackers differ from those of the last release

    @property
    def outcome(self) -> Outcome:
        """The answer to all checks; above if one is, whatever else is missing."""
        everything = outcome([item for checks in self.checks.values() for item in checks])
        return Outcome.INCONCLUSIVE if self.reasons and everything is Outcome.WITHIN else everything

    @property
    def sentence(self) -> str:
        """The decision in one sentence; it never says more than the evidence shows."""
        total = sum(map(len, self.checks.values()))
        if self.outcome is Outcome.ABOVE:
            return "FAIL: what was measured is above a limit, worse than the last release, or refutes a claim."
        if self.outcome is Outcome.INCONCLUSIVE:
            return "INCONCLUSIVE: the evidence does not show that the limits hold."
        return f"WITHIN THE LIMITS: all {total} checks hold against the attackers that were run, at their strength."


def decide(
    runs: Mapping[str, Sequence[Row]],
    policy: PolicyFile,
    baseline: Sequence[Row] | None = None,
    today: date | None = None,
) -> Gate:
    """Hold the rows of runs against a policy, and against the last release if there is one.

    Args:
        runs: rows by the name of their run.
        policy: limits with their dates.
        baseline: rows of the last release's run.
        today: the day of the decision; a policy past its review decides nothing.
    """
    reasons, remarks = [], []
    if today is not None and policy.review_by is not None and today > policy.review_by:
        reasons.append(f"the policy was to be reviewed by {policy.review_by}")
    rules = policy_of(policy.limits, policy.claim)
    checks = {name: check(rows, rules) for name, rows in runs.items()}
    if not rules.limits and policy.claim is None and baseline is None:
        reasons.append("the policy has no limits")
    if baseline is not None:
        for name, rows in runs.items():
            checks[name] = [*checks[name], *compare_with_baseline(rows, baseline, list(rules.limits) or ["auc"])]
            remarks += [f"{name}: {remark}" for remark in describe_differences(rows, baseline)]
    return Gate(policy, checks, reasons, remarks)


def compare_with_baseline(rows: Sequence[Row], baseline: Sequence[Row], measures: Sequence[str]) -> list[Check]:
    """Return a check for every measure: the strongest attack now, less the strongest attack on the last release.

    A release is worse if the interval of the difference lies above 0. Attackers that differ can hide a change, or look
    like one: where they may have decided, the check is inconclusive.
    """
    return [_compare(rows, baseline, measure) for measure in measures]


def _compare(rows: Sequence[Row], baseline: Sequence[Row], measure: str) -> Check:
    name = f"{measure} since the last release"
    now, before = (_select_strongest(collect(side, [measure])) for side in (rows, baseline))
    if now is None or before is None or now.estimate is None or before.estimate is None:
        reason = f"it was not measured {'now' if now is None else 'in the last release'}"
        return Check("this run", name, 0.0, Outcome.INCONCLUSIVE, reason=reason)
    change = difference(now.estimate, before.estimate)
    evidence = Evidence(now.subject, name, now.attack, change, min(now.trainings, before.trainings))
    if change.low > 0:
        shared = {_attacker(row) for row in baseline if row.metric == measure and row.value is not None}
        kept = _select_strongest(collect([row for row in rows if _attacker(row) in shared], [measure]))
        worse = kept is not None and kept.estimate is not None and difference(kept.estimate, before.estimate).low > 0
        doubt = "" if worse and not _has_more(rows, baseline, now) else _explain_doubt(rows, baseline, measure)
        decided = Outcome.INCONCLUSIVE if doubt else Outcome.ABOVE
    else:
        missing = _list_attackers(baseline, measure).keys() - _list_attackers(rows, measure).keys()
        strong = [attacker for attacker in missing if uses_shadows(attacker[0]) or attacker[0] == before.attack]
        doubt = _explain_doubt(rows, baseline, measure) if strong or _has_more(baseline, rows, before) else ""
        decided = Outcome.INCONCLUSIVE if doubt else Outcome.WITHIN
    return Check(now.subject, name, 0.0, decided, evidence, doubt)


def describe_differences(rows: Sequence[Row], baseline: Sequence[Row]) -> list[str]:
    """Return how the attackers and the data of a run differ from those of the last release, as sentences."""
    attackers = [_list_attackers(side) for side in (rows, baseline)]
    remarks = []
    for side, other, where in ((0, 1, "this run, not the last release"), (1, 0, "the last release, not this run")):
        if names := [name for key, name in attackers[side].items() if key not in attackers[other]]:
            remarks.append(f"attackers of {where}: {', '.join(names)}")
    shadows = [count_shadows(side) for side in (rows, baseline)]
    if shadows[0] != shadows[1]:
        remarks.append(f"the attacker had {shadows[0]} shadow models, in the last release {shadows[1]}")
    data = [", ".join(dict.fromkeys(row.dataset for row in side)) for side in (rows, baseline)]
    if data[0] != data[1]:
        remarks.append(f"the data are {data[0]}, those of the last release {data[1]}")
    return remarks


def _explain_doubt(rows: Sequence[Row], baseline: Sequence[Row], measure: str) -> str:
    relevant = [[row for row in side if row.attack is None or row.metric == measure] for side in (rows, baseline)]
    return f"the attackers differ: {'; '.join(describe_differences(*relevant))}"


def _has_more(rows: Sequence[Row], others: Sequence[Row], strongest: Evidence) -> bool:
    """Return True if the strongest attack of some rows had more shadow models than the attackers of others."""
    return uses_shadows(strongest.attack or "") and count_shadows(rows) > count_shadows(others)


def _list_attackers(rows: Sequence[Row], measure: str | None = None) -> dict[tuple[Any, ...], str]:
    """Return the attackers that measured something, with their names."""
    known = [row for row in rows if row.attack and row.value is not None and measure in (None, row.metric)]
    return {_attacker(row): f"{row.attack} (adaptive)" if row.adaptive else str(row.attack) for row in known}


def _attacker(row: Row) -> tuple[Any, ...]:
    return row.attack or "", *attacker_of(row)


def render_markdown(gate: Gate) -> str:
    """Return a summary for a pull request."""
    lines = [f"### Secateur: {gate.outcome.upper()}", "", gate.sentence, ""]
    if gate.policy.set_by:
        dates = [f"set by {gate.policy.set_by}"]
        dates += [f"on {gate.policy.set_on}"] if gate.policy.set_on else []
        dates += [f"review by {gate.policy.review_by}"] if gate.policy.review_by else []
        lines += [f"Policy {gate.policy.name}: {', '.join(dates)}.", ""]
    notes = [*gate.reasons, *gate.remarks]
    lines += [f"- {note}" for note in notes] + ([""] if notes else [])
    lines += ["| run | model | measure | measured | limit | result |", "|---|---|---|---|---|---|"]
    for name, checks in gate.checks.items():
        for item in checks:
            sign = "not refuted" if item.measure == CLAIM and item.passed else SIGNS[item.outcome]
            cells = [name, item.subject, item.measure, _format_measured(item), f"{item.limit:.4g}", sign]
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    lines += ["", _describe_trainings([item for checks in gate.checks.values() for item in checks])]
    notes = [item.sentence for checks in gate.checks.values() for item in checks if not item.passed]
    unmet = (f"{item.subject} {item.unmet}." for checks in gate.checks.values() for item in checks if item.unmet)
    notes += dict.fromkeys(unmet)
    return "\n".join([*lines, "", *(f"- {note}" for note in notes)]).rstrip() + "\n"


def sarif(gate: Gate, version: str) -> str:
    """Return the checks as SARIF 2.1.0, which code hosts show beside a change."""
    rules = dict.fromkeys(item.measure for checks in gate.checks.values() for item in checks)
    results = [
        {
            "ruleId": item.measure,
            "level": LEVELS[item.outcome],
            "kind": "pass" if item.passed else "fail" if item.outcome is Outcome.ABOVE else "open",
            "message": {"text": item.sentence},
            "locations": [{"physicalLocation": {"artifactLocation": {"uri": f"{name}/results.jsonl"}}}],
        }
        for name, checks in gate.checks.items()
        for item in checks
    ]
    driver = {"name": "secateur", "version": version, "rules": [{"id": rule} for rule in rules]}
    document: dict[str, Any] = {"$schema": SARIF, "version": "2.1.0"}
    document["runs"] = [{"tool": {"driver": driver}, "results": results}]
    return json.dumps(document, indent=2) + "\n"


def _describe_trainings(checks: Sequence[Check]) -> str:
    """Return what the intervals of the checks cover; empty if nothing was measured."""
    trainings = {item.evidence.trainings for item in checks if item.evidence is not None and item.measure != CLAIM}
    if 1 in trainings:
        return "Intervals cover the rows of one training; another training may differ."
    return "Intervals cover rows and trainings." if trainings else ""


def _select_strongest(items: Sequence[Evidence]) -> Evidence | None:
    known = [item for item in items if item.estimate is not None and item.supported]
    return max(known, key=lambda item: item.estimate.value if item.estimate else 0.0, default=None)


def _format_measured(item: Check) -> str:
    if item.evidence is None or item.evidence.estimate is None:
        return "not measured"
    value, low, high = item.evidence.estimate[:3]
    under = f" ({item.evidence.attack})" if item.evidence.attack else ""
    return f"{value:.3f} [{low:.3f}, {high:.3f}]{under}"
