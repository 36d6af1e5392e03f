"""Measures of membership attacks with their 95 % intervals; ties are handled exactly.

Intervals are by bootstrap, but that of a TPR at a small FPR comes from order statistics: so few accusations make a
bootstrap interval too narrow.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur.interfaces import Guesses
from secateur.seeding import spawn

FPRS = (0.1, 0.01, 0.001)
UNSUPPORTED = "not supported"  # begins the note of a measure for which sample or score are too coarse
Z = 1.959964  # of a normal 95 % interval
TOO_FEW = f"{UNSUPPORTED} by the sample"
AT_ONCE = 50  # bootstrap draws at a time; bounds the memory at CIFAR size
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


def evaluate(guesses: Guesses, is_member: Tensor, rng: Generator, resamples: int = 1000) -> dict[str, Estimate]:
    """Return all measures of an attack with 95 % intervals: percentiles of bootstrap draws, or `tpr_interval`.

    Members and non-members are resampled separately, because the sizes of the two sets are fixed by the experiment.
    An attack without decisions has only the measures of its ranking: AUC and TPR at a fixed FPR.
    """
    device = guesses.scores.device
    member, decides = is_member.bool().to(device), guesses.members is not None
    decided = member if guesses.members is None else guesses.members.bool()
    level, count = _levels(guesses.scores.double())
    sides = [(level[member], decided[member]), (level[~member], ~decided[~member])]
    prior = float(member.double().mean())
    noise = spawn(rng, device)

    def measure_draw(drawn: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        (inside, accepted), (outside, rejected) = drawn
        ranking = {"auc": auc(_curve(_counts(inside, count), _counts(outside, count)))}
        return (_decision_measures(accepted, rejected, prior) if decides else {}) | ranking

    exact = measure_draw(sides)
    draws: list[dict[str, Tensor]] = []
    for start in range(0, resamples, AT_ONCE):
        draws.append(measure_draw([_resample(*side, min(AT_ONCE, resamples - start), noise) for side in sides]))
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64, device=device)
    table = torch.stack([torch.cat([draw[name] for draw in draws]) for name in exact])
    ends, values = torch.quantile(table, bounds, dim=1).T.tolist(), torch.stack([*exact.values()]).tolist()
    estimates = {name: Estimate(value, *end) for name, value, end in zip(exact, values, ends, strict=True)}
    curve, (inside, outside) = roc(guesses.scores.double(), member), (len(side) for side, _ in sides)
    for fpr in FPRS:
        estimate = tpr_interval(curve, inside, outside, fpr)
        estimates[f"tpr_at_fpr_{fpr:g}"] = estimate._replace(note=_explain_coarse(fpr, curve, outside))
    return estimates


def auc_change(before: Tensor, after: Tensor, is_member: Tensor, rng: Generator, resamples: int = 500) -> Estimate:
    """Return the AUC of scores `after` less that of scores `before`, over the same rows, with a paired interval.

    Both scores of a row are resampled together, so that rows which are hard for both models cancel.
    """
    member = is_member.bool().cpu()
    levels = [_levels(scores.double().cpu()) for scores in (before, after)]
    inside, outside = member.nonzero().squeeze(1), (~member).nonzero().squeeze(1)

    def measure(rows: tuple[Tensor, Tensor]) -> Tensor:
        first, second = (
            auc(_curve(_counts(level[rows[0]], count), _counts(level[rows[1]], count))) for level, count in levels
        )
        return second - first

    draws = []
    for start in range(0, resamples, AT_ONCE):
        number = min(AT_ONCE, resamples - start)
        drawn = [side[torch.randint(len(side), (number, len(side)), generator=rng)] for side in (inside, outside)]
        draws.append(measure((drawn[0], drawn[1])))
    low, high = torch.quantile(torch.cat(draws), torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(measure((inside, outside))), low, high)


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


def _decision_measures(accepted: Tensor, rejected: Tensor, prior: float) -> dict[str, Tensor]:
    """Return the measures of decisions: which members were accepted, which non-members rejected."""
    tpr, tnr = accepted.double().mean(-1), rejected.double().mean(-1)
    return {
        "attack_accuracy": prior * tpr + (1 - prior) * tnr,
        "balanced_accuracy": (tpr + tnr) / 2,
        "advantage": tpr + tnr - 1,
    }


def _resample(levels: Tensor, right: Tensor, number: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """Return bootstrap draws of the examples of one set: two tensors (number, N)."""
    size = levels.numel()
    drawn = torch.randint(size, (number, size), generator=rng, device=levels.device)
    return levels[drawn], right[drawn]


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
