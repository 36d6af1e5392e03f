"""Tensors end to end in a row, and apart again: many operations on small tensors become one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor, is_gradtrackingtensor
from torch._utils import _unflatten_dense_tensors


def joined(values: Sequence[Tensor]) -> Tensor:
    """(n,) tensors end to end. cat takes a GPU five times as long where sizes differ much, but it knows transforms."""
    if any(is_functorch_wrapped_tensor(value) or value.requires_grad for value in values):
        return torch.cat([value.flatten() for value in values])
    return copied(values)[0]


def copied(values: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """The same of tensors of no transform, and each of them as a view of the row."""
    row = values[0].new_empty(sum(value.numel() for value in values))
    views = apart(row, values)
    torch._foreach_copy_(list(views), [value.contiguous() for value in values])
    return row, views


def apart(row: Tensor, like: Sequence[Tensor]) -> Sequence[Tensor]:
    """The tensors in an (n,) row, as views."""
    if is_functorch_wrapped_tensor(row) or row.requires_grad:
        return shaped(torch.split_with_sizes(row, [value.numel() for value in like]), like)
    # In one call: by themselves they take longer than a kernel.
    views: Sequence[Tensor] = _unflatten_dense_tensors(row, like)  # type: ignore[no-untyped-call]
    return views


def shaped(parts: Sequence[Tensor], like: Sequence[Tensor]) -> list[Tensor]:
    """Flat tensors in the shapes of others."""
    # A view costs more than a small tensor's work, and most tensors are as flat as they must be.
    return [part if one.ndim == 1 else part.view(one.shape) for part, one in zip(parts, like, strict=True)]


def has_slope(value: Tensor) -> bool:
    """Whether a gradient is asked of it, by autograd or by torch.func."""
    while is_functorch_wrapped_tensor(value):
        if is_gradtrackingtensor(value):
            return True
        value = get_unwrapped(value)
    return value.requires_grad
