"""Verdicts on a paper's claims by measured intervals: supported, not supported, or undecided.

Claims are data: a paper's claims.json has the words, need, bound and unit of every claim, by table and name. It also
has the two keys of the results that a claim compares (`Results.judge`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scipy.stats import binom

from secateur.metrics.membership import Estimate

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
TAIL = 0.025  # the share of 95 % intervals that lie above their own centre by chance
Need = Literal["most", "every", "some"]
Cases = dict[str, Estimate | None]  # by the name of a case; None: not measured


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, the measurements that concern it, and the verdict."""

    claim: str
    measured: str
    verdict: str
    key: str = ""  # table.name in the paper's claims.json, or the name of a claim that code judges


def judge(
    claim: str,
    cases: Mapping[str, Estimate | None],
    need: Need = "most",
    bound: float = 0.0,
    unit: str = "points",
    key: str = "",
) -> Finding:
    """Test the claim `case > bound` in most, every or some cases by the cases' intervals.

    A case counts for the claim if its interval lies entirely above the bound, and against the claim if no part does.
    Among many cases a few lie above by chance: `some` needs more of them than chance explains.
    """
    known = {name: case for name, case in cases.items() if case is not None}
    above = sum(case.low > bound for case in known.values())
    against = sum(case.high <= bound for case in known.values())
    return Finding(claim, _describe(known, above, against, unit), verdict(above, against, len(known), need), key)


def verdict(above: int, against: int, cases: int, need: Need = "most") -> str:
    """Return the verdict for these numbers of cases above the bound and against the claim.

    Example:
        >>> verdict(3, 1, 5), verdict(1, 1, 5), verdict(2, 1, 5, "some"), verdict(4, 1, 5, "every")
        ('supported', 'undecided', 'supported', 'not supported')
        >>> verdict(1, 0, 2, "some"), verdict(1, 0, 80, "some"), verdict(6, 0, 80, "some")
        ('supported', 'undecided', 'supported')
    """
    if not cases:
        return UNDECIDED
    by_chance = float(binom.sf(above - 1, cases, TAIL))  # that so many lie above though all are at the bound
    enough = {"most": above > cases / 2, "every": above == cases, "some": above > 0 and by_chance < 0.05}
    refuted = {"most": against >= cases / 2, "every": against > 0, "some": against == cases}
    return SUPPORTED if enough[need] else NOT_SUPPORTED if refuted[need] else UNDECIDED


def negate(estimate: Estimate) -> Estimate:
    """Return an estimate with the other sign, for a claim that a measure is low."""
    return Estimate(-estimate.value, -estimate.high, -estimate.low, estimate.note)


def equals(claim: str, measured: Estimate, paper: float, key: str = "") -> Finding:
    """Test whether our interval contains the paper's number."""
    text = f"{format_estimate(measured)} against the paper's {100 * paper:.2f}%"
    if not (math.isfinite(measured.low) and math.isfinite(measured.high)):
        return Finding(claim, text, UNDECIDED, key)
    return Finding(claim, text, SUPPORTED if measured.low <= paper <= measured.high else NOT_SUPPORTED, key)


def format_estimate(estimate: Estimate, unit: str = "%") -> str:
    """Format a number with its interval: in per cent, in percentage points (signed), or plain.

    Example:
        >>> format_estimate(Estimate(0.5, 0.4, 0.6)), format_estimate(Estimate(0.012, -0.01, 0.03), "points")
        ('50.0% [40.0, 60.0]', '+1.2 points [-1.0, +3.0]')
        >>> format_estimate(Estimate(0.2718, 0.26, 0.28), ""), format_estimate(Estimate(7995189.4, 7.9e6, 8e6), "")
        ('0.272 [0.260, 0.280]', '7,995,189 [7,900,000, 8,000,000]')
    """
    plain = ",.0f" if abs(estimate.value) >= 1000 else "z.3f"  # z: never -0.0, whose sign is rounding's
    scale, form = (1, plain) if unit == "" else (100, "z.1f") if unit == "%" else (100, "+z.1f")
    space = " " if unit == "points" else ""
    ends = [f"{scale * end:{form}}" for end in (estimate.low, estimate.high) if math.isfinite(end)]
    text = f"{scale * estimate.value:{form}}{space}{unit}"
    return f"{text} [{', '.join(ends)}]" if len(ends) == 2 and estimate.low < estimate.high else text


def _describe(cases: Mapping[str, Estimate], above: int, against: int, unit: str) -> str:
    if not cases:
        return "not measured here"
    if len(cases) == 1:
        ((name, case),) = cases.items()
        return f"{name}: {format_estimate(case, unit)}"
    centre = sum(case.value for case in cases.values()) / len(cases)
    average = format_estimate(Estimate(centre, -math.inf, math.inf), unit)
    undecided = len(cases) - above - against
    return f"{above} of {len(cases)} yes, {against} no, {undecided} within their intervals; on average {average}"
