"""Passive attackers as dgp defines them, and what pruning does to them as its Theorem 1 says and as it is."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from secateur.errors import WrongInput
from secateur.metrics.membership import Estimate


def epsilon(distances: Tensor, delta: float, level: float = 0.95) -> Estimate:
    """The least eps for which an attack is an (eps, delta)-passive attack, P(D(grad W, g*) <= eps) >= 1 - delta.

    dgp Definition 1, from the distances (Euclidean or cosine) that it reached in trials: the ceil((1 - delta) n)-th
    smallest of n, with an interval that holds for every distribution (order statistics, by the binomial). Its high end
    is infinite, with a note, where so few trials cannot bound so rare a failure; 20 trials bound no delta below .17.

    It measures how well an attack fits a gradient, not how well it finds a picture: g* = grad W is eps = 0.

    Example:
        >>> import torch
        >>> epsilon(torch.arange(1.0, 101.0), delta=0.1)
        Estimate(value=90.0, low=84.0, high=96.0, note=None)
    """
    from scipy.stats import binom

    trials, share = distances.numel(), 1 - delta
    if not 0 <= delta < 1:
        raise WrongInput("delta", f"{delta} is not allowed; give a probability from 0 up to, not including, 1")
    if trials == 0 or not bool(distances.isfinite().all()):
        raise WrongInput("distances", "are missing or not finite; give one of every trial, diverged ones left out")
    ordered = distances.double().flatten().sort().values.tolist()
    value = ordered[max(math.ceil(round(share * trials, 9)), 1) - 1]
    tail = (1 - level) / 2
    below = binom.cdf(range(-1, trials), trials, share)  # P(fewer than i trials lie below the quantile), i = 0 ... n
    low = max((i for i in range(trials + 1) if below[i] <= tail), default=0)
    high = next((i for i in range(1, trials + 1) if below[i] >= 1 - tail), None)
    note = None if high else f"no upper end: {trials} trials cannot bound a failure in {delta:g} of the cases"
    return Estimate(value, ordered[low - 1] if low else 0.0, ordered[high - 1] if high else math.inf, note)


class Degraded(NamedTuple):
    """Where an attacker who fits what was sent to within eps can end up, as a distance to the true gradient."""

    printed: float  # dgp Theorem 1: as an upper bound its proof gives it, for the cosine under a false step
    low: float  # nothing nearer is possible: the only one of the three that protects
    high: float  # nothing farther is


def theorem_1_euclidean(epsilon: float, gamma: float, gradient_norm: float) -> Degraded:
    """||g* - grad W|| <= eps + sqrt(gamma_1) ||grad W||, where ||g* - DGP(grad W)|| <= eps (dgp Theorem 1, Eq. 6).

    The triangle inequality: an upper bound of the attacker's error. The paper reads it as a protection, and it is none:
    with g* = grad W the error is 0. The other side of the triangle, sqrt(gamma_1) ||grad W|| - eps, is a lower bound,
    and binds those who fit what was sent closely; one who knows of the pruning (support, reapply) does not.

    Example:
        >>> theorem_1_euclidean(1.0, 0.25, 10.0)
        Degraded(printed=6.0, low=4.0, high=6.0)
    """
    missing = math.sqrt(gamma) * gradient_norm
    return Degraded(epsilon + missing, max(0.0, missing - epsilon), epsilon + missing)


def theorem_1_cosine(epsilon: float, gamma: float) -> Degraded:
    """1 - cos(g*, grad W) <= eps + (1 - eps) sqrt(gamma_1), where 1 - cos(g*, DGP(grad W)) <= eps (dgp Theorem 1).

    Step (c) of the proof takes g* to be 0 wherever DGP pruned. A picture's gradient is not, and then the printed value
    is no bound on either side (a test has g* beyond it, and g* = grad W at 0). `low` and `high` are what angles allow:
    that between g* and grad W differs from arccos sqrt(1 - gamma_1) by at most arccos(1 - eps).
    """
    if not 0 <= gamma <= 1:
        raise WrongInput("gamma", f"{gamma} is not allowed; give gamma_1 of an upload that only drops, from 0 to 1")
    pruned, fitted = math.acos(math.sqrt(1 - gamma)), math.acos(max(-1.0, 1 - epsilon))
    low, high = max(0.0, pruned - fitted), min(math.pi, pruned + fitted)
    return Degraded(epsilon + (1 - epsilon) * math.sqrt(gamma), 1 - math.cos(low), 1 - math.cos(high))


def cosine_on_support(epsilon: float, gamma: float) -> float:
    """1 - (1 - eps) sqrt(1 - gamma_1): the cosine distance to grad W of a g* that is 0 wherever DGP pruned, exactly.

    What step (d) of Theorem 1's proof loses: ||DGP(grad W)|| / ||grad W|| is sqrt(1 - gamma_1), which is more than
    1 - sqrt(gamma_1).

    Example:
        >>> round(cosine_on_support(0.0, 0.36), 12), theorem_1_cosine(0.0, 0.36).printed
        (0.2, 0.6)
    """
    return 1 - (1 - epsilon) * math.sqrt(1 - gamma)
