"""Distances of a sent update from its gradient, gamma_1, and the bounds that dgp derives from them.

The distance misleads a plain attacker who matches the sent update. It bounds no attacker who does otherwise
(`cosine_on_support`). Passive attackers are those of dgp's Definition 1; Theorem 1 is given as printed and as it is.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.defenses.selection import counts, mask_largest
from secateur.errors import WrongInput, check_number
from secateur.interfaces import Params
from secateur.metrics.membership import Estimate


class Gamma(NamedTuple):
    """The least gamma_1 for which Assumption 1 holds at one update."""

    whole: float  # of all tensors together, as Lemma 1 and Theorem 1 need it
    largest: float  # over the tensors: DGP prunes each by itself
    tensors: dict[str, float]


class TopBounds(NamedTuple):
    """Bounds on the norm of the largest `share` of a tensor's entries, by number, as parts of ||X||_2."""

    lost_at_most: float  # Eq. 21: ||X - top(X)|| <= sqrt(1 - l) ||X||
    kept_at_least: float  # Eq. 22 as printed: ||top(X)|| >= (1 - sqrt(1 - l)) ||X||
    kept_tight: float  # sqrt(l), by Pythagoras: Eq. 22 loses it by the triangle inequality


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


def gamma_1(accumulated: Params, sent: Params) -> Gamma:
    """Return ||X - C(X)||^2 / ||X||^2 of X = gradient + residual (dgp Assumption 1).

    X includes the residual because Eq. 9 is applied to it. Without error feedback X is the gradient, and `whole` is the
    relative distance squared. A tensor of zeros lost nothing and counts as 0.
    """
    before = _norms(list(accumulated.values())).square()
    lost = _norms(list(_difference(accumulated, sent).values())).square()
    shares = dict(zip(accumulated, map(_ratio, lost.tolist(), before.tolist()), strict=True))
    return Gamma(_ratio(float(lost.sum()), float(before.sum())), max(shares.values(), default=0.0), shares)


def share_of_top_sent(gradient: Params, sent: Params, k1: float) -> float:
    """Return the share of a gradient's own largest k1 entries, tensor by tensor, that are sent nonetheless.

    DGP promises 0. With error feedback it ranks gradient + residual. Where starved entries fill the top for good, this
    round's largest ones are below them and are sent.

    Example:
        >>> share_of_top_sent({"w": torch.tensor([5.0, 9.0, 1.0, 2.0])}, {"w": torch.tensor([5.0, 0.0, 0.0, 0.0])}, 0.5)
        0.5
    """
    top_and_sent = total = 0
    for name, value in gradient.items():
        first, _ = counts(value.numel(), k1, 0)
        top = mask_largest(value.abs().flatten(), first)
        top_and_sent += int((top & (sent[name].flatten() != 0)).sum())
        total += first
    return top_and_sent / total if total else 0.0


def lower_bound(size: int, k1: float, k2: float) -> float:
    """Return the least gamma_1 of DGP on a tensor of `size` entries: dropped from the top / (those + the kept).

    Every entry dropped from the top is at least as large as every kept one. Equality holds where all of these are equal
    and the smallest k2 are zeros. There is no such upper bound below 1: a tensor with no more than ceil(k1 n) entries
    other than zero is lost whole. So Assumption 1 is a fact about gradients, never about DGP.

    Example:
        >>> lower_bound(1000, 0.05, 0.75)
        0.2
    """
    top, kept = counts(size, k1, k2)
    return top / (top + kept) if top else 0.0


def printed_lower_bound(k1: float, k2: float) -> float:
    """Return (1 - sqrt(1 - k1 k2))^2 < gamma_1 (dgp Assumption 1 and Appendix B, with the product of k1 and k2).

    The bound is true and useless: at k1 = .05, k2 = .75 it is 0.0004, where `lower_bound` is .2.

    Example:
        >>> f"{printed_lower_bound(0.05, 0.75):.2g}"
        '0.00036'
    """
    return (1 - math.sqrt(1 - k1 * k2)) ** 2


def top_bounds(share: float) -> TopBounds:
    """Return Eqs. 21 and 22 of dgp for the largest `share` of the entries, and the tight form of Eq. 22.

    Example:
        >>> top_bounds(0.64)
        TopBounds(lost_at_most=0.6, kept_at_least=0.4, kept_tight=0.8)
    """
    lost = math.sqrt(1 - share)
    return TopBounds(lost, 1 - lost, math.sqrt(share))


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


def theorem_1_euclidean(epsilon: float, gamma: float, gradient_norm: float) -> Degraded:
    """Bound ||g* - grad W|| by eps + sqrt(gamma_1) ||grad W|| (dgp Theorem 1, Eq. 6).

    The premise is ||g* - DGP(grad W)|| <= eps.

    The triangle inequality gives an upper bound of the attacker's error. The paper reads it as a protection, but it is
    none: with g* = grad W the error is 0. The other side of the triangle, sqrt(gamma_1) ||grad W|| - eps, is a lower
    bound. It binds attackers who fit the sent update closely. Those who know of the pruning (support, reapply) do not.

    Example:
        >>> theorem_1_euclidean(1.0, 0.25, 10.0)
        Degraded(printed=6.0, low=4.0, high=6.0)
    """
    missing = math.sqrt(gamma) * gradient_norm
    return Degraded(epsilon + missing, max(0.0, missing - epsilon), epsilon + missing)


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


def cosine_on_support(epsilon: float, gamma: float) -> float:
    """Return 1 - (1 - eps) sqrt(1 - gamma_1), the exact cosine distance to grad W of a g* that is 0 where DGP pruned.

    Step (d) of Theorem 1's proof loses this: ||DGP(grad W)|| / ||grad W|| is sqrt(1 - gamma_1), which is more than
    1 - sqrt(gamma_1).

    Example:
        >>> round(cosine_on_support(0.0, 0.36), 12), theorem_1_cosine(0.0, 0.36).printed
        (0.2, 0.6)
    """
    return 1 - (1 - epsilon) * math.sqrt(1 - gamma)


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
