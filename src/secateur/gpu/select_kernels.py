"""Triton kernels of select.py: a segmented radix select.

Every lane (a user, a client) has one row of tensors, each a segment. Two ranks are searched per segment. Four steps,
from the highest digit down, count the digits of the entries that can still be at a rank. The last program of a segment
then finds the digit of the rank. If more entries equal the bound than are selected, every program counts them, because
ties are ordered by position. The last kernel writes the band of every entry.

The first two digits are counted in shared memory, where fewer bins are faster. Later few entries are left: each is
added by an atomic operation, and digits may be longer.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(512)  # for the longest digit
LOWEST = tl.constexpr(-(2**31))  # the sign bit alone
INFINITY = tl.constexpr(0x7F800000)
FEW, LEAST = tl.constexpr(64), tl.constexpr(1024)  # up to one entry in FEW, or up to LEAST, are added by atomics
COUNTS = tl.constexpr(1024)  # counts of earlier programs that are summed at once
COLUMNS = tl.constexpr(7)  # of the table


@triton.jit
def _locate(table, entries, WIDE: tl.constexpr):
    """Return the program's segment, the offset of its entries, and their number without and with the gap behind."""
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    segment, start = tl.load(row), tl.program_id(1).to(tl.int64) * entries + tl.load(row + 1)
    here, slot = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    return segment, tl.multiple_of(start, WIDE), here, tl.multiple_of(slot, WIDE)


@triton.jit
def _keys(values, at, slot, MAGNITUDES: tl.constexpr, TILE: tl.constexpr):
    """Load entries; return them, their keys and their offsets.

    Keys are int32, read as unsigned, and ordered as the values; NaN equals infinity.
    """
    offsets = at + tl.arange(0, TILE)
    entries = tl.load(values + offsets, mask=offsets < slot, other=0.0)
    bits = entries.to(tl.int32, bitcast=True)
    if MAGNITUDES:
        keys = tl.minimum(bits & 0x7FFFFFFF, INFINITY) << 1
    else:
        bits = tl.where((bits & 0x7FFFFFFF) > INFINITY, INFINITY, bits)
        bits = tl.where(bits == LOWEST, 0, bits)  # -0 equals 0
        keys = tl.where(bits < 0, ~bits, bits ^ LOWEST)
    return entries, keys, offsets


@triton.jit
def _begin(rank, length):
    """Return the initial state of a rank: the known digits of its bound, and two counts.

    The counts are of entries that share the known digits: first how many are selected, then how many there are. The
    rank is settled if both are equal; then all entries from the bound up are selected. For rank 0 the bound is above
    all keys.
    """
    left = tl.maximum(tl.minimum(rank.to(tl.int32), length), 0)
    return tl.where(left > 0, 0, -1), left, tl.where(left > 0, length, 0)


@triton.jit
def _descend(counted, bound, left, SHIFT: tl.constexpr, DIGITS: tl.constexpr):
    """Return the state of a rank with one more digit."""
    counts = tl.load(counted + tl.arange(0, DIGITS))
    total = tl.sum(counts, 0)
    from_here = total - tl.cumsum(counts, 0) + counts  # entries of this digit or a larger one
    digit = tl.sum((from_here >= left).to(tl.int32), 0) - 1
    above = tl.max(tl.where(from_here < left, from_here, 0), 0)
    down_to = tl.min(tl.where(from_here < left, total, from_here), 0)
    return bound | (digit << SHIFT), left - above, down_to - above


