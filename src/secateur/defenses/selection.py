"""Selection of the gradient entries to send: exact numbers by rank of magnitude, ties broken by position."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.func import vmap

from secateur.errors import WrongInput
from secateur.gpu.packing import have_slopes, layout, pack, unpack
from secateur.gpu.triton_loader import load_kernels
from secateur.interfaces import Params

Sizes = tuple[int, ...]  # sizes of concatenated tensors
Rule = Callable[..., tuple[Tensor, ...]]  # (sizes, (n,) of every tree) -> (n,) tensors
LARGE, SAMPLE = 50_000, 16_384  # entries from which a sample pays off, and the sample's size


def counts(size: int, top: float, bottom: float) -> tuple[int, int]:
    """Return how many of `size` entries are dropped from the top, and how many are kept.

    These are ceil(k1 n) and n - ceil(k1 n) - int(k2 n). A tensor with few entries loses at least its largest one if k1
    is above 0.

    Example:
        >>> counts(1000, 0.05, 0.75), counts(10, 0.05, 0.75)
        ((50, 200), (1, 2))
    """
    if not (top >= 0 and bottom >= 0 and top + bottom < 1):  # so that NaN is refused too
        raise WrongInput("k1, k2", f"{top} and {bottom} are not allowed; must be at least 0, with a sum below 1")
    # A share such as .05 is not exact in binary: .05 * 20 must count as 1, not as a little more.
    first = math.ceil(round(top * size, 9))
    return first, max(0, size - first - int(round(bottom * size, 9)))


def end_to_end(rule: Rule, *trees: Params) -> tuple[Params, ...]:
    """Apply a rule to every tensor of one tree, or of several trees with the same names and shapes.

    On a GPU the rule is called once, with all tensors of a tree concatenated, because a launch per tensor takes longer
    than its work. Otherwise the rule is called once per tensor.
    """
    if not trees[0]:  # an update of no tensors: there is nothing to call the rule with
        return tuple({} for _ in trees)
    values = [[tree[name] for name in trees[0]] for tree in trees]
    if _has_kernel(*values[0]):
        packing = layout(values[0])
        rows = [unpack(row, packing) for row in rule(packing.sizes, *(pack(tensors, packing) for tensors in values))]
    else:
        flats = zip(*([value.flatten() for value in tensors] for tensors in values), strict=True)
        results = zip(*(rule((parts[0].numel(),), *parts) for parts in flats), strict=True)
        rows = [[part.view_as(value) for part, value in zip(row, values[0], strict=True)] for row in results]
    return tuple(dict(zip(trees[0], row, strict=True)) for row in rows)


def keep_between(grads: Params, top: float, bottom: float) -> Params:
    """Zero shares of the largest and of the smallest entries of every tensor, by magnitude."""

    def rule(sizes: Sizes, flat: Tensor) -> tuple[Tensor]:
        return (torch.where(top_and_between(sizes, flat, top, bottom)[1], flat, 0),)

    values = list(grads.values())
    if not _has_kernel(*values) or have_slopes(values):
        return end_to_end(rule, grads)[0]
    from secateur.gpu.select import VECTOR, keep_segments

    packing = layout(values, VECTOR)
    row = keep_segments(pack(values, packing)[None], packing.sizes, ranks_of(packing.sizes, top, bottom), VECTOR)[0]
    return dict(zip(grads, unpack(row, packing), strict=True))


def keep_rows(rows: Tensor, sizes: Sizes, aligned: int, top: float, bottom: float) -> Tensor:
    """Apply `keep_between` to the rows of (users, N).

    Each tensor begins at a multiple of `aligned` entries, and N is such a multiple; the gaps become 0.
    """
    if _has_kernel(rows):
        from secateur.gpu.select import keep_segments

        return keep_segments(rows, sizes, ranks_of(sizes, top, bottom), aligned)

    def keep_row(row: Tensor) -> Tensor:
        parts = zip(torch.split_with_sizes(row, [size + -size % aligned for size in sizes]), sizes, strict=True)
        kept = (
            (torch.where(mask_between(part[:size], top, bottom), part[:size], 0), part[size:]) for part, size in parts
        )
        return torch.cat([piece for part, gap in kept for piece in (part, torch.zeros_like(gap))])

    return vmap(keep_row)(rows)


def mask_between(values: Tensor, top: float, bottom: float) -> Tensor:
    """Return a mask of the entries that stay when shares of the largest and smallest magnitudes are dropped."""
    return top_and_between((values.numel(),), values.flatten(), top, bottom)[1].view_as(values)


def top_and_between(sizes: Sizes, flat: Tensor, top: float, bottom: float) -> tuple[Tensor, ...]:
    """Return two (n,) masks: every tensor's share of largest magnitudes, and the entries between it and the smallest.

    Example:
        >>> top_and_between((5,), torch.tensor([-5.0, 1.0, 3.0, -3.0, 4.0]), 0.2, 0.4)[1].tolist()
        [False, False, True, False, True]
    """
    values, ranks = flat.detach(), ranks_of(sizes, top, bottom)
    return _mask_bands(sizes, values, ranks, True) if _has_kernel(values) else slices(sizes, values.abs(), ranks)


@cache  # called in every step, where it would take longer than the launches
def ranks_of(sizes: Sizes, top: float, bottom: float) -> tuple[tuple[int, int], ...]:
    """Return per tensor how many entries are dropped from the top, and how many are dropped or kept."""
    numbers = (counts(size, top, bottom) for size in sizes)
    return tuple((first, first + kept) for first, kept in numbers)


def slices(sizes: Sizes, magnitudes: Tensor, ranks: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Return (n,) masks: the entries down to a rank in their tensor and, of two ranks, those from there to the second.

    The earlier of equal entries counts as larger, and NaN counts as infinite, so that the numbers are exact.

    Example:
        >>> [part.int().tolist() for part in slices((5,), torch.tensor([5.0, 1.0, 3.0, 3.0, 4.0]), ((1, 3),))]
        [[1, 0, 0, 0, 0], [0, 0, 1, 0, 1]]
    """
    if _has_kernel(magnitudes):
        return _mask_bands(sizes, magnitudes, ranks, False)
    parts = zip(torch.split_with_sizes(magnitudes, sizes), ranks, strict=True)
    masks_by_rank = zip(*([_mask_largest(part, number) for number in numbers] for part, numbers in parts), strict=True)
    down = [torch.cat(masks) if len(masks) > 1 else masks[0] for masks in masks_by_rank]
    return (down[0], *(lower & ~upper for upper, lower in pairwise(down)))


