"""Elementwise operations on the tensors of many clients, each (lanes, ...); a lane is a client.

On a GPU the memory limits the speed of a round. Work for which torch needs several passes, or slow ones, is therefore
one kernel.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from secateur.gpu.triton_loader import load_kernels

_STEPPED = (torch.float32, torch.float64)  # dtypes for which one fma equals torch's step


def rows_at(held: Tensor, places: Tensor) -> Tensor:
    """Return the rows of `held` (rows, ...) at the indices `places` (lanes,), as (lanes, ...)."""
    kernels = _kernels_for(held)
    return held.index_select(0, places) if kernels is None else kernels.rows_at(held, places)


def put_rows(held: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write `rows` (lanes, ...) to the indices `places` (lanes,); for a repeated index any one row remains."""
    if kernels := _kernels_for(held):
        kernels.put_rows(held, places, rows)
    else:
        held.index_copy_(0, places, rows)


def copies(value: Tensor, count: int, keep: Tensor | None = None) -> Tensor:
    """Return copies of a tensor, (count, ...), 0 where `keep` is False; None keeps all."""
    value = value if keep is None else torch.where(keep, value, 0)
    if kernels := _kernels_for(value):
        stacked: Tensor = kernels.copies(value, count)
        return stacked
    return value.expand(count, *value.shape).clone(memory_format=torch.contiguous_format)


def add_weighted(total: Tensor, values: Tensor, weights: Tensor, squared: bool = False) -> None:
    """Add to `total` the sum of values (lanes, ...), or of their squares, weighted by `weights` (lanes,).

    A lane of weight 0 adds nothing, even if its values are NaN: 0 * NaN is NaN, and NaN is not summed.
    """
    if total.is_contiguous() and (kernels := _kernels_for(total)):
        kernels.add_weighted(total, values, weights, squared)
        return
    values = values.square() if squared else values
    total.add_((values * weights.view(-1, *[1] * (values.ndim - 1))).nansum(0))


def check_finite(parts: Sequence[tuple[Tensor, bool]]) -> tuple[Tensor, Tensor]:
    """Return per lane (lanes,) True if all entries are finite, and the bytes of the non-zero entries.

    `parts` holds tensors (lanes, ...); a tensor with the flag True is squared first. Finiteness is read from the sum:
    a NaN or an infinity makes the sum non-finite.
    """
    if kernels := _kernels_for(*(value for value, _ in parts)):
        summary: tuple[Tensor, Tensor] = kernels.check_finite(parts)
        return summary
    rows = [(value.square() if squared else value).reshape(len(value), -1) for value, squared in parts]
    sizes = [torch.count_nonzero(row, 1) * row.element_size() for row in rows]
    return torch.stack([row.sum(1).isfinite() for row in rows]).all(0), torch.stack(sizes).sum(0)


def mix(where: Tensor, values: Tensor, others: Tensor, keep: Tensor | None = None) -> Tensor:
    """Return `values` (lanes, ...) where `where` is True, else `others` (...), which all lanes share.

    The result is 0 where `keep` (...), shared too, is False; None keeps all. A single lane without its axis also works.
    """
    tensors = [where, values, others] if keep is None else [where, values, others, keep]
    if values.ndim > others.ndim and (kernels := _kernels_for(*tensors)):
        result: Tensor = kernels.mix(where, values, others, keep)
        return result
    chosen = torch.where(where, values, others)
    return chosen if keep is None else torch.where(keep, chosen, 0)


