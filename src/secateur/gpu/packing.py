"""Tensors end to end in a row, and apart again: many operations on small tensors become one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Size, Tensor
from torch._C._functorch import (
    get_unwrapped,
    is_functorch_wrapped_tensor,
    is_gradtrackingtensor,
    peek_interpreter_stack,
)


class Layout(NamedTuple):
    """How tensors lie in a row."""

    sizes: tuple[int, ...]
    slots: tuple[int, ...]  # their sizes with the gaps behind them
    short: tuple[tuple[int, int], ...]  # of those with a gap: which, and its size
    shapes: tuple[tuple[int, Size], ...]  # of those that are not flat: which, and its shape


def layout(values: Sequence[Tensor], aligned: int = 1) -> Layout:
    """Each begins at a multiple of `aligned` entries."""
    return _layout(tuple([value.shape for value in values]), aligned)


@cache  # on a GPU whatever is done for each of many small tensors takes longer than a kernel
def _layout(shapes: tuple[Size, ...], aligned: int) -> Layout:
    sizes = tuple(shape.numel() for shape in shapes)
    return Layout(
        sizes,
        tuple(size + -size % aligned for size in sizes),
        tuple((place, size) for place, size in enumerate(sizes) if size % aligned),
        tuple((place, shape) for place, shape in enumerate(shapes) if len(shape) != 1),
    )


def joined(values: Sequence[Tensor], laid: Layout) -> Tensor:
    """(n,) tensors in a row, anything in the gaps.

    cat takes a GPU five times as long where sizes differ much, but it knows transforms.
    """
    if transformed(values) or any(value.requires_grad for value in values):
        gaps = [slot - size for slot, size in zip(laid.slots, laid.sizes, strict=True)]
        parts = zip((value.flatten() for value in values), (values[0].new_zeros(gap) for gap in gaps), strict=True)
        return torch.cat([part for both in parts for part in both])
    row = values[0].new_empty(sum(laid.slots))
    torch._foreach_copy_(apart(row, laid), [value.contiguous() for value in values])
    return row


def apart(row: Tensor, laid: Layout) -> list[Tensor]:
    """The tensors in a row, as views."""
    tracked = is_functorch_wrapped_tensor(row) or row.requires_grad
    # Else nobody has the row itself, and autograd need not know who shares its memory.
    parts = list((torch.split_with_sizes if tracked else torch.unsafe_split_with_sizes)(row, laid.slots))
    for place, size in laid.short:
        parts[place] = parts[place][:size]
    for place, shape in laid.shapes:
        parts[place] = torch.reshape(parts[place], shape)
    return parts


def transformed(values: Sequence[Tensor]) -> bool:
    """Whether one of them belongs to a transform of torch.func."""
    return peek_interpreter_stack() is not None and any(map(is_functorch_wrapped_tensor, values))


def have_slopes(values: Sequence[Tensor]) -> bool:
    """Whether a gradient is asked of one of them, by autograd or by torch.func."""
    return any(map(_has_slope, values)) if transformed(values) else any([value.requires_grad for value in values])


def _has_slope(value: Tensor) -> bool:
    while is_functorch_wrapped_tensor(value):
        if is_gradtrackingtensor(value):
            return True
        value = get_unwrapped(value)
    return value.requires_grad