def mask_largest(magnitudes: Tensor, number: int | Tensor) -> Tensor:
    """Return an (n,) mask of the `number` largest entries; of equal ones the earlier counts as larger.

    A `number` that is a tensor is never read back to the host.
    """
    if _has_kernel(magnitudes):
        from secateur.gpu.select import bands

        ranks = number.view(1, 1, 1) if isinstance(number, Tensor) else ((number,),)
        return bands(magnitudes[None], (len(magnitudes),), ranks)[0] == 0
    if isinstance(number, Tensor):
        order = _replace_nan(magnitudes).sort(descending=True, stable=True).indices
        inside = torch.arange(len(magnitudes), device=magnitudes.device) < number
        return torch.zeros_like(magnitudes, dtype=torch.bool).scatter(0, order, inside)
    return _mask_largest(magnitudes, number)


def _mask_bands(
    sizes: Sizes, values: Tensor, ranks: tuple[tuple[int, ...], ...], magnitudes: bool
) -> tuple[Tensor, ...]:
    from secateur.gpu.select import bands

    band = bands(values[None], sizes, ranks, magnitudes)[0]
    return tuple(band == number for number in range(len(ranks[0])))


def _has_kernel(*values: Tensor) -> bool:
    """Return True if the tensors are float32 on one GPU and the kernel is available."""
    if not values or not values[0].is_cuda or {value.dtype for value in values} != {torch.float32}:
        return False
    if len({value.get_device() for value in values}) > 1:
        return False
    return load_kernels("secateur.gpu.select", _probe, "selection") is not None


def _probe(ranking: ModuleType) -> None:
    ranking.bands(torch.zeros(1, 1, device="cuda"), (1,), ((1,),))


def _mask_largest(magnitudes: Tensor, number: int) -> Tensor:
    """Return an (n,) mask of the `number` largest entries; of equal ones the earlier counts as larger."""
    if number <= 0:
        return torch.zeros_like(magnitudes, dtype=torch.bool)
    if _must_not_read(magnitudes):
        magnitudes = _replace_nan(magnitudes)
    return _mask_down_to(magnitudes, _value_of_rank(magnitudes, number), number)


def _replace_nan(values: Tensor) -> Tensor:
    return torch.where(values.isnan(), torch.inf, values)


def _must_not_read(magnitudes: Tensor) -> bool:
    """Return True if no value may be read: a read stalls a GPU, and under vmap there is no single value."""
    return magnitudes.is_cuda or is_functorch_wrapped_tensor(magnitudes)


def _value_of_rank(magnitudes: Tensor, number: int) -> Tensor:
    """Return the number-th largest value.

    On a CPU kthvalue is twice as fast as topk; on a GPU it runs on one block.
    """
    if _must_not_read(magnitudes):
        return torch.topk(magnitudes, number, sorted=False).values.amin()
    if magnitudes.numel() >= LARGE and magnitudes.dtype in (torch.float32, torch.float64):
        value = _bracket(magnitudes, number)
        if value is not None:
            return value
    return torch.kthvalue(magnitudes, magnitudes.numel() - number + 1).values


def _bracket(magnitudes: Tensor, number: int) -> Tensor | None:
    """Return the number-th largest value from the bracket that a sample predicts; None if the bracket misses it.

    The work is in numpy, which selects entries by a mask ten times as fast as torch.
    """
    values, size = magnitudes.numpy(), magnitudes.numel()
    # Coprime to the sizes of filters, because magnitudes follow the position in a filter.
    stride = size // SAMPLE // 6 * 6 + 1
    sample = np.sort(values[::stride])[::-1]
    rank = number / size * len(sample)
    width = 4 * math.sqrt(rank * (1 - number / size)) + 2
    high, low = sample[max(0, int(rank - width))], sample[min(len(sample) - 1, int(rank + width))]
    left = number - (size - np.count_nonzero(values <= high))  # NaN counts as above
    near = values[(values >= low) & (values <= high)]
    if not 0 < left <= len(near):
        return None
    return torch.as_tensor(np.partition(near, len(near) - left)[len(near) - left])


def _mask_down_to(magnitudes: Tensor, bound: Tensor, number: int) -> Tensor:
    """Return the entries above the bound, and the first of those equal to it that make up the number."""
    if not _must_not_read(magnitudes):
        below = magnitudes < bound
        if len(below) - np.count_nonzero(below.numpy()) == number:  # almost always there are no ties at the bound
            return below.logical_not_()
        magnitudes, bound = _replace_nan(magnitudes), _replace_nan(bound)
    above, equal = magnitudes > bound, magnitudes == bound
    missing = number - above.sum()
    if _must_not_read(magnitudes):
        return above | (equal & (equal.cumsum(0) <= missing))
    above[equal.nonzero()[: int(missing), 0]] = True
    return above
