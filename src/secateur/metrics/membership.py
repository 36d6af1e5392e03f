"""Measures of membership attacks with their 95 % intervals; ties are handled exactly.

Nothing is resampled, so a million rows take a second. The interval of the AUC is DeLong's, that of a TPR at a small FPR
comes from order statistics, and shares have Wilson's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.interfaces import Guesses

FPRS = (0.1, 0.01, 0.001)
UNSUPPORTED = "not supported"  # begins the note of a measure for which sample or score are too coarse
Z = 1.959964  # of a normal 95 % interval
TOO_FEW = f"{UNSUPPORTED} by the sample"
POINTS = 200  # points of a plotted curve: enough for a screen


class Estimate(NamedTuple):
    """Value with its 95 % interval; `note` says if the sample is too small for it."""

    value: float
    low: float
    high: float
    note: str | None = None


class RocCurve(NamedTuple):
    """ROC curve from the highest score down, one point per distinct score, starting at (0, 0)."""

    fpr: Tensor  # (..., L + 1)
    tpr: Tensor  # (..., L + 1)


def roc(scores: Tensor, is_member: Tensor) -> RocCurve:
    """Return the ROC curve with one point per distinct score: tied examples are accepted together."""
    level, count = _levels(scores)
    return _curve(_counts(level[is_member], count), _counts(level[~is_member], count))


def auc(curve: RocCurve) -> Tensor:
    """Return the area under the curve by trapezoids, which counts a tied pair as one half.

    Example:
        >>> round(float(auc(roc(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False])))), 3)
        0.875
    """
    step = curve.fpr.diff(dim=-1)
    return (step * (curve.tpr[..., 1:] + curve.tpr[..., :-1]) / 2).sum(-1)


def tpr_at_fpr(curve: RocCurve, fpr: float) -> Tensor:
    """Return the largest TPR at a threshold whose FPR is at most `fpr` (no interpolation between thresholds)."""
    return torch.where(curve.fpr <= fpr + 1e-12, curve.tpr, 0.0).amax(-1)


def tpr_interval(curve: RocCurve, members: int, nonmembers: int, fpr: float, side: float = 0.025) -> Estimate:
    """Return the TPR at a fixed FPR with its interval: of the threshold, and of the share of members beyond it.

    The true threshold of the FPR is unknown. It lies below the r-th highest non-member at confidence `1 - side`, for
    the largest r with P[B < r] <= side; B is binomial over all non-members, each with the chance `fpr`. Its other end
    follows likewise. A share of members has Clopper and Pearson's interval. Both deviations are added as squares;
    benchmarks/intervals.py simulates the coverage.

    Args:
        curve: of all scores.
        members: number of members.
        nonmembers: number of non-members.
        fpr: false-positive rate.
        side: chance that the true TPR lies below the interval, and that it lies above.
    """
    from scipy.stats import beta, binom

    value = float(tpr_at_fpr(curve, fpr))
    hits = round(value * members)
    low = float(beta.ppf(side, hits, members - hits + 1)) if hits else 0.0
    high = float(beta.ppf(1 - side, hits + 1, members - hits)) if hits < members else 1.0
    strict, loose = int(binom.ppf(side, nonmembers, fpr)), int(binom.isf(side, nonmembers, fpr)) + 1
    least = float(tpr_at_fpr(curve, (strict - 1) / nonmembers)) if strict else 0.0  # strictly above that non-member
    beyond = curve.tpr[curve.fpr >= loose / nonmembers - 1e-12]  # that non-member, and all that tie with it
    most = float(beyond[0]) if len(beyond) else 1.0
    down = math.hypot(value - low, max(0.0, value - least))
    up = math.hypot(high - value, max(0.0, most - value))
    return Estimate(value, max(0.0, value - down), min(1.0, value + up))


def roc_figure(curve: RocCurve) -> dict[str, Any]:
    """Return a ROC curve of about 200 points: half evenly spaced, half logarithmically, to keep all low FPRs."""
    last = curve.fpr.numel() - 1
    even = torch.linspace(0, last, POINTS // 2)
    steep = torch.logspace(0, float(torch.tensor(max(last, 1.0)).log10()), POINTS // 2) - 1
    corners = torch.tensor([0, last])
    keep = sorted(set(torch.cat([even, steep, corners]).long().clamp(0, last).tolist()))
    return {"kind": "roc", "fpr": curve.fpr[keep].tolist(), "tpr": curve.tpr[keep].tolist()}


def evaluate(guesses: Guesses, is_member: Tensor) -> dict[str, Estimate]:
    """Return all measures of an attack with 95 % intervals: DeLong's of the AUC, and `tpr_interval`.

    The measures of decisions are sums of two shares, each with Wilson's interval. Members and non-members count apart,
    because the sizes of the two sets are fixed by the experiment. An attack without decisions has only the measures of
    its ranking: AUC and TPR at a fixed FPR.
    """
    member, scores = is_member.bool().to(guesses.scores.device), guesses.scores.double()
    curve, members, others = roc(scores, member), int(member.sum()), int((~member).sum())
    estimates = {}
    if guesses.members is not None:
        decided = guesses.members.bool()
        estimates = _measure_decisions(share(decided[member]), share(~decided[~member]), members / (members + others))
    estimates["auc"] = _normal_estimate(float(auc(curve)), [placements(scores, member)])
    for fpr in FPRS:
        estimate = tpr_interval(curve, members, others, fpr)
        estimates[f"tpr_at_fpr_{fpr:g}"] = estimate._replace(note=_explain_coarse(fpr, curve, others))
    return estimates


def placements(scores: Tensor, is_member: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each member the share of non-members below it, and for each non-member that of members above it.

    Ties count one half. The mean of either is the AUC, and their variances give its own (DeLong et al. 1988).

    Example:
        >>> placements(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False]))
        (tensor([1.0000, 0.7500], dtype=torch.float64), tensor([0.7500, 1.0000], dtype=torch.float64))
    """
    level, count = _levels(scores)
    inside, outside = level[is_member], level[~is_member]
    positive, negative = _counts(inside, count), _counts(outside, count)
    below = negative.sum() - negative.cumsum(0) + negative / 2  # level 0 is the highest
    above = positive.cumsum(0) - positive / 2
    return (below / negative.sum())[inside], (above / positive.sum())[outside]


