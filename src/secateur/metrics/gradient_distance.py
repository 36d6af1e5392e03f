"""How far what was sent is from the gradient it was made of: distances, gamma_1 and what dgp says of it.

What it is worth: the distance is what a plain attacker who matches the sent update is led astray by. It bounds nobody
who does otherwise (attack_bounds.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.defenses.selection import counts, largest
from secateur.interfaces import Params


def norm(tree: Params) -> float:
    """||.||_2 over all tensors together, in float64."""
    return float(_norms(list(tree.values())).norm())


def distance(first: Params, second: Params) -> float:
    """||a - b||_2 over all tensors together: Definition 1's Euclidean distance."""
    return norm(_difference(first, second))


def cosine_distance(first: Params, second: Params) -> float:
    """1 - <a, b> / (||a|| ||b||) over all tensors together: Definition 1's cosine distance; 1 where one of them is 0.

    Example:
        >>> round(cosine_distance({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 0.0])}), 4)
        0.2929
    """
    dots = [(first[name].double() * second[name].double()).sum() for name in first]
    size = norm(first) * norm(second)
    return max(0.0, 1 - float(torch.stack(dots).sum()) / size) if size else 1.0  # rounding may pass 1


def relative_distance(gradient: Params, sent: Params) -> float:
    """||grad W - g||_2 / ||grad W||_2, the x axis of dgp Fig. 1; of a gradient of zeros 0 or infinite.

    Example:
        >>> relative_distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
        0.8
    """
    return _ratio(distance(gradient, sent), norm(gradient))


class Gamma(NamedTuple):
    """The least gamma_1 for which Assumption 1 holds at one update."""

    whole: float  # of all tensors together: what Lemma 1 and Theorem 1 need
    largest: float  # over the tensors: DGP prunes each by itself
    tensors: dict[str, float]


def gamma_1(accumulated: Params, sent: Params) -> Gamma:
    """||X - C(X)||^2 / ||X||^2 of X = gradient + residual (dgp Assumption 1; of X, because Eq. 9 is applied to it).

    Without error feedback X is the gradient, and `whole` is the relative distance squared. A tensor of zeros lost
    nothing and counts as 0.
    """
    before = _norms(list(accumulated.values())).square()
    lost = _norms(list(_difference(accumulated, sent).values())).square()
    shares = dict(zip(accumulated, map(_ratio, lost.tolist(), before.tolist()), strict=True))
    return Gamma(_ratio(float(lost.sum()), float(before.sum())), max(shares.values(), default=0.0), shares)


def top_sent(gradient: Params, sent: Params, k1: float) -> float:
    """The share of a gradient's own largest k1 entries, tensor by tensor, that are sent nonetheless.

    DGP promises 0. With error feedback it ranks gradient + residual: where starved entries fill the top for good, this
    round's largest ones are below them and are sent.

    Example:
        >>> top_sent({"w": torch.tensor([5.0, 9.0, 1.0, 2.0])}, {"w": torch.tensor([5.0, 0.0, 0.0, 0.0])}, 0.5)
        0.5
    """
    found = total = 0
    for name, value in gradient.items():
        first, _ = counts(value.numel(), k1, 0)
        top = largest(value.abs().flatten(), first)
        found, total = found + int((top & (sent[name].flatten() != 0)).sum()), total + first
    return found / total if total else 0.0


def printed_lower_bound(k1: float, k2: float) -> float:
    """(1 - sqrt(1 - k1 k2))^2 < gamma_1 (dgp Assumption 1 and Appendix B, with the product of k1 and k2).

    True and worth nothing: at k1 = .05, k2 = .75 it is 0.0004, where `lower_bound` is .2.

    Example:
        >>> f"{printed_lower_bound(0.05, 0.75):.2g}"
        '0.00036'
    """
    return (1 - math.sqrt(1 - k1 * k2)) ** 2


def lower_bound(size: int, k1: float, k2: float) -> float:
    """The least gamma_1 that DGP can have on a tensor of `size` entries: dropped from the top / (those + the kept).

    Every entry that is dropped from the top is at least as large as every kept one; equality where all of these are
    equal and the smallest k2 are zeros. There is no such upper bound below 1: a tensor with no more than ceil(k1 n)
    entries that are not zero is lost whole, so Assumption 1 is a fact about gradients, never about DGP.

    Example:
        >>> lower_bound(1000, 0.05, 0.75)
        0.2
    """
    top, kept = counts(size, k1, k2)
    return top / (top + kept) if top else 0.0


class TopBounds(NamedTuple):
    """What the largest `share` of a tensor's entries, by number, hold of its norm; all as parts of ||X||_2."""

    lost_at_most: float  # Eq. 21: ||X - top(X)|| <= sqrt(1 - l) ||X||
    kept_at_least: float  # Eq. 22 as printed: ||top(X)|| >= (1 - sqrt(1 - l)) ||X||
    kept_tight: float  # sqrt(l), by Pythagoras: Eq. 22 loses it by the triangle inequality


def top_bounds(share: float) -> TopBounds:
    """Eqs. 21 and 22 of dgp for the largest `share` of the entries, and what Eq. 22 could have been.

    Example:
        >>> top_bounds(0.64)
        TopBounds(lost_at_most=0.6, kept_at_least=0.4, kept_tight=0.8)
    """
    lost = math.sqrt(1 - share)
    return TopBounds(lost, 1 - lost, math.sqrt(share))


def _difference(first: Params, second: Params) -> Params:
    return {name: value - second[name] for name, value in first.items()}


def _norms(values: list[Tensor]) -> Tensor:
    """(tensors,) the norm of each, still on the device."""
    return torch.stack([torch.linalg.vector_norm(value, dtype=torch.float64) for value in values])


def _ratio(part: float, whole: float) -> float:
    if whole:
        return part / whole
    return math.inf if part else 0.0
