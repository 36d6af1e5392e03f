"""An entropy coder of bitmaps: asymmetric numeral systems (Duda 2013), many lanes at once, a byte at a time.

A bitmap's bits count as independent, 1 with the share that its tensor keeps; both sides know that share from the
table, so that no statistics are sent. Everything is integer arithmetic: equal on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from secateur.errors import WrongInput

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Model = tuple[int, int]  # of one tensor: bits that are 1, bytes of its bitmap

BITS = 24  # a byte's probability is a multiple of 2^-24 and at least one: fine down to a density of 1e-4
SCALE, SPARE, HALF = np.uint64(BITS), np.uint64(64 - BITS), np.uint64(32)
WHOLE, SLOT = np.uint64(1 << BITS), np.uint64((1 << BITS) - 1)
START = np.uint64(1 << 32)  # where every lane begins, and a decoder must end
ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1)  # (256,) in each byte


OVERHEAD = 8  # bytes of a stream beyond what its bitmaps cost, at most


def lanes(size: int) -> int:
    """How many states share `size` bytes: each takes its share of the steps, and adds 4 bytes."""
    return max(1, min(256, size // 2048))


def cost(size: int, entropy: float) -> float:
    """Bytes that a bitmap of `size` bytes and so many bits of entropy adds to a stream, about."""
    return entropy / 8 + size / 512


def encode(symbols: Bytes, models: Sequence[Model]) -> bytes:
    """The bitmaps of all tensors, one after another, as one stream: the lanes' states, then words of 32 bits."""
    frequencies, starts = _tables(models)
    index = _rows(models) * 256 + symbols
    frequency, start, limit = frequencies[index], starts[index] & SLOT, (frequencies << SPARE)[index]
    width = lanes(len(symbols))
    state = np.full(width, START)
    words: list[Numbers] = [np.empty(0, np.uint64)]
    for first in reversed(range(0, len(symbols), width)):  # the last byte in is the first one out
        row = slice(first, first + width)
        some = state[: len(symbols) - first]
        full = some >= limit[row]
        words.append(some[full])
        some[full] >>= HALF
        high = some // frequency[row]
        some += start[row] + high * (WHOLE - frequency[row])
    low = np.concatenate(words[::-1]).astype("<u4")  # the low halves
    return state.astype("<u8").tobytes() + low.tobytes()


def decode(stream: bytes, models: Sequence[Model]) -> Bytes:
    """The inverse; refuses a stream that does not end where every encoder began."""
    size = sum(size for _, size in models)
    width = lanes(size)
    if len(stream) < 8 * width or len(stream) % 4:
        raise WrongInput("message", "is damaged: the coded positions are cut off")
    frequencies, starts = _tables(models)
    base = _rows(models).astype(np.uint64) << SCALE
    state = np.frombuffer(stream, "<u8", width).astype(np.uint64)
    words = np.frombuffer(stream, "<u4", offset=8 * width).astype(np.uint64)
    symbols, used = np.empty(size, np.uint8), 0
    for first in range(0, size, width):
        some = state[: size - first]
        slot = base[first : first + width] + (some & SLOT)
        index = starts.searchsorted(slot, "right") - 1
        symbols[first : first + width] = index & 255
        some[:] = frequencies[index] * (some >> SCALE) + (slot - starts[index])
        empty = np.flatnonzero(some < START)
        if used + len(empty) > len(words):
            raise WrongInput("message", "is damaged: the coded positions are cut off")
        some[empty] = some[empty] << HALF | words[used : used + len(empty)]
        used += len(empty)
    if used < len(words) or (state != START).any():
        raise WrongInput("message", "is damaged: the coded positions do not end where they must")
    return symbols


def _rows(models: Sequence[Model]) -> npt.NDArray[np.int64]:
    """(bytes,) which tensor each belongs to."""
    return np.repeat(np.arange(len(models)), [size for _, size in models])


def _tables(models: Sequence[Model]) -> tuple[Numbers, Numbers]:
    """(tensors * 256,) each: a byte's share of 2^24, and where its share begins, 2^24 a tensor."""
    frequencies = np.stack([_frequencies(*model) for model in models])
    ends = frequencies.cumsum(1, dtype=np.uint64)
    starts = ends - frequencies + (np.arange(len(models), dtype=np.uint64) << SCALE)[:, None]
    return frequencies.ravel(), starts.ravel()


def _frequencies(ones: int, size: int) -> Numbers:
    """(256,) the probabilities of a bitmap's bytes, in Python's integers; the likeliest byte takes what is over."""
    zeros, whole = 8 * size - ones, 8 * size
    classes = [max(1, (ones**k * zeros ** (8 - k) << BITS) // whole**8) for k in range(9)]
    found: npt.NDArray[np.int64] = np.array(classes, np.int64)[ONES]
    found[0 if ones <= zeros else 255] += (1 << BITS) - found.sum()
    return found.astype(np.uint64)
