"""Positions of the kept entries of a tensor: the cheapest of several codings, and its inverse.

If few entries are kept, or few are dropped, the gaps between the rarer ones are in Rice's code (Golomb 1966, Rice
1979). A gap g is g >> k zeros and a one, and the lowest k bits of g. For independent entries the code needs about 1%
more than their entropy if one in twenty is kept, and less if fewer are.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from secateur.errors import WrongInput
from secateur.wire import rans
from secateur.wire.table import Coding, TableEntry, inflate, item_size

Bits = npt.NDArray[np.bool_]
SLACK = 64  # bytes of positions beyond a bitmap's that are read before they are refused
DROPPED = 128  # the flag in the first byte, beside k: the gaps are those between dropped entries


@dataclass(frozen=True, eq=False)
class Coded:
    """Coded positions of one tensor."""

    count: int
    coding: Coding
    own: bytes = b""  # sent for this tensor alone
    bitmap: rans.Bytes = field(default_factory=lambda: np.empty(0, np.uint8))  # its part of the shared stream


def code(kept: Mapping[str, Bits], item_sizes: Mapping[str, int]) -> dict[str, Coded]:
    """Return the cheapest coding of every tensor; the shared stream is used if its savings exceed its overhead."""
    alone = {name: _code_alone(bits, item_sizes[name]) for name, bits in kept.items()}
    shared, saved = {}, 0.0
    for name, (one, cost) in alone.items():
        size = len(kept[name])
        gain = cost - rans.cost((size + 7) // 8, entropy(size, one.count))
        if gain > 0:
            shared[name] = Coded(one.count, Coding.ENTROPY, bitmap=np.packbits(kept[name]))
            saved += gain
    if saved <= rans.OVERHEAD:
        shared = {}
    return {name: shared.get(name, one) for name, (one, _) in alone.items()}


def _code_alone(kept: Bits, item: int) -> tuple[Coded, int]:
    """Return the cheapest coding that needs no other tensor, and its bytes beyond the kept values."""
    size, count = len(kept), int(np.count_nonzero(kept))
    if count in (0, size):
        return Coded(count, Coding.EVIDENT), 0
    bitmap = np.packbits(kept).tobytes()
    choices = [(Coding.BITMAP, bitmap, len(bitmap))]
    if 16 * min(count, size - count) < size:  # else the entropy coder is better, and cheaper to try
        few = encode(kept, count)
        choices.append((Coding.GAPS, few, len(few)))
    deflated = zlib.compress(bitmap, 6)
    choices.append((Coding.DEFLATED, deflated, len(deflated)))
    if item:
        choices.append((Coding.DENSE, b"", item * (size - count)))
    coding, payload, cost = min(choices, key=lambda choice: choice[2])
    return Coded(count, coding, payload), cost


def entropy(size: int, count: int) -> float:
    """Return the bits of the positions of `count` of `size` equally likely entries: n H(count / n).

    Example:
        >>> round(entropy(1000, 200), 1), entropy(10, 10)
        (721.9, 0.0)
    """
    parts = [part for part in (count, size - count) if part]
    return sum(part * math.log2(size / part) for part in parts) if len(parts) > 1 else 0.0


def own_bytes(entry: TableEntry, size: int) -> int:
    """Return the number of bytes sent for one tensor's positions alone; refuse a contradictory table."""
    if entry.count > size:
        raise WrongInput("message", f"{entry.name} has a wrong count: {entry.count} of {size} entries")
    if (entry.coding == Coding.EVIDENT) != (entry.count in (0, size)):
        raise WrongInput("message", f"{entry.name} has a coding that does not fit its count, {entry.count} of {size}")
    if entry.coding == Coding.DENSE and not item_size(entry.dtype):
        raise WrongInput("message", f"{entry.name} is a mask without positions")
    bitmap = (size + 7) // 8
    if entry.coding in (Coding.DEFLATED, Coding.GAPS):  # chosen only where they are shorter than the bitmap
        if entry.bytes > bitmap + SLACK:
            raise WrongInput("message", f"{entry.name} asks for {entry.bytes} bytes of positions; {bitmap} are enough")
        return entry.bytes
    fixed = bitmap if entry.coding == Coding.BITMAP else 0
    if entry.bytes != fixed:
        raise WrongInput("message", f"{entry.name} has {entry.bytes} bytes of positions; {fixed} are right")
    return entry.bytes