def split_where(where: Tensor, values: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """Return the values (lanes, ...) with zeros outside `where`, and the values with zeros inside `where`.

    Without `both`, the first result is not computed; the second result takes its slot.
    """
    if kernels := _kernels_for(where, values):
        halves: tuple[Tensor, Tensor] = kernels.split_where(where, values, both)
        return halves
    outside = torch.where(where, 0, values)
    return torch.where(where, values, 0) if both else outside, outside


def erase(where: Tensor, values: Tensor) -> None:
    """Set values (lanes, ...) to 0 where `where` is True, in place.

    `where` is (lanes, ...), or (...) for all lanes. A single lane without its axis also works.
    """
    kernels = _kernels_for(where, values) if values.is_contiguous() and values.ndim else None
    if kernels is None:
        values.masked_fill_(where, 0)
    else:
        kernels.erase(where, values)


def descend(values: Sequence[Tensor], slopes: Sequence[Tensor], rate: float, dropped: Sequence[Tensor | None]) -> None:
    """Add -rate * slopes in place, then `erase` the entries where `dropped` is True; None drops nothing."""
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


def intersect(where: Tensor, keep: Tensor, inverted: bool = False) -> Tensor:
    """Return `where & keep` (...), or `~where & keep` if `inverted`; for one client, or for many under vmap."""
    operator = torch.ops.secateur.both if where.is_cuda and keep.is_cuda else _intersect
    result: Tensor = operator(where, keep, inverted)
    return result


def _intersect(where: Tensor, keep: Tensor, inverted: bool) -> Tensor:
    """Compute `intersect` for stacked masks (lanes, ...)."""
    if kernels := _kernels_for(where, keep):
        result: Tensor = kernels.intersect(where, keep, inverted)
        return result
    return ~where & keep if inverted else where & keep


def magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    """Return the absolute values of all tensors, concatenated to (n,), and -1 where `keeps` is False.

    An empty `keeps` keeps all. The tensors belong to one client, or to many under vmap.
    """
    on_gpu = all(value.is_cuda for value in values)
    operator = torch.ops.secateur.magnitudes if on_gpu else _for_one_lane(_magnitudes)
    result: Tensor = operator(list(values), list(keeps))
    return result


def _magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    """Compute `magnitudes` for stacked tensors (lanes, ...), as (lanes, N)."""
    if kernels := _kernels_for(*values, *keeps):
        result: Tensor = kernels.magnitudes(values, keeps)
        return result
    sizes = torch.cat([value.flatten(1) for value in values], 1).abs()
    return torch.where(torch.cat([keep.flatten(1) for keep in keeps], 1), sizes, -1) if keeps else sizes


def _for_one_lane(stacked: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function of one client's tensors from a function of stacked tensors."""
    return lambda *arguments: stacked(*tree_map_only(Tensor, lambda value: value[None], arguments))[0]


def _vmap_rule(stacked: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, int]]:
    """Return the rule for vmap of a function of stacked tensors: the mapped axis becomes the lanes of one call."""

    def rule(info: Any, dims: tuple[Any, ...], *arguments: Any) -> tuple[Tensor, int]:
        leaves, spec = tree_flatten(arguments)
        pairs = zip(leaves, tree_leaves(dims), strict=True)
        lanes = [to_lanes(value, dim, info.batch_size) if isinstance(value, Tensor) else value for value, dim in pairs]
        return stacked(*tree_unflatten(lanes, spec)), 0

    return rule


def to_lanes(value: Tensor, dim: int | None, count: int) -> Tensor:
    """Return an argument of a vmap rule as (count, ...): the mapped axis first, or an expanded view if unmapped."""
    return value.expand(count, *value.shape) if dim is None else value.movedim(dim, 0)


_library = torch.library.Library("secateur", "FRAGMENT")
for _name, _schema, _stacked in (
    ("magnitudes", "(Tensor[] values, Tensor[] keeps) -> Tensor", _magnitudes),
    ("both", "(Tensor where, Tensor keep, bool inverted) -> Tensor", _intersect),
):
    _library.define(_name + _schema)
    _library.impl(_name, _for_one_lane(_stacked), "CompositeExplicitAutograd")
    torch.library.register_vmap(f"secateur::{_name}", _vmap_rule(_stacked), lib=_library)


def _kernels_for(*tensors: Tensor) -> ModuleType | None:
    """Return the kernels if all tensors are plain GPU tensors and the kernels run, else None."""
    if not all(tensor.is_cuda for tensor in tensors) or any(map(is_functorch_wrapped_tensor, tensors)):
        return None
    return load_kernels("secateur.gpu.client_ops_kernels", _probe, "rounds of a federation")


def _probe(kernels: ModuleType) -> None:
    kernels.copies(torch.zeros(1, device="cuda"), 1)
