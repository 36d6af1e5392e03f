"""Normalised mutual information between the values of two pictures, and its chance level."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.errors import check_whole
from secateur.metrics.pictures import to_float64

PAIRS = 1024  # pairs of counts per block; bounds the memory


class MutualInformation(NamedTuple):
    """Normalised mutual information of each pair, its chance level, and the adjusted one: 0 by chance, 1 when equal."""

    nmi: Tensor  # (N,)
    chance: Tensor  # (N,) the expected NMI when the pixels of one picture are permuted
    ami: Tensor  # (N,)


def nmi(truth: Tensor, guess: Tensor, levels: int = 256) -> MutualInformation:
    """Return the normalised mutual information of quantised pixels (PriPrune, Section 4.2.1), its chance level and AMI.

    The cluster of a pixel is its level floor(levels * value); colours are separate pixels.
    NMI = I(U; V) / ((H(U) + H(V)) / 2); chance = E[I] / ((H(U) + H(V)) / 2);
    AMI = (I - E[I]) / ((H(U) + H(V)) / 2 - E[I]).
    E[I] is exact over all permutations of the pixels (Vinh, Epps and Bailey 2010, Eq. 24a).

    Many levels and few pixels raise the chance level: noise on a natural 32x32 picture scores 0.4 to 0.5 at 256 levels.
    NMI is therefore meaningless without its chance level. Two constant pictures score 1, as in scikit-learn. The
    negative of a picture scores like the picture.

    Example:
        >>> truth = torch.tensor([0.0, 0.0, 1.0, 1.0]).view(1, 1, 2, 2)
        >>> found = nmi(truth, 1 - truth, levels=2)
        >>> [round(float(value), 4) for value in found]
        [1.0, 0.3333, 1.0]
    """
    check_whole("levels", levels, 2)
    u, v = (_quantise(stack, levels) for stack in to_float64(truth, guess))  # (N, P)
    size = u.shape[1]
    of_u, of_v = _histogram(u, levels), _histogram(v, levels)
    h_u, h_v = _entropy(of_u, size), _entropy(of_v, size)
    information = (h_u + h_v - _joint_entropy(u, v, levels)).clamp_min(0)
    expected = _expected_information(of_u, of_v, size)
    mean = (h_u + h_v) / 2

    constant = [(counts > 0).sum(1) == 1 for counts in (of_u, of_v)]
    none, both = constant[0] | constant[1], constant[0] & constant[1]
    convention = both.double()
    return MutualInformation(
        *(
            torch.where(none, convention, value)
            for value in (
                information / mean,
                expected / mean,
                _avoid_zero(information - expected) / _avoid_zero(mean - expected),
            )
        )
    )


def _quantise(pictures: Tensor, levels: int) -> Tensor:
    return (pictures.flatten(1) * levels).floor().clamp(0, levels - 1).long()


def _histogram(quantised: Tensor, levels: int) -> Tensor:
    """Return the number of pixels at each level, (N, L)."""
    counts = torch.zeros(len(quantised), levels, dtype=torch.long, device=quantised.device)
    return counts.scatter_add_(1, quantised, torch.ones_like(quantised))


def _entropy(counts: Tensor, size: int) -> Tensor:
    total: Tensor = torch.special.xlogy(counts, counts.double()).sum(1)
    return math.log(size) - total / size


def _joint_entropy(u: Tensor, v: Tensor, levels: int) -> Tensor:
    """Return H(U, V), (N,), from the pairs of levels that occur: a table of all pairs would be mostly zeros."""
    number, size = u.shape
    picture = torch.arange(number, device=u.device)[:, None]
    cells, counts = torch.unique((picture * levels + u) * levels + v, return_counts=True)
    total = torch.zeros(number, dtype=torch.float64, device=u.device)
    total.index_add_(0, cells // levels**2, torch.special.xlogy(counts, counts.double()))
    return math.log(size) - total / size


def _avoid_zero(value: Tensor) -> Tensor:
    """Return the value at least eps away from 0, as in scikit-learn: 0 / 0 is a perfect match."""
    least = torch.finfo(torch.float64).eps
    return torch.where(value < 0, value.clamp_max(-least), value.clamp_min(least))


def _expected_information(of_u: Tensor, of_v: Tensor, size: int) -> Tensor:
    """Return E[I], (N,), for fixed histograms and a random pairing of the pixels.

    A cell of the table is hypergeometric, so its expectation depends only on its two counts. Counts repeat within and
    between pictures, so each pair of distinct counts is evaluated once.
    """
    (a, many_a), (b, many_b) = _count_distinct(of_u), _count_distinct(of_v)
    pairs = torch.cartesian_prod(a, b)
    table = _expected_x_log_x(pairs[:, 0], pairs[:, 1], size).view(len(a), len(b))
    cells = torch.einsum("na,ab,nb->n", many_a, table, many_b) / size
    return cells - math.log(size) + _entropy(of_u, size) + _entropy(of_v, size)


def _count_distinct(counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct counts above zero, (K,), and their frequency in each picture, (N, K)."""
    kinds = torch.unique(torch.cat([counts.new_zeros(1), counts.flatten()]))
    return kinds[1:], _histogram(torch.searchsorted(kinds, counts), len(kinds))[:, 1:].double()


def _expected_x_log_x(a: Tensor, b: Tensor, size: int) -> Tensor:
    """Return E[X log X], (P,), for X the number of b pixels, drawn out of `size`, that are among a fixed pixels."""
    mean = a * b / size
    reach = 12 * mean.sqrt() + 40  # the tails beyond have probability below e^-70 (Bernstein)
    start = torch.maximum((mean - reach).floor().long(), a + b - size).clamp_min(1)
    stop = torch.minimum((mean + reach).ceil().long(), torch.minimum(a, b))
    log_factorial = torch.arange(size + 1, dtype=torch.float64, device=a.device).add(1).lgamma()
    fixed = log_factorial[a] + log_factorial[b] + log_factorial[size - a] + log_factorial[size - b]
    fixed = fixed - log_factorial[size]

    expectation = torch.zeros_like(fixed)
    for block in torch.split((stop - start).argsort(), PAIRS):  # sorted by length, so that a block has little padding
        low, high = start[block, None], stop[block, None]
        x = low + torch.arange(int((high - low).max()) + 1, device=a.device)
        inside, x = x <= high, torch.minimum(x, high)
        rest = (x, a[block, None] - x, b[block, None] - x, size - a[block, None] - b[block, None] + x)
        probability = (fixed[block, None] - sum(log_factorial[count] for count in rest)).exp()
        expectation[block] = torch.where(inside, probability * torch.special.xlogy(x, x.double()), 0.0).sum(1)
    return expectation
