"""Which entries of a gradient are sent: by rank of their magnitudes, exactly so many, ties broken by position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import vmap

from secateur.errors import WrongInput
from secateur.gpu.packing import apart, have_slopes, joined, layout
from secateur.gpu.triton_loader import loaded
from secateur.interfaces import Params

Sizes = tuple[int, ...]  # of tensors that lie end to end
Rule = Callable[..., tuple[Tensor, ...]]  # (sizes, (n,) of every tree) -> (n,) tensors
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


def end_to_end(rule: Rule, *trees: Params) -> tuple[Params, ...]:
    """What a rule makes of every tensor of one tree, or of several with the same names and shapes.

    On a GPU the rule is called once, with all tensors of a tree end to end, as a launch for each of them takes longer
    than its work; else for each tensor by itself.
    """
    if not trees[0]:  # an update of no tensors: there is nothing to call the rule with
        return tuple({} for _ in trees)
    values = [[tree[name] for name in trees[0]] for tree in trees]
    if _by_kernel(*values[0]):
        laid = layout(values[0])
        rows = [apart(row, laid) for row in rule(laid.sizes, *(joined(own, laid) for own in values))]
    else:
        each = zip(*([value.flatten() for value in own] for own in values), strict=True)
        found = zip(*(rule((parts[0].numel(),), *parts) for parts in each), strict=True)
        rows = [[part.view_as(value) for part, value in zip(row, values[0], strict=True)] for row in found]
    return tuple(dict(zip(trees[0], row, strict=True)) for row in rows)


def kept_between(grads: Params, top: float, bottom: float) -> Params:
    """Every tensor with zeros in place of shares of its largest and of its smallest entries by magnitude."""

    def rule(sizes: Sizes, flat: Tensor) -> tuple[Tensor]:
        return (torch.where(top_and_between(sizes, flat, top, bottom)[1], flat, 0),)

    values = list(grads.values())
    if not _by_kernel(*values) or have_slopes(values):
        return end_to_end(rule, grads)[0]
    from secateur.gpu.select import VECTOR, kept_of

    laid = layout(values, VECTOR)
    row = kept_of(values, laid, ranks_of(laid.sizes, top, bottom))
    return dict(zip(grads, apart(row, laid), strict=True))


def kept_rows(rows: Tensor, sizes: Sizes, aligned: int, top: float, bottom: float) -> Tensor:
    """The same of (users, N): each tensor begins at a multiple of `aligned` entries, which N is; gaps become 0."""
    if _by_kernel(rows):
        from secateur.gpu.select import kept

        return kept(rows, sizes, ranks_of(sizes, top, bottom), aligned)

    def one(row: Tensor) -> Tensor:
        parts = zip(torch.split_with_sizes(row, [size + -size % aligned for size in sizes]), sizes, strict=True)
        kept = ((torch.where(between(part[:size], top, bottom), part[:size], 0), part[size:]) for part, size in parts)
        return torch.cat([each for part, gap in kept for each in (part, torch.zeros_like(gap))])

    return vmap(one)(rows)


def between(values: Tensor, top: float, bottom: float) -> Tensor:
    """Which entries of a tensor stay when shares of the largest and of the smallest magnitudes are dropped."""
    return top_and_between((values.numel(),), values.flatten(), top, bottom)[1].view_as(values)


def top_and_between(sizes: Sizes, flat: Tensor, top: float, bottom: float) -> tuple[Tensor, ...]:
    """(n,) bool each: the share of the largest magnitudes of every tensor, and what lies between it and the smallest.

    Example:
        >>> top_and_between((5,), torch.tensor([-5.0, 1.0, 3.0, -3.0, 4.0]), 0.2, 0.4)[1].tolist()
        [False, False, True, False, True]
    """
    values, ranks = flat.detach(), ranks_of(sizes, top, bottom)
    return _banded(sizes, values, ranks, True) if _by_kernel(values) else slices(sizes, values.abs(), ranks)


@cache  # it is asked in every step, and takes longer than the launches
def ranks_of(sizes: Sizes, top: float, bottom: float) -> tuple[tuple[int, int], ...]:
    """Of every tensor, how many entries are dropped from the top, and how many are dropped or kept."""
    numbers = (counts(size, top, bottom) for size in sizes)
    return tuple((first, first + kept) for first, kept in numbers)


def slices(sizes: Sizes, magnitudes: Tensor, ranks: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """(n,) bool each: the entries down to a rank in their tensor and, of two ranks, those from there to the second.

    Of equal entries the earlier counts as larger, and NaN is infinite, so that the numbers are exact.

    Example:
        >>> [part.int().tolist() for part in slices((5,), torch.tensor([5.0, 1.0, 3.0, 3.0, 4.0]), ((1, 3),))]
        [[1, 0, 0, 0, 0], [0, 0, 1, 0, 1]]
    """
    if _by_kernel(magnitudes):
        return _banded(sizes, magnitudes, ranks, False)
    parts = zip(torch.split_with_sizes(magnitudes, sizes), ranks, strict=True)
    each = zip(*([_largest(part, number) for number in numbers] for part, numbers in parts), strict=True)
    down = [torch.cat(masks) if len(masks) > 1 else masks[0] for masks in each]
    return (down[0], *(lower & ~upper for upper, lower in pairwise(down)))


def largest(magnitudes: Tensor, number: int | Tensor) -> Tensor:
    """(n,) bool: the `number` largest entries, of equal ones the earlier; it may be a tensor, which nobody reads."""
    if _by_kernel(magnitudes):
        from secateur.gpu.select import bands

        ranks = number.view(1, 1, 1) if isinstance(number, Tensor) else ((number,),)
        return bands(magnitudes[None], (len(magnitudes),), ranks)[0] == 0
    if isinstance(number, Tensor):
        order = _without_nan(magnitudes).sort(descending=True, stable=True).indices
        inside = torch.arange(len(magnitudes), device=magnitudes.device) < number
        return torch.zeros_like(magnitudes, dtype=torch.bool).scatter(0, order, inside)
    return _largest(magnitudes, number)


def _banded(sizes: Sizes, values: Tensor, ranks: tuple[tuple[int, ...], ...], magnitudes: bool) -> tuple[Tensor, ...]:
    from secateur.gpu.select import bands

    band = bands(values[None], sizes, ranks, magnitudes)[0]
    return tuple(band == number for number in range(len(ranks[0])))


def _by_kernel(*values: Tensor) -> bool:
    """Whether these lie on one GPU, which has a kernel for them."""
    if not values or not values[0].is_cuda or {value.dtype for value in values} != {torch.float32}:
        return False
    return len({value.get_device() for value in values}) == 1 and _triton()


@cache
def _triton() -> bool:
    def probe(ranking: ModuleType) -> None:
        with _DisableFuncTorch():
            ranking.bands(torch.zeros(1, 1, device="cuda"), (1,), ((1,),))

    return loaded("secateur.gpu.select", probe, "selection") is not None


def _largest(magnitudes: Tensor, number: int) -> Tensor:
    """(n,) bool: the `number` largest entries; of equal ones the earlier counts as larger."""
    if number <= 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    if _without_asking(magnitudes):
        magnitudes = _without_nan(magnitudes)
    return _down_to(magnitudes, _value_of_rank(magnitudes, number), number)


def _without_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.inf, values)


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
    left = number - (size - np.count_nonzero(values <= high))  # so that NaN is above
    near = values[(values >= low) & (values <= high)]
    if not 0 < left <= len(near):
        return None
    return torch.as_tensor(np.partition(near, len(near) - left)[len(near) - left])


def _down_to(magnitudes: Tensor, bound: Tensor, number: int) -> Tensor:
    """The entries above the bound, and as many of those at it as make up the number, by position."""
    if not _without_asking(magnitudes):
        below = magnitudes < bound
        if len(below) - np.count_nonzero(below.numpy()) == number:  # no ties at the bound, as almost always
            return below.logical_not_()
        magnitudes, bound = _without_nan(magnitudes), _without_nan(bound)
    above, equal = magnitudes > bound, magnitudes == bound
    missing = number - above.sum()
    if _without_asking(magnitudes):
        return above | (equal & (equal.cumsum(0) <= missing))
    above[equal.nonzero()[: int(missing), 0]] = True
    return above
