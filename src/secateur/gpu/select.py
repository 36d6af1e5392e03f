"""Selection by rank on a GPU: many tensors and many lanes at once, without a copy to the host.

The kernels need Triton, which comes with torch's CUDA builds: import this file only if a tensor is on a GPU. Triton's
interpreter runs them on a CPU.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _DisableFuncTorch

from secateur.gpu.packing import is_transformed
from secateur.gpu.select_kernels import BINS, COLUMNS, count, mark, ties

Ranks = tuple[tuple[int, ...], ...]
EACH = 8192  # entries per program
VECTOR = 4  # entries that a thread reads at once if all segments start at a multiple of it
BITS = (7, 7, 9, 9)  # of the digits
TILE, PART, WARPS = 1024, 512, 4  # entries of a program at once, in a histogram and elsewhere; warps of a program


def bands(values: Tensor, lengths: tuple[int, ...], ranks: Tensor | Ranks, magnitudes: bool = False) -> Tensor:
    """Return the band of every entry of `values` (lanes, N) float32, (lanes, N) int8.

    The band is the number of its segment's ranks that an entry lies below. Band 0 holds the largest entries, and band 1
    those between two ranks. Among equal entries the earlier counts as larger.

    Args:
        values: entries of all segments, (lanes, N).
        lengths: segment lengths, which sum to N.
        ranks: per segment one or two increasing counts k, where k means the k largest entries. (segments, 1 or 2), or
            a tensor on the device, (lanes or 1, segments, 1 or 2).
        magnitudes: rank the absolute values.
    """
    aligned = 1 if any(length % VECTOR for length in lengths) else VECTOR
    return _select_or_map(values, _table(lengths, aligned, values.device), ranks, magnitudes, False, aligned)


def keep_segments(values: Tensor, lengths: tuple[int, ...], ranks: Ranks, aligned: int) -> Tensor:
    """Return the entries whose magnitudes lie between their segment's two ranks, and 0 elsewhere, (lanes, N).

    Every segment starts at a multiple of `aligned` entries, and N is such a multiple. The gaps become 0.
    """
    return _select_or_map(values, _table(lengths, aligned, values.device), ranks, True, True, aligned)


def _select_or_map(
    values: Tensor, table: Tensor, ranks: Tensor | Ranks, magnitudes: bool, kept: bool, aligned: int
) -> Tensor:
    """Select by the operator for tensors of a transform, as it has a rule for vmap; else call `_select` directly."""
    if not isinstance(ranks, Tensor):
        ranks = _ranks(ranks, values.device)
    arguments = (values, table, ranks, magnitudes, kept, VECTOR if aligned % VECTOR == 0 else 1)
    result: Tensor = (torch.ops.secateur.select if is_transformed((values, ranks)) else _select)(*arguments)
    return result


# Both caches keep their tensors forever: a captured graph reads them at every replay.
@cache
def _table(lengths: tuple[int, ...], aligned: int, device: torch.device) -> Tensor:
    """Return the table of programs, (programs, 7) int64.

    The columns are the program's segment, its start, its number of entries, and that number with the gap. Then
    follow its segment's number of programs, length and first program.
    """
    rows: list[tuple[int, ...]] = []
    start = 0
    for segment, length in enumerate(lengths):
        slot, first = -(-length // aligned) * aligned, len(rows)
        begins = range(0, slot, EACH)
        rows += [
            (segment, start + at, min(EACH, length - at), min(EACH, slot - at), len(begins), length, first)
            for at in begins
        ]
        start += slot
    with _DisableFuncTorch():
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, COLUMNS.value)


@cache
def _ranks(ranks: Ranks, device: torch.device) -> Tensor:
    with _DisableFuncTorch():
        return torch.tensor(ranks, dtype=torch.int64, device=device)[None]


def _select(values: Tensor, table: Tensor, ranks: Tensor, magnitudes: bool, kept: bool, wide: int) -> Tensor:
    """Return the entries or the bands, (lanes, N), in six launches of kernels."""
    (lanes, entries), (rank_lanes, segments, per_segment) = values.shape, ranks.shape
    result = table.new_empty((lanes, entries), dtype=torch.float32 if kept else torch.int8)
    if not result.numel():
        return result
    values, ranks = values.contiguous(), ranks.contiguous()
    counted = table.new_zeros(lanes * segments * (2 * BINS.value + 1), dtype=torch.int32)  # of every digit
    bounds = table.new_empty(lanes * segments * 6, dtype=torch.int32)  # the state of every rank
    equal = table.new_empty(2 * lanes * len(table), dtype=torch.int32)  # ties of every program
    grid, stride, shift = (len(table), lanes, 1), segments * per_segment if rank_lanes > 1 else 0, 32
    with torch.cuda.device_of(values):
        for step, bits in enumerate(BITS):
            shift -= bits
            # The later steps add entries one by one and read them one by one: else all would change threads first.
            how = (shift, 1 << bits, step == 0, per_segment, magnitudes, wide if step < 2 else 1, TILE, PART)
            count[grid](values, table, ranks, counted, bounds, entries, segments, stride, *how, num_warps=WARPS)
        ties[grid](values, table, bounds, equal, entries, segments, magnitudes, wide, PART, num_warps=WARPS)
        options = (kept, magnitudes, wide, PART)
        mark[grid](values, table, bounds, equal, result, entries, segments, *options, num_warps=WARPS)
    return result


def _select_under_vmap(
    info: Any, dims: tuple[int | None, ...], values: Tensor, table: Tensor, ranks: Tensor, *options: int
) -> tuple[Tensor, int]:
    """Run the operator under vmap: the mapped axis becomes more lanes of one call."""
    many = [
        tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in ((values, dims[0]), (ranks, dims[2]))
    ]
    lanes = many[0].shape[1]
    rows = many[0].expand(info.batch_size, -1, -1).flatten(0, 1)
    if many[1].shape[:2] != (1, 1):
        many[1] = many[1].expand(info.batch_size, lanes, -1, -1)
    result: Tensor = torch.ops.secateur.select(rows, table, many[1].flatten(0, 1), *options)
    return result.unflatten(0, (info.batch_size, lanes)), 0


_library = torch.library.Library("secateur", "FRAGMENT")
_library.define("select(Tensor values, Tensor table, Tensor ranks, bool magnitudes, bool kept, int wide) -> Tensor")
_library.impl("select", _select, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::select", _select_under_vmap, lib=_library)
