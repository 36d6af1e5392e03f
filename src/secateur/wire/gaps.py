"""Positions that are few, or all but few: the gaps between them in Rice's code (Golomb 1966, Rice 1979).

A gap g is g >> k zeros and a one, and its lowest k bits. Of independent entries it needs about a hundredth more than
their entropy where one in twenty is kept, less where fewer are. The rarer of kept and dropped entries is coded.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from secateur.errors import WrongInput

Bits = npt.NDArray[np.bool_]
DROPPED = 128  # the flag in the first byte, beside k: the gaps are those between dropped entries


def encode(kept: Bits, count: int) -> bytes:
    """A byte that says k and which of the two is coded, all low bits, all high parts; 0 < count < len(kept)."""
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
    """The inverse: which of `size` entries are kept."""
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
