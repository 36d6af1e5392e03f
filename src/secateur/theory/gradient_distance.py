"""Distances of a sent update from its gradient, and the bound that dgp derives from them.

The distance misleads a plain attacker who matches the sent update. It bounds no attacker who does otherwise. Passive
attackers are those of dgp's Definition 1; Theorem 1 is given as printed and as it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.errors import WrongInput, check_number
from secateur.interfaces import Params
from secateur.metrics.membership import Estimate


class Degraded(NamedTuple):
    """Distances to the true gradient that an attacker who fits the sent update to within eps can reach."""

    printed: float  # dgp Theorem 1: an upper bound by its proof, for the cosine under a false step
    low: float  # nothing nearer is possible: the only one of the three that protects
    high: float  # nothing farther is possible


def relative_distance(gradient: Params, sent: Params) -> float:
    """Return ||grad W - g||_2 / ||grad W||_2, the x axis of dgp Fig. 1; of a gradient of zeros 0 or infinite.

    Example:
        >>> relative_distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
        0.8
    """
    return _ratio(distance(gradient, sent), norm(gradient))


def cosine_distance(first: Params, second: Params) -> float:
    """Return 1 - <a, b> / (||a|| ||b||) over all tensors together, or 1 where one of them is 0.

    This is Definition 1's cosine distance.

    Example:
        >>> round(cosine_distance({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 0.0])}), 4)
        0.2929
    """
    dots = [(first[name].double() * second[name].double()).sum() for name in first]
    size = norm(first) * norm(second)
    return max(0.0, 1 - float(torch.stack(dots).sum()) / size) if size else 1.0  # rounding may pass 1


def distance(first: Params, second: Params) -> float:
    """Return ||a - b||_2 over all tensors together: Definition 1's Euclidean distance."""
    return norm(_difference(first, second))


def norm(tree: Params) -> float:
    """Return ||.||_2 over all tensors together, in float64."""
    return float(_norms(list(tree.values())).norm())


def epsilon(distances: Tensor, delta: float, level: float = 0.95) -> Estimate:
    """Return the least eps for which an attack is (eps, delta)-passive: P(D(grad W, g*) <= eps) >= 1 - delta.

    dgp Definition 1, from the distances (Euclidean or cosine) that the attack reached in n trials: the ceil((1 - delta)
    n)-th smallest. The interval holds for every distribution (order statistics, by the binomial). Its high end is
    infinite, with a note, where so few trials cannot bound so rare a failure; 20 trials bound no delta below .17.

    eps measures how well an attack fits a gradient, not how well it finds a picture: g* = grad W is eps = 0.

    Example:
        >>> import torch
        >>> epsilon(torch.arange(1.0, 101.0), delta=0.1)
        Estimate(value=90.0, low=84.0, high=96.0, note=None)
    """
    from scipy.stats import binom

    trials, share = distances.numel(), 1 - delta
    check_number("delta", delta, "[0, 1)")
    if trials == 0 or not bool(distances.isfinite().all()):
        raise WrongInput("distances", "are missing or not finite; use one of every trial, without diverged ones")
    ordered = distances.double().flatten().sort().values.tolist()
    value = ordered[max(math.ceil(round(share * trials, 9)), 1) - 1]
    tail = (1 - level) / 2
    below = binom.cdf(range(-1, trials), trials, share)  # P(fewer than i trials lie below the quantile), i = 0 ... n
    low = max((i for i in range(trials + 1) if below[i] <= tail), default=0)
    high = next((i for i in range(1, trials + 1) if below[i] >= 1 - tail), None)
    note = None if high else f"no upper end: {trials} trials cannot bound a failure in {delta:g} of the cases"
    return Estimate(value, ordered[low - 1] if low else 0.0, ordered[high - 1] if high else math.inf, note)


def theorem_1_cosine(epsilon: float, gamma: float) -> Degraded:
    """Bound 1 - cos(g*, grad W) by eps + (1 - eps) sqrt(gamma_1) (dgp Theorem 1).

    The premise is 1 - cos(g*, DGP(grad W)) <= eps.

    Step (c) of the proof takes g* to be 0 wherever DGP pruned. A picture's gradient is not, and then the printed value
    is no bound on either side. A test has g* beyond it, and g* = grad W at 0. `low` and `high` follow from angles: that
    between g* and grad W differs from arccos sqrt(1 - gamma_1) by at most arccos(1 - eps).
    """
    check_number("gamma", gamma, "[0, 1]")  # above 1 the upload did more than drop entries
    pruned, fitted = math.acos(math.sqrt(1 - gamma)), math.acos(max(-1.0, 1 - epsilon))
    low, high = max(0.0, pruned - fitted), min(math.pi, pruned + fitted)
    return Degraded(epsilon + (1 - epsilon) * math.sqrt(gamma), 1 - math.cos(low), 1 - math.cos(high))


def _difference(first: Params, second: Params) -> Params:
    """Return a - b, tensor by tensor."""
    return {name: value - second[name] for name, value in first.items()}


def _norms(values: list[Tensor]) -> Tensor:
    """Return (tensors,) the norm of each, still on the device."""
    return torch.stack([torch.linalg.vector_norm(value, dtype=torch.float64) for value in values])


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 / 0 is 0."""
    if whole:
        return part / whole
    return math.inf if part else 0.0
