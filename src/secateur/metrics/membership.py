"""How well an attack tells members from non-members, with bootstrap intervals; ties are handled exactly."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Generator, Tensor

from secateur.interfaces import Guesses

FPRS = (0.1, 0.01, 0.001)


class Estimate(NamedTuple):
    """A value with its 95 % interval; `note` says when the sample cannot support it."""

    value: float
    low: float
    high: float
    note: str | None = None


class Curve(NamedTuple):
    """Cumulative shares from the highest score down, one point per distinct score, starting at (0, 0)."""

    fpr: Tensor  # (..., L + 1)
    tpr: Tensor  # (..., L + 1)


def roc(scores: Tensor, is_member: Tensor) -> Curve:
    """The ROC curve with one point per distinct score: examples that tie are accepted together."""
    return _curve(*_levels(scores, is_member))


def auc(curve: Curve) -> Tensor:
    """The area under the curve by trapezoids, which counts a tied pair as one half.

    Example:
        >>> round(float(auc(roc(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False])))), 3)
        0.875
    """
    step = curve.fpr.diff(dim=-1)
    return (step * (curve.tpr[..., 1:] + curve.tpr[..., :-1]) / 2).sum(-1)


def tpr_at_fpr(curve: Curve, fpr: float) -> Tensor:
    """The largest TPR at a threshold whose FPR is at most `fpr` (no interpolation between thresholds)."""
    return torch.where(curve.fpr <= fpr + 1e-12, curve.tpr, 0.0).amax(-1)


def evaluate(guesses: Guesses, is_member: Tensor, rng: Generator, resamples: int = 1000) -> dict[str, Estimate]:
    """Every measure of an attack, with 95 % percentile intervals from resampling members and non-members apart.

    The sizes of the two sets are the experiment's choice, so each is resampled by itself.
    """
    member = is_member.bool().cpu()
    decided = guesses.members.bool().cpu()
    positive, negative = _levels(guesses.scores.cpu().double(), member)  # (L,) counts of each distinct score
    right = {True: decided[member].double(), False: (~decided[~member]).double()}
    measures = _measures(_curve(positive, negative), right[True].mean(), right[False].mean(), member)
    draws: dict[str, list[Tensor]] = {name: [] for name in measures}
    for start in range(0, resamples, 50):  # 50 at a time bounds the memory at CIFAR size
        number = min(50, resamples - start)
        curve = _curve(_resample(positive, number, rng), _resample(negative, number, rng))
        hit = [_resample_share(right[side], number, rng) for side in (True, False)]
        for name, value in _measures(curve, hit[0], hit[1], member).items():
            draws[name].append(value)
    bounds = torch.tensor([0.025, 0.975], dtype=torch.float64)
    result = {}
    for name, value in measures.items():
        low, high = torch.quantile(torch.cat(draws[name]), bounds).tolist()
        result[name] = Estimate(float(value), low, high, _unsupported(name, int((~member).sum())))
    return result


def share(hits: Tensor) -> Estimate:
    """A share of successes, such as an accuracy, with Wilson's 95 % interval."""
    n, z = hits.numel(), 1.959964
    p = float(hits.double().mean())
    centre, spread = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return Estimate(p, (centre - spread) / (1 + z * z / n), (centre + spread) / (1 + z * z / n))


def _levels(scores: Tensor, is_member: Tensor) -> tuple[Tensor, Tensor]:
    """How many members and non-members have each distinct score, highest first."""
    distinct, level = torch.unique(scores, return_inverse=True)
    positive, negative = (
        torch.bincount(level[side], minlength=distinct.numel()).flip(0).double() for side in (is_member, ~is_member)
    )
    return positive, negative


def _curve(positive: Tensor, negative: Tensor) -> Curve:
    zero = positive.new_zeros((*positive.shape[:-1], 1))
    tp, fp = (torch.cat([zero, x.cumsum(-1)], -1) for x in (positive, negative))
    return Curve(fpr=fp / fp[..., -1:], tpr=tp / tp[..., -1:])


def _measures(curve: Curve, tpr: Tensor, tnr: Tensor, member: Tensor) -> dict[str, Tensor]:
    prior = float(member.double().mean())
    return {
        "attack_accuracy": prior * tpr + (1 - prior) * tnr,
        "balanced_accuracy": (tpr + tnr) / 2,
        "advantage": tpr + tnr - 1,
        "auc": auc(curve),
        **{f"tpr_at_fpr_{fpr:g}": tpr_at_fpr(curve, fpr) for fpr in FPRS},
    }


def _resample(counts: Tensor, number: int, rng: Generator) -> Tensor:
    """Bootstrap draws of a table of counts: (number, L), each row sums to the table's total."""
    total = int(counts.sum())
    edges = counts.cumsum(0)
    drawn = torch.randint(total, (number, total), generator=rng).double()
    level = torch.searchsorted(edges, drawn, right=True)  # a uniform example's level
    return torch.zeros(number, counts.numel(), dtype=torch.float64).scatter_add_(1, level, torch.ones_like(drawn))


def _resample_share(hits: Tensor, number: int, rng: Generator) -> Tensor:
    """Bootstrap draws of a mean of zeros and ones."""
    drawn = torch.randint(hits.numel(), (number, hits.numel()), generator=rng)
    return hits[drawn].mean(1)


def _unsupported(name: str, nonmembers: int) -> str | None:
    if not name.startswith("tpr_at_fpr_"):
        return None
    fpr = float(name.removeprefix("tpr_at_fpr_"))
    if fpr * nonmembers >= 1:
        return None
    return f"not supported by the sample: {nonmembers} non-members, at least {round(1 / fpr)} needed"