def read(entry: TableEntry, payload: bytes, bitmap: rans.Bytes | None, size: int) -> Bits | None:
    """Return the mask of kept entries, None if the values say it; `bitmap` comes from the shared stream."""
    if entry.coding == Coding.DENSE:
        return None
    if entry.coding == Coding.EVIDENT:
        return np.full(size, entry.count > 0)
    if entry.coding == Coding.GAPS:
        return decode(payload, size, entry.count, entry.name)
    wanted = (size + 7) // 8
    if bitmap is None:
        plain = payload if entry.coding == Coding.BITMAP else inflate(payload, wanted, f"positions of {entry.name}")
        bitmap = np.frombuffer(plain, np.uint8)
    if len(bitmap) != wanted:
        raise WrongInput("message", f"the positions of {entry.name} are {len(bitmap)} bytes; {wanted} are right")
    bits = np.unpackbits(bitmap).view(np.bool_)
    if bits[size:].any():
        raise WrongInput("message", f"{entry.name} has a position out of range; it has {size} entries")
    if (count := int(np.count_nonzero(bits))) != entry.count:
        raise WrongInput("message", f"{entry.name} has {count} positions, but its count is {entry.count}")
    return bits[:size]


def encode(kept: Bits, count: int) -> bytes:
    """Return the gaps in Rice's code, for 0 < count < len(kept).

    The first byte holds k and the flag DROPPED; all low bits and then all high parts follow.
    """
    rare = 2 * count <= len(kept)
    places = np.flatnonzero(kept if rare else ~kept)
    gaps = np.diff(places, prepend=-1) - 1
    guess = max(0, round(np.log2(0.69 * len(kept) / len(places))))
    k = min(range(max(0, guess - 1), guess + 2), key=lambda k: len(gaps) * k + int((gaps >> k).sum()))
    low = np.packbits((gaps[:, None] >> np.arange(k)) & 1 > 0)
    ends = np.cumsum((gaps >> k) + 1)
    high = np.zeros(ends[-1], np.bool_)
    high[ends - 1] = True
    return bytes([k | (0 if rare else DROPPED)]) + low.tobytes() + np.packbits(high).tobytes()


def decode(data: bytes, size: int, count: int, name: str) -> Bits:
    """Return the mask of kept entries of `size` from gaps in Rice's code."""
    k, dropped = (data[0] & ~DROPPED, data[0] & DROPPED > 0) if data else (0, False)
    number = size - count if dropped else count
    cut = 1 + (number * k + 7) // 8
    if k >= 63 or cut > len(data):
        raise WrongInput("message", f"the positions of {name} are cut off")
    low = np.unpackbits(np.frombuffer(data, np.uint8, cut - 1, 1), count=number * k).reshape(number, k)
    ends = np.flatnonzero(np.unpackbits(np.frombuffer(data, np.uint8, offset=cut)))
    if len(ends) != number:
        raise WrongInput("message", f"{name} has {len(ends)} positions in its gaps; {number} are right")
    high = np.diff(ends, prepend=-1) - 1
    if (high > size >> k).any():
        raise WrongInput("message", f"{name} has a position out of range; it has {size} entries")
    gaps = high << k
    for bit in range(k):
        gaps += low[:, bit].astype(np.int64) << bit
    places = np.cumsum(gaps + 1) - 1
    if places[-1] >= size:
        raise WrongInput("message", f"{name} has a position out of range; it has {size} entries")
    bits = np.full(size, dropped)
    bits[places] = not dropped
    return bits