def _normal_estimate(value: float, sides: Sequence[tuple[Tensor, Tensor]], low: float = 0.0) -> Estimate:
    """Return a value with the normal interval of placements of members and of non-members.

    The placements are those of one score, or of two whose difference is the value. A side of one row has no variance.
    """
    first, *others = sides
    values = [side - others[0][i] if others else side for i, side in enumerate(first)]
    radius = Z * math.sqrt(sum(float(side.var()) / len(side) for side in values if len(side) > 1))
    return Estimate(value, max(low, value - radius), min(1.0, value + radius))


def auc_change(before: Tensor, after: Tensor, is_member: Tensor) -> Estimate:
    """Return the AUC of scores `after` less that of scores `before`, over the same rows, with a paired interval.

    It is DeLong's interval of a difference: rows which are hard for both models cancel.
    """
    member = is_member.bool().cpu()
    scores = [side.double().cpu() for side in (after, before)]
    second, first = (float(auc(roc(side, member))) for side in scores)
    return _normal_estimate(second - first, [placements(side, member) for side in scores], low=-1.0)


def share(hits: Tensor) -> Estimate:
    """Return the share of successes, such as an accuracy, with Wilson's 95 % interval."""
    return share_of(float(hits.double().mean()), hits.numel())


def share_of(p: float, n: float) -> Estimate:
    """Return a share p of n (effective) independent trials with Wilson's 95 % interval.

    Example:
        >>> [round(end, 3) for end in share_of(0.5, 100)[:3]]
        [0.5, 0.404, 0.596]
    """
    centre, spread = p + Z * Z / (2 * n), Z * (p * (1 - p) / n + Z * Z / (4 * n * n)) ** 0.5
    return Estimate(p, (centre - spread) / (1 + Z * Z / n), (centre + spread) / (1 + Z * Z / n))


def _levels(scores: Tensor) -> tuple[Tensor, int]:
    """Return the rank of each score among the distinct scores, (N,), highest first, and their number."""
    distinct, level = torch.unique(scores, return_inverse=True)
    return distinct.numel() - 1 - level, distinct.numel()


def _counts(levels: Tensor, count: int) -> Tensor:
    """Return the number of examples (..., N) at each level, (..., L)."""
    ones = torch.ones(levels.shape, dtype=torch.float64, device=levels.device)
    return ones.new_zeros(*levels.shape[:-1], count).scatter_add_(-1, levels, ones)


def _curve(positive: Tensor, negative: Tensor) -> RocCurve:
    zero = positive.new_zeros((*positive.shape[:-1], 1))
    tp, fp = (torch.cat([zero, x.cumsum(-1)], -1) for x in (positive, negative))
    return RocCurve(fpr=fp / fp[..., -1:], tpr=tp / tp[..., -1:])


def _measure_decisions(tpr: Estimate, tnr: Estimate, prior: float) -> dict[str, Estimate]:
    """Return the measures of decisions, from the shares of members accepted and of non-members rejected."""
    return {
        "attack_accuracy": _add_shares(prior, tpr, 1 - prior, tnr),
        "balanced_accuracy": _add_shares(0.5, tpr, 0.5, tnr),
        "advantage": _add_shares(1.0, tpr, 1.0, tnr, -1.0),
    }


def _add_shares(a: float, one: Estimate, b: float, other: Estimate, constant: float = 0.0) -> Estimate:
    """Return a x + b y + constant of two shares; the deviations of their intervals are added as squares."""
    value = a * one.value + b * other.value + constant
    down = math.hypot(a * (one.value - one.low), b * (other.value - other.low))
    up = math.hypot(a * (one.high - one.value), b * (other.high - other.value))
    return Estimate(value, value - down, value + up)


def _explain_coarse(fpr: float, curve: RocCurve, nonmembers: int) -> str | None:
    """Return a note if the sample or the score is too coarse for TPR at this FPR.

    The score is too coarse if a tie of members and non-members lies across the FPR: only a share of the tied examples
    could be accepted, and a threshold accepts all or none.
    """
    if fpr * nonmembers < 1:
        return f"{TOO_FEW}: {nonmembers} non-members, at least {round(1 / fpr)} needed"
    last = int((curve.fpr <= fpr + 1e-12).sum()) - 1
    if last + 1 == len(curve.fpr):
        return None
    room = int((fpr - float(curve.fpr[last])) * nonmembers + 1e-6)  # non-members that may still be accepted
    if room < 1 or curve.tpr[last + 1] == curve.tpr[last]:
        return None
    tied = round(float(curve.fpr[last + 1] - curve.fpr[last]) * nonmembers)
    return f"{UNSUPPORTED} by the score: {tied} non-members tie with members at its threshold"
