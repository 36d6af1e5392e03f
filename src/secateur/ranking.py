"""Selection by rank on a GPU: of many tensors and many lanes in seven launches, and no number is read back.

A segmented radix select. The tensors lie end to end in a row, each a segment, and every lane (a user, a client) has
such a row. Four steps count the digits of the entries that may still be the one of the wanted rank, from the highest
byte down; each begins by finding the digit where the rank lies in what the last one counted. Then the entries equal to
that one are counted block by block, since ties go by position, and at last every entry is told its band.

Written in Triton, which torch's CUDA builds bring along: import this file only where there is a tensor on a GPU.
"""

# A kernel's arguments have no types to write down: Triton reads annotations its own way.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C import _DisableFuncTorch

BLOCK, WARPS = 4096, 8
LOWEST = tl.constexpr(-(2**31))  # the sign bit alone
INFINITY = tl.constexpr(0x7F800000)
FEW = tl.constexpr(64)  # so many entries of a block are counted faster one by one
COUNTS = tl.constexpr(1024)  # of earlier blocks, added up at once


@triton.jit
def _block(values, table, entries, BLOCK: tl.constexpr):
    """This program's entries as keys, which of them exist, where they begin, and the segment they are of.

    A key is an int32 to be read as unsigned, in the order of the values: -0 equals 0, and NaN infinity.
    """
    row = table + tl.program_id(0).to(tl.int64) * 4
    start = tl.program_id(1).to(tl.int64) * entries + tl.load(row + 1)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < tl.load(row + 2).to(tl.int32)
    bits = tl.load(values + start + offsets, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    bits = tl.where((bits & 0x7FFFFFFF) > INFINITY, INFINITY, bits)
    bits = tl.where(bits == LOWEST, 0, bits)
    keys = tl.where(bits < 0, ~bits, bits ^ LOWEST)
    return keys, inside, start, tl.load(row)


@triton.jit
def _descend(counted, prefix, left, shift: tl.constexpr):
    """One digit further towards a rank, of which `left` counts from the largest entry that has the prefix."""
    counts = tl.load(counted + tl.arange(0, 256))
    total = tl.sum(counts, 0)
    left = tl.minimum(left, total)
    from_here = total - tl.cumsum(counts, 0) + counts  # entries of this digit or a larger one
    digit = tl.sum((from_here >= left).to(tl.int32), 0) - 1
    return prefix | (digit << shift), left - tl.max(tl.where(from_here < left, from_here, 0), 0)


@triton.jit
def _add(counted, digits, which):
    """Count the digits of some entries of a block."""
    if tl.sum(which.to(tl.int32), 0) > FEW:
        counts = tl.histogram(digits, 256, mask=which)
        tl.atomic_add(counted + tl.arange(0, 256), counts, mask=counts > 0, sem="relaxed")
    else:
        tl.atomic_add(counted + digits, which.to(tl.int32), mask=which, sem="relaxed")


@triton.jit(do_not_specialize=["entries", "segments", "stride"])
def _search(
    values,
    table,
    ranks,
    counted,
    found,
    ties,
    entries,
    segments,
    stride,
    STEP: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Steps 0 to 3 count a digit each; step 4 counts the entries that are equal to the one of a rank."""
    block, lane, lanes = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    keys, inside, _, segment = _block(values, table, entries, BLOCK)
    begins = block == tl.load(table + block.to(tl.int64) * 4 + 3)  # one block of a segment keeps what was found
    rows = lanes * segments * RANKS
    for rank in tl.static_range(RANKS):
        row = (lane * segments + segment) * RANKS + rank
        state = found + (STEP * rows + row) * 2
        if STEP == 0:
            prefix = 0
            left = tl.load(ranks + lane * stride + segment * RANKS + rank).to(tl.int32)
            which = inside
        else:
            before = state - rows * 2
            prefix = tl.load(before)
            # Where ranks have the same prefix, their digits were counted once, for the first of them.
            source = (STEP - 1) * rows + tl.where(prefix == tl.load(before - rank * 2), row - rank, row)
            prefix, left = _descend(counted + source * 256, prefix, tl.load(before + 1), 32 - 8 * STEP)
            which = inside & (((keys ^ prefix) >> (32 - 8 * STEP)) == 0)
        tl.store(state, prefix, mask=begins)
        tl.store(state + 1, left, mask=begins)
        if STEP == 4:
            place = (rank * lanes + lane) * tl.num_programs(0) + block
            tl.store(ties + place, tl.sum(which.to(tl.int32), 0))
        elif rank == 0:
            lead = prefix
            _add(counted + (STEP * rows + row) * 256, (keys >> (24 - 8 * STEP)) & 255, which)
        elif prefix != lead:
            _add(counted + (STEP * rows + row) * 256, (keys >> (24 - 8 * STEP)) & 255, which)


@triton.jit(do_not_specialize=["entries", "segments"])
def _mark(values, table, found, ties, bands, entries, segments, RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Every entry's band: how many of the ranks it lies below."""
    block, lane, lanes = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    keys, inside, start, segment = _block(values, table, entries, BLOCK)
    first = tl.load(table + block.to(tl.int64) * 4 + 3).to(tl.int32)
    band = tl.zeros((BLOCK,), tl.int32)
    for rank in tl.static_range(RANKS):
        state = found + (4 * lanes * segments * RANKS + (lane * segments + segment) * RANKS + rank) * 2
        bound, left = tl.load(state), tl.load(state + 1)
        earlier = tl.zeros((COUNTS,), tl.int32)
        for at in range(first, block, COUNTS):
            others = at + tl.arange(0, COUNTS)
            row = ties + (rank * lanes + lane) * tl.num_programs(0)
            earlier += tl.load(row + others, mask=others < block, other=0)
        equal = inside & (keys == bound)
        place = tl.cumsum(equal.to(tl.int32), 0) + tl.sum(earlier, 0)
        among = ((keys ^ LOWEST) > (bound ^ LOWEST)) | (equal & (place <= left))
        band += tl.where(among, 0, 1)
    tl.store(bands + start + tl.arange(0, BLOCK), band.to(tl.int8), mask=inside)


def bands(values: Tensor, lengths: tuple[int, ...], ranks: Tensor | tuple[tuple[int, ...], ...]) -> Tensor:
    """(lanes, N) int8: how many of its segment's ranks an entry of (lanes, N) float32 lies below.

    `lengths` are the segments', N together; `ranks` say of each how many of its largest entries are meant, one number
    or two, rising: (segments, 1 or 2), or a tensor (lanes or 1, segments, 1 or 2) of numbers that only the device
    knows. Of equal entries the earlier counts as larger. So band 0 are the largest, band 1 those between two ranks.
    """
    if not isinstance(ranks, Tensor):
        ranks = _ranks(ranks, values.device)
    found: Tensor = torch.ops.secateur.bands(values, _table(lengths, BLOCK, values.device), ranks)
    return found


# Both are kept for good: a captured graph reads them whenever it is replayed.
@cache
def _table(lengths: tuple[int, ...], block: int, device: torch.device) -> Tensor:
    """(blocks, 4) int64: a block's segment, where it starts, how many entries it has, its segment's first block."""
    rows: list[tuple[int, int, int, int]] = []
    start = 0
    for segment, length in enumerate(lengths):
        first = len(rows)
        rows += [(segment, start + at, min(block, length - at), first) for at in range(0, length, block)]
        start += length
    with _DisableFuncTorch():
        return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, 4)


@cache
def _ranks(ranks: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    with _DisableFuncTorch():
        return torch.tensor(ranks, dtype=torch.int64, device=device)[None]


def _bands(values: Tensor, table: Tensor, ranks: Tensor) -> Tensor:
    """Seven launches, the first of which sets all counts to zero."""
    values, ranks = values.contiguous(), ranks.contiguous()
    (lanes, entries), (shared, segments, each) = values.shape, ranks.shape
    blocks, rows = len(table), lanes * segments * each
    result = torch.empty_like(values, dtype=torch.int8)
    if not result.numel():
        return result
    counted = values.new_zeros(4, rows, 256, dtype=torch.int32)
    found = values.new_empty(5, rows, 2, dtype=torch.int32)
    ties = values.new_empty(each, lanes, blocks, dtype=torch.int32)
    stride = segments * each if shared > 1 else 0
    launch: dict[str, Any] = {"RANKS": each, "BLOCK": BLOCK, "num_warps": WARPS}
    with torch.cuda.device_of(values):
        for step in range(5):
            given = (values, table, ranks, counted, found, ties, entries, segments, stride)
            _search[blocks, lanes](*given, STEP=step, **launch)
        _mark[blocks, lanes](values, table, found, ties, result, entries, segments, **launch)
    return result


def _stacked(
    info: Any, dims: tuple[int | None, ...], values: Tensor, table: Tensor, ranks: Tensor
) -> tuple[Tensor, int]:
    """Under vmap the many are more lanes of one call."""
    many = [
        tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in ((values, dims[0]), (ranks, dims[2]))
    ]
    lanes = many[0].shape[1]
    rows = many[0].expand(info.batch_size, -1, -1).flatten(0, 1)
    if many[1].shape[:2] != (1, 1):
        many[1] = many[1].expand(info.batch_size, lanes, -1, -1)
    found: Tensor = torch.ops.secateur.bands(rows, table, many[1].flatten(0, 1))
    return found.unflatten(0, (info.batch_size, lanes)), 0


_library = torch.library.Library("secateur", "FRAGMENT")
_library.define("bands(Tensor values, Tensor table, Tensor ranks) -> Tensor")
_library.impl("bands", _bands, "CompositeExplicitAutograd")
torch.library.register_vmap("secateur::bands", _stacked, lib=_library)
