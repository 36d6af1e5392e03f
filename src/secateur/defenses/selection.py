"""Which entries of a gradient are sent: by rank of their magnitudes, exactly so many, ties broken by position."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from secateur.errors import WrongInput

LARGE, SAMPLE = 50_000, 16_384  # entries from which a sample of them pays, and its size


def counts(size: int, top: float, bottom: float) -> tuple[int, int]:
    """How many of `size` entries are dropped from the top and how many are kept, ceil(k1 n) and n - ceil - int(k2 n).

    Of a tensor with few entries the top loses at least one, where k1 is above 0.

    Example:
        >>> counts(1000, 0.05, 0.75), counts(10, 0.05, 0.75)
        ((50, 200), (1, 2))
    """
    if not (top >= 0 and bottom >= 0 and top + bottom < 1):  # so that NaN is refused too
        raise WrongInput("k1, k2", f"{top} and {bottom} are not allowed; give shares from 0 whose sum is below 1")
    # A share such as .05 is not exact in binary: .05 * 20 must count as 1, not as a little more.
    first = math.ceil(round(top * size, 9))
    return first, max(0, size - first - int(round(bottom * size, 9)))


def between(values: Tensor, top: float, bottom: float) -> Tensor:
    """Which entries of a tensor stay when shares of the largest and of the smallest magnitudes are dropped."""
    first, kept = counts(values.numel(), top, bottom)
    return ranked_between(values.detach().abs().flatten(), first, kept).view_as(values)


def ranked_between(magnitudes: Tensor, first: int, kept: int) -> Tensor:
    """(n,) bool: the `kept` largest entries after the `first` largest; of equal ones the earlier counts as larger.

    Example:
        >>> ranked_between(torch.tensor([5.0, 1.0, 3.0, 3.0, 4.0]), 1, 2).tolist()
        [False, False, True, False, True]
    """
    return largest(magnitudes, first + kept) & ~largest(magnitudes, first)


def largest(magnitudes: Tensor, number: int) -> Tensor:
    """(n,) bool: the `number` largest entries; of equal ones the earlier counts as larger."""
    if number <= 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    return _down_to(magnitudes, _value_of_rank(magnitudes, number), number)


def _without_asking(magnitudes: Tensor) -> bool:
    """Whether no number may be read on the way: it would stall a GPU, and in vmap there is not one number."""
    return magnitudes.is_cuda or is_functorch_wrapped_tensor(magnitudes)


def _value_of_rank(magnitudes: Tensor, number: int) -> Tensor:
    """The number-th largest value. On a CPU kthvalue is twice as fast as topk; on a GPU it runs on one block."""
    if _without_asking(magnitudes):
        return torch.topk(magnitudes, number, sorted=False).values.amin()
    if magnitudes.numel() >= LARGE and magnitudes.dtype in (torch.float32, torch.float64):
        found = _bracketed(magnitudes, number)
        if found is not None:
            return found
    return torch.kthvalue(magnitudes, magnitudes.numel() - number + 1).values


def _bracketed(magnitudes: Tensor, number: int) -> Tensor | None:
    """The number-th largest value, out of the few that a sample says it is among; None where it is not there after all.

    In numpy, which takes entries by a mask ten times as fast.
    """
    values, size = magnitudes.numpy(), magnitudes.numel()
    stride = size // SAMPLE // 6 * 6 + 1  # coprime to the sizes of filters, which the entries' sizes follow
    sample = np.sort(values[::stride])[::-1]
    rank = number / size * len(sample)
    width = 4 * math.sqrt(rank * (1 - number / size)) + 2
    high, low = sample[max(0, int(rank - width))], sample[min(len(sample) - 1, int(rank + width))]
    left = number - np.count_nonzero(values > high)
    near = values[(values >= low) & (values <= high)]
    if not 0 < left <= len(near):
        return None
    return torch.as_tensor(np.partition(near, len(near) - left)[len(near) - left])


def _down_to(magnitudes: Tensor, bound: Tensor, number: int) -> Tensor:
    """The entries above the bound, and as many of those at it as make up the number, by position."""
    if not _without_asking(magnitudes):
        enough = magnitudes >= bound
        if int(enough.sum()) == number:  # no ties at the bound, as almost always
            return enough
    above, equal = magnitudes > bound, magnitudes == bound
    missing = number - above.sum()
    if _without_asking(magnitudes):
        return above | (equal & (equal.cumsum(0) <= missing))
    above[equal.nonzero()[: int(missing), 0]] = True
    return above
