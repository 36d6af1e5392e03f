"""The kernels of select.py: a segmented radix select.

The tensors lie in a row, each a segment, and every lane (a user, a client) has such a row; or they lie anywhere, and
only the result is a row. Of each segment two ranks are looked for. Four steps count the digits of the entries that may
still be the one of a rank, from the highest digit down; whichever program is the last of its segment then finds the
digit where the rank lies. Where more entries are equal to that one than are wanted, they are counted program by
program, since ties go by position; and at last every entry is told its band.

The first two digits are counted in shared memory, where fewer bins are faster; later so few entries are left that each
is added by itself, and their digits may be longer.

Of very many entries one rank is looked for among those near it (select_launch.py): `narrow` takes them out, and `count`
goes through all of them only in lanes where it is not there.
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, import-not-found, import-untyped, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

BINS = tl.constexpr(512)  # of the longest digit
LOWEST = tl.constexpr(-(2**31))  # the sign bit alone
INFINITY = tl.constexpr(0x7F800000)
FEW, LEAST = tl.constexpr(64), tl.constexpr(1024)  # up to one entry in FEW, or up to LEAST, are added one by one
COUNTS = tl.constexpr(1024)  # of earlier programs, added up at once
COLUMNS = tl.constexpr(7)  # of the table


@triton.jit
def _place(table, shifts, entries, WIDE: tl.constexpr):
    """This program's segment, where its entries begin and where in the row, how many they are, and with the gap behind.

    A tensor that lies elsewhere is read over its end, but never out of the WIDE entries that its last one is among.
    """
    row = table + tl.program_id(0).to(tl.int64) * COLUMNS
    segment, start = tl.load(row), tl.program_id(1).to(tl.int64) * entries + tl.load(row + 1)
    origin, start = tl.multiple_of(start + tl.load(shifts + segment), WIDE), tl.multiple_of(start, WIDE)
    here, slot = tl.load(row + 2).to(tl.int32), tl.load(row + 3).to(tl.int32)
    return segment, origin, start, here, tl.multiple_of(slot, WIDE)


@triton.jit
def _keys(values, at, slot, MAGNITUDES: tl.constexpr, TILE: tl.constexpr):
    """Some entries, and as keys: int32 to be read as unsigned, in the order of the values; NaN equals infinity."""
    offsets = at + tl.arange(0, TILE)
    found = tl.load(values + offsets, mask=offsets < slot, other=0.0)
    bits = found.to(tl.int32, bitcast=True)
    if MAGNITUDES:
        keys = tl.minimum(bits & 0x7FFFFFFF, INFINITY) << 1
    else:
        bits = tl.where((bits & 0x7FFFFFFF) > INFINITY, INFINITY, bits)
        bits = tl.where(bits == LOWEST, 0, bits)  # -0 equals 0
        keys = tl.where(bits < 0, ~bits, bits ^ LOWEST)
    return found, keys, offsets


@triton.jit
def _begin(rank, length):
    """A rank's state: the bound as far as it is known, how many of those alike up to there are meant, how many are.

    Settled where these two are equal: then the entries from the bound on are meant. Of no entries the bound is above
    all keys.
    """
    left = tl.maximum(tl.minimum(rank.to(tl.int32), length), 0)
    return tl.where(left > 0, 0, -1), left, tl.where(left > 0, length, 0)


@triton.jit
def _descend(counted, bound, left, SHIFT: tl.constexpr, DIGITS: tl.constexpr):
    """The state one digit further."""
    counts = tl.load(counted + tl.arange(0, DIGITS))
    total = tl.sum(counts, 0)
    from_here = total - tl.cumsum(counts, 0) + counts  # entries of this digit or a larger one
    digit = tl.sum((from_here >= left).to(tl.int32), 0) - 1
    above = tl.max(tl.where(from_here < left, from_here, 0), 0)
    down_to = tl.min(tl.where(from_here < left, total, from_here), 0)
    return bound | (digit << SHIFT), left - above, down_to - above


@triton.jit(do_not_specialize=["entries", "segments", "stride"])
def count(
    values,
    table,
    shifts,
    ranks,
    counted,
    found,
    wanted,
    entries,
    segments,
    stride,
    SHIFT: tl.constexpr,
    DIGITS: tl.constexpr,
    FIRST: tl.constexpr,
    AGAIN: tl.constexpr,
    RANKS: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    WIDE: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
):
    """One digit of both ranks, a and b. Where they have the same bound so far, its digits are counted once, for a.

    AGAIN: only in lanes where it is wanted.
    """
    segment, origin, _start, here, slot = _place(table, shifts, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    place = lane * segments + segment
    own = table + tl.program_id(0).to(tl.int64) * COLUMNS
    length = tl.load(own + 5).to(tl.int32)
    state, row, bins = found + place * 6, counted + place * 2 * BINS, tl.arange(0, DIGITS)
    if FIRST:
        given = ranks + lane * stride + segment * RANKS
        a, a_left, a_alike = _begin(tl.load(given), length)
        # One rank alone: the second is that of everything, and settled.
        b, b_left, b_alike = _begin(tl.load(given + 1) if RANKS == 2 else length, length)
    else:
        a, a_left, a_alike = tl.load(state), tl.load(state + 1), tl.load(state + 2)
        b, b_left, b_alike = tl.load(state + 3), tl.load(state + 4), tl.load(state + 5)
    a_open, b_open = a_left < a_alike, b_left < b_alike
    asked = FIRST | a_open | b_open
    if AGAIN:
        asked = asked & (tl.load(wanted + lane) != 0)
    if asked:
        shared = b_open & (FIRST | (a_open & (a == b)))
        alone, known = b_open ^ shared, -(DIGITS << SHIFT)
        few = tl.maximum(length // FEW, LEAST)
        if FIRST | (a_open & (a_alike > few)) | (alone & (b_alike > few)):
            a_counts, b_counts = tl.zeros((DIGITS,), tl.int32), tl.zeros((DIGITS,), tl.int32)
            for at in range(0, here, TILE):
                _, keys, offsets = _keys(values + origin, at, slot, MAGNITUDES, TILE)
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
                _, keys, offsets = _keys(values + origin, at, slot, MAGNITUDES, PART)
                spots, inside = row + ((keys >> SHIFT) & (DIGITS - 1)), offsets < here
                if a_open:
                    tl.atomic_add(spots, 1, mask=inside & (((keys ^ a) & known) == 0), sem="relaxed")
                if alone:
                    tl.atomic_add(spots + BINS, 1, mask=inside & (((keys ^ b) & known) == 0), sem="relaxed")
        # All counts of this program are made before it says that it is done, and the last one sees those of the others.
        tl.debug_barrier()
        done = counted + lanes * segments * 2 * BINS + place
        if tl.atomic_add(done, 1, sem="acq_rel") == tl.load(own + 4).to(tl.int32) - 1:
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


@triton.jit(do_not_specialize=["entries", "room"])
def narrow(
    values, table, shifts, bounds, numbers, near, entries, room, WIDE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """A lane's entries between its two bounds, in any order; how many lie above both, at one, between, at the other.

    What there is no room for is only counted.
    """
    _segment, origin, _start, here, slot = _place(table, shifts, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    a, b = tl.load(bounds + lane * 6) ^ LOWEST, tl.load(bounds + lane * 6 + 3) ^ LOWEST
    above = 0
    first = 0
    second = 0
    for at in range(0, here, TILE):
        value, keys, offsets = _keys(values + origin, at, slot, False, TILE)
        keys, inside = keys ^ LOWEST, offsets < here
        above += tl.sum((inside & (keys > a)).to(tl.int32), 0)
        first += tl.sum((inside & (keys == a)).to(tl.int32), 0)
        second += tl.sum((inside & (keys == b) & (keys < a)).to(tl.int32), 0)
        between = inside & (keys > b) & (keys < a)
        met = between.to(tl.int32)
        spots = tl.atomic_add(numbers + 2 * lanes + lane, tl.sum(met, 0), sem="relaxed") + tl.cumsum(met, 0) - 1
        tl.store(near + lane * room + spots, value, mask=between & (spots < room))
    tl.atomic_add(numbers + lane, above, sem="relaxed")
    tl.atomic_add(numbers + lanes + lane, first, sem="relaxed")
    tl.atomic_add(numbers + 3 * lanes + lane, second, sem="relaxed")


@triton.jit(do_not_specialize=["entries", "segments"])
def ties(
    values,
    table,
    shifts,
    found,
    equal,
    entries,
    segments,
    MAGNITUDES: tl.constexpr,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
):
    """How many entries of a program equal a bound, of bounds where not all of them are meant."""
    segment, origin, _start, here, slot = _place(table, shifts, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    state = found + (lane * segments + segment) * 6
    a, b = tl.load(state), tl.load(state + 3)
    if (tl.load(state + 1) < tl.load(state + 2)) | (tl.load(state + 4) < tl.load(state + 5)):
        a_ties = 0
        b_ties = 0
        for at in range(0, here, PART):
            _, keys, offsets = _keys(values + origin, at, slot, MAGNITUDES, PART)
            a_ties += tl.sum(((keys == a) & (offsets < here)).to(tl.int32), 0)
            b_ties += tl.sum(((keys == b) & (offsets < here)).to(tl.int32), 0)
        row = equal + lane * tl.num_programs(0) + tl.program_id(0)
        tl.store(row, a_ties)
        tl.store(row + lanes * tl.num_programs(0), b_ties)


@triton.jit
def _earlier(equal, first, split):
    """The ties in earlier programs of the segment, where they matter."""
    total = 0
    if split:
        for at in range(first, tl.program_id(0), COUNTS):
            others = at + tl.arange(0, COUNTS)
            total += tl.sum(tl.load(equal + others, mask=others < tl.program_id(0), other=0), 0)
    return total


@triton.jit
def _meant(keys, inside, bound, left, seen, split):
    """Which entries of a tile a rank means, and how many ties were met by then."""
    meant = (keys ^ LOWEST) >= (bound ^ LOWEST)
    if split:
        equal = inside & (keys == bound)
        meant = meant & ((keys != bound) | (tl.cumsum(equal.to(tl.int32), 0) + seen <= left))
        seen += tl.sum(equal.to(tl.int32), 0)
    return meant, seen


@triton.jit(do_not_specialize=["entries", "segments"])
def mark(
    values,
    table,
    shifts,
    found,
    equal,
    result,
    entries,
    segments,
    KEPT: tl.constexpr,
    MAGNITUDES: tl.constexpr,
    WIDE: tl.constexpr,
    PART: tl.constexpr,
):
    """Every entry's band: how many of the ranks it lies below; or the entry itself in band 1, else 0."""
    segment, origin, start, here, slot = _place(table, shifts, entries, WIDE)
    lane, lanes = tl.program_id(1).to(tl.int64), tl.num_programs(1).to(tl.int64)
    state, row = found + (lane * segments + segment) * 6, equal + lane * tl.num_programs(0)
    a, a_left, a_split = tl.load(state), tl.load(state + 1), tl.load(state + 1) < tl.load(state + 2)
    b, b_left, b_split = tl.load(state + 3), tl.load(state + 4), tl.load(state + 4) < tl.load(state + 5)
    first = tl.load(table + tl.program_id(0).to(tl.int64) * COLUMNS + 6).to(tl.int32)
    a_seen, b_seen = _earlier(row, first, a_split), _earlier(row + lanes * tl.num_programs(0), first, b_split)
    for at in range(0, slot, PART):
        value, keys, offsets = _keys(values + origin, at, slot, MAGNITUDES, PART)
        above, a_seen = _meant(keys, offsets < here, a, a_left, a_seen, a_split)
        down_to, b_seen = _meant(keys, offsets < here, b, b_left, b_seen, b_split)
        if KEPT:
            stays = (down_to ^ above) & (offsets < here)
            tl.store(result + start + offsets, tl.where(stays, value, 0.0), mask=offsets < slot)
        else:
            band = 2 - above.to(tl.int8) - down_to.to(tl.int8)
            tl.store(result + start + offsets, band, mask=offsets < slot)
