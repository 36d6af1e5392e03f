"""Passes over the tensors of many clients, (lanes, ...) each.

On a GPU a round waits for its memory: what operations of torch do in several passes, or in slow ones, is one kernel.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import is_functorch_wrapped_tensor

from secateur.gpu.triton_loader import loaded

_STEPPED = (torch.float32, torch.float64)  # of which one fma is torch's step


def rows_at(held: Tensor, places: Tensor) -> Tensor:
    """(lanes, ...) the rows of (rows, ...) at these places (lanes,)."""
    kernels = _kernels_for(held)
    return held.index_select(0, places) if kernels is None else kernels.rows_at(held, places)


def put_rows(held: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write (lanes, ...) rows to these places (lanes,); of several at one place any is left."""
    if kernels := _kernels_for(held):
        kernels.put_rows(held, places, rows)
    else:
        held.index_copy_(0, places, rows)


def copies(value: Tensor, count: int, keep: Tensor | None = None) -> Tensor:
    """(count, ...) copies of a tensor, 0 where it is not kept; no `keep`: all is."""
    value = value if keep is None else torch.where(keep, value, 0)
    if kernels := _kernels_for(value):
        found: Tensor = kernels.copies(value, count)
        return found
    return value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)


def add_weighted(total: Tensor, values: Tensor, weights: Tensor, squared: bool = False) -> None:
    """Add the sum of (lanes, ...) values, or of their squares, by weights (lanes,).

    Who weighs 0 adds nothing, whatever the values are: 0 * NaN is NaN, and not summed.
    """
    if total.is_contiguous() and (kernels := _kernels_for(total)):
        kernels.add_weighted(total, values, weights, squared)
        return
    values = values.square() if squared else values
    total.add_((values * weights.view(-1, *[1] * (values.ndim - 1))).nansum(0))


def looked(parts: Sequence[tuple[Tensor, bool]]) -> tuple[Tensor, Tensor]:
    """(lanes,) whether all entries of (lanes, ...) tensors are finite, and the bytes of those that are not 0.

    Of those with True their squares. Sums tell: a NaN or an infinity does not leave one.
    """
    if kernels := _kernels_for(*(value for value, _ in parts)):
        found: tuple[Tensor, Tensor] = kernels.looked(parts)
        return found
    rows = [(value.square() if squared else value).reshape(len(value), -1) for value, squared in parts]
    sizes = [torch.count_nonzero(row, 1) * row.element_size() for row in rows]
    return torch.stack([row.sum(1).isfinite() for row in rows]).all(0), torch.stack(sizes).sum(0)


def mixed(where: Tensor, values: Tensor, others: Tensor, keep: Tensor | None = None) -> Tensor:
    """(lanes, ...) the values where this is said, else the others (...), which are the same for all; or of one lane.

    It is 0 where all lanes alike do not keep it (...); no `keep`: all is kept.
    """
    given = [where, values, others] if keep is None else [where, values, others, keep]
    if values.ndim > others.ndim and (kernels := _kernels_for(*given)):
        found: Tensor = kernels.mixed(where, values, others, keep)
        return found
    either = torch.where(where, values, others)
    return either if keep is None else torch.where(keep, either, 0)


