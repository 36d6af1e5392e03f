"""Selection by rank on a GPU: many tensors and many lanes at once, without a copy to the host.

The kernels need Triton, which comes with torch's CUDA builds: import this file only if a tensor is on a GPU.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch
from torch._C._functorch import peek_interpreter_stack

from secateur.gpu.packing import Layout, joined, transformed
from secateur.gpu.select_kernels import COLUMNS
from secateur.gpu.select_launch import Gathered, Task, select, select_narrowly, worth

Ranks = tuple[tuple[int, ...], ...]
Places = tuple[Tensor, Tensor]
EACH = 8192  # entries per program
VECTOR = 4  # entries that a thread reads at once if all segments start at a multiple of it


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
    return _selected(values, _places(lengths, aligned, values.device), ranks, magnitudes, False, aligned)


def kept(values: Tensor, lengths: tuple[int, ...], ranks: Ranks, aligned: int) -> Tensor:
    """Return the entries whose magnitudes lie between their segment's two ranks, and 0 elsewhere, (lanes, N).

    Every segment starts at a multiple of `aligned` entries, and N is such a multiple. The gaps become 0.
    """
    return _selected(values, _places(lengths, aligned, values.device), ranks, True, True, aligned)


def kept_of(tensors: Sequence[Tensor], laid: Layout, ranks: Ranks) -> Tensor:
    """Return `kept` of tensors, packed into a row (N,) in which each starts at a multiple of VECTOR entries."""
    device = tensors[0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    # A graph would copy addresses from freed host memory, and AMD's kernels compute addresses in 32 bits.
    capturing = stream is not None and torch.cuda.is_current_stream_capturing()
    if not capturing and torch.version.hip is None and peek_interpreter_stack() is None:
        tensors = [tensor.contiguous() for tensor in tensors]
        addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        if not np.bitwise_or.reduce(addresses) % (4 * VECTOR):
            # The tensors are read in place: packing them first takes longer than a kernel, on host and device.
            return _gathered(laid.sizes, ranks, device, stream)(addresses)[0]
    return kept(joined(tensors, laid)[None], laid.sizes, ranks, VECTOR)[0]


@lru_cache(64)  # each entry holds device memory
def _gathered(lengths: tuple[int, ...], ranks: Ranks, device: torch.device, stream: object) -> Gathered:
    slots = [-(-length // VECTOR) * VECTOR for length in lengths]
    table, _ = _places(lengths, VECTOR, device)
    task = Task(table, _ranks(ranks, device), 1, sum(slots), True, True, VECTOR)
    return Gathered(task, [0, *accumulate(slots)][:-1])


def _selected(
    values: Tensor, places: Places, ranks: Tensor | Ranks, magnitudes: bool, kept: bool, aligned: int
) -> Tensor:
    """Select by the operator for tensors of a transform, as it has a rule for vmap; else call `_select` directly."""
    if not isinstance(ranks, Tensor):
        ranks = _ranks(ranks, values.device)
    arguments = (values, *places, ranks, magnitudes, kept, VECTOR if aligned % VECTOR == 0 else 1)
    result: Tensor = (torch.ops.secateur.select if transformed((values, ranks)) else _select)(*arguments)
    return result


# Both caches keep their tensors forever: a captured graph reads them at every replay.
@cache
def _places(lengths: tuple[int, ...], aligned: int, device: torch.device) -> Places:
    """Return the table of programs, (programs, 7) int64, and the segments' shifts in memory, (segments,) zeros.

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
        # A copy waits, and torch.zeros would not: the next reader may be on another stream.
        table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, COLUMNS.value)
        return table, torch.tensor([0] * len(lengths), dtype=torch.int64, device=device)


@cache
def _ranks(ranks: Ranks, device: torch.device) -> Tensor:
    with _DisableFuncTorch():
        return torch.tensor(ranks, dtype=torch.int64, device=device)[None]


def _select(
    values: Tensor, table: Tensor, shifts: Tensor, ranks: Tensor, magnitudes: bool, kept: bool, wide: int
) -> Tensor:
    lanes, entries = values.shape
    task = Task(table, ranks.contiguous(), lanes, entries, magnitudes, kept, wide)
    if worth(task):
        return select_narrowly(task, values.contiguous(), shifts, lambda n: _places((n,), VECTOR, values.device))
    return select(task, values.contiguous(), shifts)


def _stacked(
    info: Any, dims: tuple[int | None, ...], values: Tensor, table: Tensor, shifts: Tensor, ranks: Tensor, *options: int
) -> tuple[Tensor, int]:
    """Run the operator under vmap: the mapped axis becomes more lanes of one call."""
    many = [
        tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in ((values, dims[0]), (ranks, dims[3]))
    ]
    lanes = many[0].shape[1]
    rows = many[0].expand(info.batch_size, -1, -1).flatten(0, 1)
    if many[1].shape[:2] != (1, 1):
        many[1] = many[1].expand(info.batch_size, lanes, -1, -1)
    result: Tensor = torch.ops.secateur.select(rows, table, shifts, many[1].flatten(0, 1), *options)
    return result.unflatten(0, (info.batch_size, lanes)), 0


_library = torch.library.Library("secateur", "FRAGMENT")
_library.define(
    "select(Tensor values, Tensor table, Tensor shifts, Tensor ranks, bool magnitudes, bool kept, int wide) -> Tensor"
)
_library.impl("select", _select, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::select", _stacked, lib=_library)
