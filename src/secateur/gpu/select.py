"""Selection by rank on a GPU: of many tensors and many lanes at once, and no number is read back.

Written in Triton, which torch's CUDA builds bring along: import this file only where there is a tensor on a GPU.
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
EACH = 8192  # entries of a program
VECTOR = 4  # entries that a thread reads at once where segments begin at a multiple


def bands(values: Tensor, lengths: tuple[int, ...], ranks: Tensor | Ranks, magnitudes: bool = False) -> Tensor:
    """(lanes, N) int8: how many of its segment's ranks an entry of (lanes, N) float32 lies below.

    `lengths` are the segments', N together; `ranks` say of each how many of its largest entries are meant, one number
    or two, rising: (segments, 1 or 2), or a tensor (lanes or 1, segments, 1 or 2) of numbers that only the device
    knows. Of equal entries the earlier counts as larger. So band 0 are the largest, band 1 those between two ranks.
    `magnitudes`: entries are ranked without their signs.
    """
    aligned = 1 if any(length % VECTOR for length in lengths) else VECTOR
    return _selected(values, _places(lengths, aligned, values.device), ranks, magnitudes, False, aligned)


def kept(values: Tensor, lengths: tuple[int, ...], ranks: Ranks, aligned: int) -> Tensor:
    """(lanes, N): the entries whose magnitudes lie between their segment's two ranks, zeros in place of the others.

    Every segment begins at a multiple of `aligned` entries, which N is too; what lies between becomes 0.
    """
    return _selected(values, _places(lengths, aligned, values.device), ranks, True, True, aligned)


def kept_of(tensors: Sequence[Tensor], laid: Layout, ranks: Ranks) -> Tensor:
    """(N,): the same of tensors, in a row where each begins at a multiple of VECTOR entries."""
    device = tensors[0].device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    # A graph would copy addresses from memory of the host that is long gone, and AMD's kernels reckon them in 32 bits.
    capturing = stream is not None and torch.cuda.is_current_stream_capturing()
    if not capturing and torch.version.hip is None and peek_interpreter_stack() is None:
        tensors = [tensor.contiguous() for tensor in tensors]
        addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        if not np.bitwise_or.reduce(addresses) % (4 * VECTOR):
            # They are read where they lie: to join them first takes longer than a kernel, host and device.
            return _gathered(laid.sizes, ranks, device, stream)(addresses)[0]
    return kept(joined(tensors, laid)[None], laid.sizes, ranks, VECTOR)[0]


@lru_cache(64)  # each has memory of the device
def _gathered(lengths: tuple[int, ...], ranks: Ranks, device: torch.device, stream: object) -> Gathered:
    slots = [-(-length // VECTOR) * VECTOR for length in lengths]
    table, _ = _places(lengths, VECTOR, device)
    task = Task(table, _ranks(ranks, device), 1, sum(slots), True, True, VECTOR)
    return Gathered(task, [0, *accumulate(slots)][:-1])


def _selected(
    values: Tensor, places: Places, ranks: Tensor | Ranks, magnitudes: bool, kept: bool, aligned: int
) -> Tensor:
    """Tensors of a transform go to the operator, which has a rule for vmap; others save the way there."""
    if not isinstance(ranks, Tensor):
        ranks = _ranks(ranks, values.device)
    given = (values, *places, ranks, magnitudes, kept, VECTOR if aligned % VECTOR == 0 else 1)
    found: Tensor = (torch.ops.secateur.select if transformed((values, ranks)) else _select)(*given)
    return found


# Both are kept for good: a captured graph reads them whenever it is replayed.
@cache
def _places(lengths: tuple[int, ...], aligned: int, device: torch.device) -> Places:
    """What a program is to do, (programs, 7) int64; and (segments,) zeros: none lies behind its place.

    A program's segment, where it starts, its entries, its entries with the gap behind them; and of its segment how many
    programs it has, its length, its first program.
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
        # Copied, which waits, where torch.zeros would not: the next to read them may be another stream.
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
    info: Any, dims: tuple[int | None, ...], values: Tensor, table: Tensor, shifts: Tensor, ranks: Tensor, *how: int
) -> tuple[Tensor, int]:
    """Under vmap the many are more lanes of one call."""
    many = [
        tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in ((values, dims[0]), (ranks, dims[3]))
    ]
    lanes = many[0].shape[1]
    rows = many[0].expand(info.batch_size, -1, -1).flatten(0, 1)
    if many[1].shape[:2] != (1, 1):
        many[1] = many[1].expand(info.batch_size, lanes, -1, -1)
    found: Tensor = torch.ops.secateur.select(rows, table, shifts, many[1].flatten(0, 1), *how)
    return found.unflatten(0, (info.batch_size, lanes)), 0


_library = torch.library.Library("secateur", "FRAGMENT")
_library.define(
    "select(Tensor values, Tensor table, Tensor shifts, Tensor ranks, bool magnitudes, bool kept, int wide) -> Tensor"
)
_library.impl("select", _select, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::select", _stacked, lib=_library)
