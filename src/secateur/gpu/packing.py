"""Packing of tensors into one row, and unpacking: many operations on small tensors become one."""

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
    """Layout of tensors in a row."""

    sizes: tuple[int, ...]
    slots: tuple[int, ...]  # sizes including the gaps after the tensors
    short: tuple[tuple[int, int], ...]  # tensors with a gap: index and size
    shapes: tuple[tuple[int, Size], ...]  # tensors that are not flat: index and shape


def layout(values: Sequence[Tensor], aligned: int = 1) -> Layout:
    """Return the layout in which every tensor starts at a multiple of `aligned` entries."""
    return _layout(tuple([value.shape for value in values]), aligned)


@cache  # host work for each of many small tensors takes longer than a kernel on a GPU
def _layout(shapes: tuple[Size, ...], aligned: int) -> Layout:
    sizes = tuple(shape.numel() for shape in shapes)
    return Layout(
        sizes,
        tuple(size + -size % aligned for size in sizes),
        tuple((index, size) for index, size in enumerate(sizes) if size % aligned),
        tuple((index, shape) for index, shape in enumerate(shapes) if len(shape) != 1),
    )


def pack(values: Sequence[Tensor], laid: Layout) -> Tensor:
    """Pack tensors into a row, (n,); the gaps hold arbitrary values.

    torch.cat takes five times as long on a GPU if sizes differ much, but supports transforms of torch.func.
    """
    if is_transformed(values) or any(value.requires_grad for value in values):
        gaps = [slot - size for slot, size in zip(laid.slots, laid.sizes, strict=True)]
        parts = zip((value.flatten() for value in values), (values[0].new_zeros(gap) for gap in gaps), strict=True)
        return torch.cat([part for both in parts for part in both])
    row = values[0].new_empty(sum(laid.slots))
    torch._foreach_copy_(unpack(row, laid), [value.contiguous() for value in values])
    return row


def unpack(row: Tensor, laid: Layout) -> list[Tensor]:
    """Unpack the tensors of a row, as views."""
    tracked = is_functorch_wrapped_tensor(row) or row.requires_grad
    # Else nothing refers to the row itself, and autograd need not track the shared memory.
    parts = list((torch.split_with_sizes if tracked else torch.unsafe_split_with_sizes)(row, laid.slots))
    for index, size in laid.short:
        parts[index] = parts[index][:size]
    for index, shape in laid.shapes:
        parts[index] = torch.reshape(parts[index], shape)
    return parts


def is_transformed(values: Sequence[Tensor]) -> bool:
    """Return True if a tensor belongs to a transform of torch.func."""
    return peek_interpreter_stack() is not None and any(map(is_functorch_wrapped_tensor, values))


def have_slopes(values: Sequence[Tensor]) -> bool:
    """Return True if a tensor requires a gradient, by autograd or by torch.func."""
    return any(map(_has_slope, values)) if is_transformed(values) else any([value.requires_grad for value in values])


def _has_slope(value: Tensor) -> bool:
    while is_functorch_wrapped_tensor(value):
        if is_gradtrackingtensor(value):
            return True
        value = get_unwrapped(value)
    return value.requires_grad