@triton.jit(do_not_specialize=["entries", "segments", "stride"])
def count(
    values, table, ranks, counted, bounds, entries, segments, stride,
    SHIFT: tl.constexpr, DIGITS: tl.constexpr, FIRST: tl.constexpr, RANKS: tl.constexpr,
    MAGNITUDES: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Find one digit of both ranks, a and b. If their bounds are equal so far, digits are counted once, for a."""
    segment, start, here, slot = _locate(table, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    index = lane * segments + segment
    program_row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    length = tl.load(program_row + 5).to(tl.int32)
    state, row, bins = bounds + index * 6, counted + index * 2 * BINS, tl.arange(0, DIGITS)
    if FIRST:
        rank_row = ranks + lane * stride + segment * RANKS
        a, a_left, a_alike = _begin(tl.load(rank_row), length)
        # With one rank, the second rank selects all entries and is settled.
        b, b_left, b_alike = _begin(tl.load(rank_row + 1) if RANKS == 2 else length, length)
    else:
        a, a_left, a_alike = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        b, b_left, b_alike = tl.load(state + 3), tl.load(state + 4), tl.load(state + 5)
    a_open, b_open = a_left < a_alike, b_left < b_alike
    if FIRST | a_open | b_open:
        shared = b_open & (FIRST | (a_open & (a == b)))
        alone, known = b_open ^ shared, -(DIGITS << SHIFT)
        few = tl.maximum(length // FEW, LEAST)
        if FIRST | (a_open & (a_alike > few)) | (alone & (b_alike > few)):
            a_counts, b_counts = tl.zeros((DIGITS,), tl.int32), tl.zeros((DIGITS,), tl.int32)
            for at in range(0, here, TILE):
                _, keys, offsets = _keys(values + start, at, slot, MAGNITUDES, TILE)
                digits, inside = (keys >> SHIFT) & (DIGITS - 1), offsets < here
                if FIRST:
                    a_counts += tl.histogram(digits, DIGITS, mask=inside)
                else:
                    if a_open:
                        a_counts += tl.histogram(digits, DIGITS, mask=inside & (((keys ^ a) & known) == 0))
                    if alone:
                        b_counts += tl.histogram(digits, DIGITS, mask=inside & (((keys ^ b) & known) == 0))
            tl.atomic_add(row + bins, a_counts, mask=a_counts > 0, sem="relaxed")
            tl.atomic_add(row + BINS + bins, b_counts, mask=b_counts > 0, sem="relaxed")
        else:
            for at in range(0, here, PART):
                _, keys, offsets = _keys(values + start, at, slot, MAGNITUDES, PART)
                spots, inside = row + ((keys >> SHIFT) & (DIGITS - 1)), offsets < here
                if a_open:
                    tl.atomic_add(spots, 1, mask=inside & (((keys ^ a) & known) == 0), sem="relaxed")
                if alone:
                    tl.atomic_add(spots + BINS, 1, mask=inside & (((keys ^ b) & known) == 0), sem="relaxed")
        # The barrier completes this program's counts before it reports; the last program sees the counts of all.
        tl.debug_barrier()
        done = counted + lanes * segments * 2 * BINS + index
        if tl.atomic_add(done, 1, sem="acq_rel") == tl.load(program_row + 4).to(tl.int32) - 1:
            if b_open:
                source = row + tl.where(shared, 0, BINS)
                b, b_left, b_alike = _descend(source, b, b_left, SHIFT, DIGITS)
            if a_open:
                a, a_left, a_alike = _descend(row, a, a_left, SHIFT, DIGITS)
            tl.store(state, a)
            tl.store(state + 1, a_left)
            tl.store(state + 2, a_alike)
            tl.store(state + 3, b)
            tl.store(state + 4, b_left)
            tl.store(state + 5, b_alike)
            tl.store(row + bins, 0)  # for the next step
            tl.store(row + BINS + bins, 0)
            tl.store(done, 0)


@triton.jit(do_not_specialize=["entries", "segments"])
def ties(
    values, table, bounds, equal, entries, segments,
    MAGNITUDES: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Count the entries of a program that equal a bound, if not all such entries are selected."""
    segment, start, here, slot = _locate(table, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    state = bounds + (lane * segments + segment) * 6
    a, b = tl.load(state), tl.load(state + 3)
    if (tl.load(state + 1) < tl.load(state + 2)) | (tl.load(state + 4) < tl.load(state + 5)):
        a_ties = 0
        b_ties = 0
        for at in range(0, here, PART):
            _, keys, offsets = _keys(values + start, at, slot, MAGNITUDES, PART)
            a_ties += tl.sum(((keys == a) & (offsets < here)).to(tl.int32), 0)
            b_ties += tl.sum(((keys == b) & (offsets < here)).to(tl.int32), 0)
        row = equal + lane * tl.num_programs(0) + tl.program_id(0)
        tl.store(row, a_ties)
        tl.store(row + lanes * tl.num_programs(0), b_ties)


@triton.jit
def _count_earlier(equal, first, split):
    """Return the number of ties in earlier programs of the segment; 0 if ties do not matter."""
    total = 0
    if split:
        for at in range(first, tl.program_id(0), COUNTS):
            others = at + tl.arange(0, COUNTS)
            total += tl.sum(tl.load(equal + others, mask=others < tl.program_id(0), other=0), 0)
    return total


@triton.jit
def _mask_rank(keys, inside, bound, left, seen, split):
    """Return a mask of the entries of a tile that a rank selects, and the number of ties so far."""
    meant = (keys ^ LOWEST) >= (bound ^ LOWEST)
    if split:
        equal = inside & (keys == bound)
        meant = meant & ((keys != bound) | (tl.cumsum(equal.to(tl.int32), 0) + seen <= left))
        seen += tl.sum(equal.to(tl.int32), 0)
    return meant, seen


@triton.jit(do_not_specialize=["entries", "segments"])
def mark(
    values, table, bounds, equal, result, entries, segments,
    KEPT: tl.constexpr, MAGNITUDES: tl.constexpr, WIDE: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Store the band of every entry: the number of ranks that it lies below. KEPT stores entries of band 1, else 0."""
    segment, start, here, slot = _locate(table, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    state, row = bounds + (lane * segments + segment) * 6, equal + lane * tl.num_programs(0)
    a, a_left, a_split = tl.load(state), tl.load(state + 1), tl.load(state + 1) < tl.load(state + 2)
    b, b_left, b_split = tl.load(state + 3), tl.load(state + 4), tl.load(state + 4) < tl.load(state + 5)
    first = tl.load(table + tl.program_id(0).to(tl.int64) * COLUMNS + 6).to(tl.int32)
    a_seen, b_seen = (
        _count_earlier(row, first, a_split),
        _count_earlier(row + lanes * tl.num_programs(0), first, b_split),
    )
    for at in range(0, slot, PART):
        value, keys, offsets = _keys(values + start, at, slot, MAGNITUDES, PART)
        above, a_seen = _mask_rank(keys, offsets < here, a, a_left, a_seen, a_split)
        down_to, b_seen = _mask_rank(keys, offsets < here, b, b_left, b_seen, b_split)
        if KEPT:
            stays = (down_to ^ above) & (offsets < here)
            tl.store(result + start + offsets, tl.where(stays, value, 0.0), mask=offsets < slot)
        else:
            band = 2 - above.to(tl.int8) - down_to.to(tl.int8)
            tl.store(result + start + offsets, band, mask=offsets < slot)
