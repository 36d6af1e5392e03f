"""Selection by rank on a GPU: of many tensors and many lanes in seven launches, and no number is read back.

Written in Triton, which torch's CUDA builds bring along: import this file only where there is a tensor on a GPU.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch

from secateur.joining import Layout, joined, transformed
from secateur.radix import BINS, COLUMNS, count, mark, ties

Ranks = tuple[tuple[int, ...], ...]
Places = tuple[Tensor, Tensor, np.ndarray]
BITS = (7, 7, 9, 9)  # of the digits
EACH, TILE, PART, WARPS = 8192, 1024, 512, 4  # entries of a program, of them at once in a histogram and elsewhere
VECTOR = 4  # entries that a thread reads at once where segments begin at a multiple
_compiled: dict[tuple[Any, ...], list[Any]] = {}  # kernels in order; none where only Triton can launch them


def bands(values: Tensor, lengths: tuple[int, ...], ranks: Tensor | Ranks, magnitudes: bool = False) -> Tensor:
    """(lanes, N) int8: how many of its segment's ranks an entry of (lanes, N) float32 lies below.

    `lengths` are the segments', N together; `ranks` say of each how many of its largest entries are meant, one number
    or two, rising: (segments, 1 or 2), or a tensor (lanes or 1, segments, 1 or 2) of numbers that only the device
    knows. Of equal entries the earlier counts as larger. So band 0 are the largest, band 1 those between two ranks.
    `magnitudes`: entries are ranked without their signs.
    """
    return _selected(values, _places(lengths, 1, values.device), ranks, magnitudes, False, 1)


def kept(values: Tensor, lengths: tuple[int, ...], ranks: Ranks, aligned: int) -> Tensor:
    """(lanes, N): the entries whose magnitudes lie between their segment's two ranks, zeros in place of the others.

    Every segment begins at a multiple of `aligned` entries, which N is too; what lies between becomes 0.
    """
    return _selected(values, _places(lengths, aligned, values.device), ranks, True, True, aligned)


def kept_of(tensors: Sequence[Tensor], laid: Layout, ranks: Ranks) -> Tensor:
    """(N,): the same of tensors, in a row where each begins at a multiple of VECTOR entries."""
    device = tensors[0].device
    # A graph would copy the addresses from memory of the host that is long gone, and AMD's kernels reckon in 32 bits.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if not (capturing or torch.version.hip or transformed(tensors)):
        tensors = [tensor.contiguous() for tensor in tensors]
        addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        if not np.bitwise_or.reduce(addresses) % (4 * VECTOR):
            # They are read where they lie: to join them first takes longer than a kernel, host and device.
            table, _, starts = _places(laid.sizes, VECTOR, device)
            shifts = torch.from_numpy((addresses - addresses[0]) // 4 - starts).to(device, non_blocking=True)
            given = (table, shifts, _ranks(ranks, device), True, True, VECTOR)
            return _select(tensors[0], *given, entries=sum(laid.slots))[0]
    return kept(joined(tensors, laid)[None], laid.sizes, ranks, VECTOR)[0]


def _selected(
    values: Tensor, places: Places, ranks: Tensor | Ranks, magnitudes: bool, kept: bool, aligned: int
) -> Tensor:
    """Tensors of a transform go to the operator, which has a rule for vmap; others save the way there."""
    if not isinstance(ranks, Tensor):
        ranks = _ranks(ranks, values.device)
    given = (values, *places[:2], ranks, magnitudes, kept, VECTOR if aligned % VECTOR == 0 else 1)
    found: Tensor = (torch.ops.secateur.select if transformed((values, ranks)) else _select)(*given)
    return found


# Both are kept for good: a captured graph reads them whenever it is replayed.
@cache
def _places(lengths: tuple[int, ...], aligned: int, device: torch.device) -> Places:
    """What a program is to do, (programs, 7) int64; and of segments, zeros and where they begin.

    A program's segment, where it starts, its entries, its entries with the gap behind them; and of its segment how many
    programs it has, its length, its first program.
    """
    rows: list[tuple[int, ...]] = []
    starts, start = [], 0
    for segment, length in enumerate(lengths):
        slot, first = -(-length // aligned) * aligned, len(rows)
        begins = range(0, slot, EACH)
        rows += [
            (segment, start + at, min(EACH, length - at), min(EACH, slot - at), len(begins), length, first)
            for at in begins
        ]
        starts.append(start)
        start += slot
    with _DisableFuncTorch():
        table = torch.tensor(rows, dtype=torch.int64, device=device).view(-1, COLUMNS.value)
        return table, torch.zeros(len(lengths), dtype=torch.int64, device=device), np.array(starts, np.int64)


@cache
def _ranks(ranks: Ranks, device: torch.device) -> Tensor:
    with _DisableFuncTorch():
        return torch.tensor(ranks, dtype=torch.int64, device=device)[None]


def _select(
    values: Tensor,
    table: Tensor,
    shifts: Tensor,
    ranks: Tensor,
    magnitudes: bool,
    kept: bool,
    wide: int,
    entries: int | None = None,
) -> Tensor:
    """Seven launches, the first of which sets all counts to zero.

    `shifts`: how far a segment lies behind its place in the row; `entries` of that row, where values are not one.
    """
    values, ranks = values.contiguous(), ranks.contiguous()
    lanes, entries = values.shape if entries is None else (1, entries)
    (shared, segments, each), programs = ranks.shape, len(table)
    result = values.new_empty((lanes, entries), dtype=values.dtype if kept else torch.int8)
    if not result.numel():
        return result
    counted = values.new_zeros(lanes * segments * (2 * BINS.value + 1), dtype=torch.int32)
    found = values.new_empty(lanes * segments * 6, dtype=torch.int32)
    equal = values.new_empty(2 * lanes * programs, dtype=torch.int32)
    memory = (values, table, shifts, ranks, counted, found, equal, result)
    numbers = (entries, segments, segments * each if shared > 1 else 0)
    with torch.cuda.device_of(values):
        _launch((programs, lanes, 1), memory, numbers, (each, magnitudes, kept, wide))
    return result


def _launch(
    grid: tuple[int, int, int], memory: tuple[Tensor, ...], numbers: tuple[int, ...], how: tuple[int, bool, bool, int]
) -> None:
    """All kernels: by Triton, which looks each up by all its arguments for as long as it runs, or as found before."""
    addresses = tuple(tensor.data_ptr() for tensor in memory)
    key = (memory[0].device, memory[3].dtype, how)
    alike = not any(address % 16 for address in addresses) and numbers[0] < 2**31  # else they are compiled otherwise
    if alike and _compiled.get(key):
        try:
            for ready, (_, given) in zip(_compiled[key], _steps(addresses, numbers, *how), strict=True):
                ready[grid](*given)
            return
        except TypeError:  # another Triton, which is given other arguments
            _compiled[key] = []
    made = [kernel[grid](*given, num_warps=WARPS) for kernel, given in _steps(memory, numbers, *how)]
    if alike and None not in made:  # as the interpreter's
        _compiled.setdefault(key, made)


def _steps(
    memory: Sequence[Any], numbers: tuple[int, ...], each: int, magnitudes: bool, kept: bool, wide: int
) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The kernels in order, each with all its arguments."""
    values, table, shifts, ranks, counted, found, equal, result = memory
    shift = 32
    for step, bits in enumerate(BITS):
        shift -= bits
        # Entries that are added one by one lie in threads one by one: else all would change places first.
        how = (shift, 1 << bits, step == 0, each, magnitudes, wide if step < 2 else 1, TILE, PART)
        yield count, (values, table, shifts, ranks, counted, found, *numbers, *how)
    yield ties, (values, table, shifts, found, equal, *numbers[:2], magnitudes, wide, PART)
    yield mark, (values, table, shifts, found, equal, result, *numbers[:2], kept, magnitudes, wide, PART)


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