def parted(where: Tensor, values: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """(lanes, ...) the values with zeros but where this is said, unless it is not `both`; and with zeros there."""
    if kernels := _kernels_for(where, values):
        found: tuple[Tensor, Tensor] = kernels.parted(where, values, both)
        return found
    outside = torch.where(where, 0, values)
    return torch.where(where, values, 0) if both else outside, outside


def erase(where: Tensor, values: Tensor) -> None:
    """Set (lanes, ...) values to 0 where this is said, for all lanes alike (...) or for each; or those of one."""
    kernels = _kernels_for(where, values) if values.is_contiguous() and values.ndim else None
    if kernels is None:
        values.masked_fill_(where, 0)
    else:
        kernels.erase(where, values)


def descend(values: Sequence[Tensor], slopes: Sequence[Tensor], rate: float, dropped: Sequence[Tensor | None]) -> None:
    """A step of -rate * slopes in place, and 0 where a tensor is dropped, as `erase` has it; None: nowhere."""
    others = []
    for value, slope, drop in zip(values, slopes, dropped, strict=True):
        fits = value.is_contiguous() and value.ndim and value.dtype in _STEPPED
        if drop is not None and fits and (kernels := _kernels_for(value, slope, drop)):
            kernels.descend(value, slope, rate, drop)
        else:
            others.append((value, slope, drop))
    if others:
        torch._foreach_add_([value for value, _, _ in others], [slope for _, slope, _ in others], alpha=-rate)
    for value, _, drop in others:
        if drop is not None:
            erase(drop, value)


def both(where: Tensor, keep: Tensor, inverted: bool = False) -> Tensor:
    """(...) where this is said, or `inverted` where it is not, and kept; of one client, and under vmap of many."""
    if where.is_cuda and keep.is_cuda:
        found: Tensor = torch.ops.secateur.both(where, keep, inverted)
        return found
    return _both(where, keep, inverted)


def _both(where: Tensor, keep: Tensor, inverted: bool) -> Tensor:
    return _all_both(where[None], keep[None], inverted)[0]


def _all_both(where: Tensor, keep: Tensor, inverted: bool) -> Tensor:
    """(lanes, ...) of (lanes, ...) each."""
    if kernels := _kernels_for(where, keep):
        found: Tensor = kernels.both(where, keep, inverted)
        return found
    return ~where & keep if inverted else where & keep


def _stacked_both(
    info: Any, dims: tuple[int | None, ...], where: Tensor, keep: Tensor, inverted: bool
) -> tuple[Tensor, int]:
    """Under vmap the many are lanes of one call."""
    first, second = (in_lanes(each, dim, info.batch_size) for each, dim in zip((where, keep), dims, strict=False))
    return _all_both(first, second, inverted), 0


def magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    """(n,) tensors without their signs end to end, and -1 where they are not kept; no `keeps`: all are.

    Of one client, and under vmap of many.
    """
    if all(value.is_cuda for value in values):
        found: Tensor = torch.ops.secateur.magnitudes(list(values), list(keeps))
        return found
    return _magnitudes(values, keeps)


def _magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    return _all_magnitudes([value[None] for value in values], [keep[None] for keep in keeps])[0]


def _all_magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    """(lanes, N) of (lanes, ...) each."""
    if kernels := _kernels_for(*values, *keeps):
        found: Tensor = kernels.magnitudes(values, keeps)
        return found
    sizes = torch.cat([value.flatten(1) for value in values], 1).abs()
    return torch.where(torch.cat([keep.flatten(1) for keep in keeps], 1), sizes, -1) if keeps else sizes


def _stacked(
    info: Any, dims: tuple[list[int | None], ...], values: list[Tensor], keeps: list[Tensor]
) -> tuple[Tensor, int]:
    """Under vmap the many are lanes of one call."""
    own, kept = (
        [in_lanes(each, dim, info.batch_size) for each, dim in zip(*pair, strict=True)]
        for pair in ((values, dims[0]), (keeps, dims[1]))
    )
    return _all_magnitudes(own, kept), 0


def in_lanes(value: Tensor, dim: int | None, count: int) -> Tensor:
    """(count, ...) of what vmap gives to a rule: the many first, or the same for all, which then share its memory."""
    return value.expand(count, *value.shape) if dim is None else value.movedim(dim, 0)


_library = torch.library.Library("secateur", "FRAGMENT")
_library.define("magnitudes(Tensor[] values, Tensor[] keeps) -> Tensor")
_library.impl("magnitudes", _magnitudes, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::magnitudes", _stacked, lib=_library)
_library.define("both(Tensor where, Tensor keep, bool inverted) -> Tensor")
_library.impl("both", _both, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::both", _stacked_both, lib=_library)


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    """The kernels, where these are plain tensors on a GPU that has them."""
    if not all(tensor.is_cuda for tensor in tensors) or any(map(is_functorch_wrapped_tensor, tensors)):
        return None
    return _kernels()


@cache
def _kernels() -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        with _DisableFuncTorch():
            kernels.copies(torch.zeros(1, device="cuda"), 1)

    return loaded("secateur.gpu.client_ops_kernels", probe, "rounds of a federation")
