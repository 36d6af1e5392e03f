"""Limits on the leakage of pruned models, for an audit in a build pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from secateur.runs.rows import Row


@dataclass(frozen=True)
class Check:
    """Comparison of one limit with one measurement of a pruned model."""

    model: str
    measure: str
    value: float | None  # None: nothing was measured
    low: float  # the interval's low end, which decides
    limit: float

    @property
    def passed(self) -> bool:
        """True if the limit holds. It is broken if the interval lies above it, or if nothing was measured."""
        return self.value is not None and self.low <= self.limit

    @property
    def sentence(self) -> str:
        """The check as a sentence."""
        if self.value is None:
            return f"{self.model}: {self.measure} was not measured, so the limit {self.limit:g} cannot be said to hold"
        verb = "is within" if self.passed else "is above"
        return (
            f"{self.model}: {self.measure} {self.value:.3f} (at least {self.low:.3f}) {verb} the limit {self.limit:g}"
        )


def check(rows: Sequence[Row], limits: Mapping[str, float]) -> list[Check]:
    """Check every limit for every pruned model, attack and seed; for the originals if nothing was pruned.

    `accuracy_drop` is the original's test accuracy minus the pruned model's. Its low end is the original's low end
    minus the pruned model's high end. A limit without a measurement fails.
    """
    checks = []
    originals = {_original(row): row for row in rows if row.metric == "test_accuracy" and row.pruner == "none"}
    only_originals = all(row.pruner == "none" for row in rows)
    for row in rows:
        if (row.pruner == "none" and not only_originals) or row.value is None:
            continue
        if row.metric in limits and row.attack is not None:
            low = row.value if row.low is None else row.low
            checks.append(Check(_name(row), row.metric, row.value, low, limits[row.metric]))
        if row.metric == "test_accuracy" and "accuracy_drop" in limits and (before := originals.get(_original(row))):
            drop = (before.value or 0.0) - row.value
            low = (before.low if before.low is not None else before.value or 0.0) - (row.high or row.value)
            checks.append(Check(_name(row), "accuracy_drop", drop, min(low, drop), limits["accuracy_drop"]))
    measured = {check.measure for check in checks}
    return checks + [
        Check("this audit", name, None, 0.0, limit) for name, limit in limits.items() if name not in measured
    ]


def junit(checks: Sequence[Check]) -> str:
    """Return the checks as JUnit XML, which CI servers read."""
    failures = sum(not result.passed for result in checks)
    suite = ElementTree.Element("testsuite", name="secateur", tests=str(len(checks)), failures=str(failures))
    for result in checks:
        case = ElementTree.SubElement(suite, "testcase", classname=result.model, name=result.measure)
        if not result.passed:
            ElementTree.SubElement(case, "failure", message=result.sentence)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _original(row: Row) -> tuple[object, ...]:
    """Return the key of the original that a model was pruned from; network slimming trains its own original."""
    return row.model, row.dataset, row.seed, row.extra.get("original")


def _name(row: Row) -> str:
    parts = [f"{row.pruner} {row.sparsity:g}", str(row.defense)]
    if row.attack is not None:
        parts.append(f"under {row.attack}")
    return ", ".join([*parts, f"seed {row.seed}"])
