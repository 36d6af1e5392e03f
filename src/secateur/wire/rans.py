"""Entropy coder of bitmaps: asymmetric numeral systems (Duda 2013), many lanes at once, one byte per step.

The bits of a bitmap count as independent, 1 with the share that its tensor keeps. Both sides know that share from the
table, so no statistics are sent. All arithmetic is on integers, so results are equal on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from secateur.errors import WrongInput

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint64]
Model = tuple[int, int]  # per tensor: number of 1 bits, bytes of its bitmap

BITS = 24  # a byte's probability is a multiple of 2^-24, at least 2^-24: enough down to a density of 1e-4
SCALE, SPARE, HALF = np.uint64(BITS), np.uint64(64 - BITS), np.uint64(32)
WHOLE, SLOT = np.uint64(1 << BITS), np.uint64((1 << BITS) - 1)
START = np.uint64(1 << 32)  # initial state of every lane; a decoder must end there
ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1)  # (256,) number of 1 bits of each byte


LANES = 256  # at most
OVERHEAD = 8  # upper bound of a stream's bytes beyond the cost of its bitmaps


def lanes(size: int) -> int:
    """Return the number of states that share `size` bytes: each takes its share of the steps, and adds 4 bytes."""
    return max(1, min(LANES, size // 2048))


def cost(size: int, entropy: float) -> float:
    """Return the approximate bytes that a bitmap of `size` bytes and `entropy` bits adds to a stream."""
    return entropy / 8 + size / 512


def encode(symbols: Bytes, models: Sequence[Model]) -> bytes:
    """Encode the bitmaps of all tensors, concatenated, as one stream: the lanes' states, then words of 32 bits."""
    frequencies, starts = _tables(models)
    index = _rows(models) * 256 + symbols
    frequency, start, limit = frequencies[index], starts[index] & SLOT, (frequencies << SPARE)[index]
    width = lanes(len(symbols))
    state = np.full(width, START)
    words: list[Numbers] = [np.empty(0, np.uint64)]
    for first in reversed(range(0, len(symbols), width)):  # the last byte encoded is the first one decoded
        row = slice(first, first + width)
        active = state[: len(symbols) - first]
        full = active >= limit[row]
        words.append(active[full])
        active[full] >>= HALF
        high = active // frequency[row]
        active += start[row] + high * (WHOLE - frequency[row])
    low = np.concatenate(words[::-1]).astype("<u4")  # the low halves
    return state.astype("<u8").tobytes() + low.tobytes()


def decode(stream: bytes, models: Sequence[Model]) -> Bytes:
    """Decode a stream of `encode`; refuse one that does not end in every lane's initial state."""
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
        active = state[: size - first]
        slot = base[first : first + width] + (active & SLOT)
        index = starts.searchsorted(slot, "right") - 1
        symbols[first : first + width] = index & 255
        active[:] = frequencies[index] * (active >> SCALE) + (slot - starts[index])
        empty = np.flatnonzero(active < START)
        if used + len(empty) > len(words):
            raise WrongInput("message", "is damaged: the coded positions are cut off")
        active[empty] = active[empty] << HALF | words[used : used + len(empty)]
        used += len(empty)
    if used < len(words) or (state != START).any():
        raise WrongInput("message", "is damaged: the coded positions do not end where they must")
    return symbols


def _rows(models: Sequence[Model]) -> npt.NDArray[np.int64]:
    """Return (bytes,) the index of each byte's tensor."""
    return np.repeat(np.arange(len(models)), [size for _, size in models])


def _tables(models: Sequence[Model]) -> tuple[Numbers, Numbers]:
    """Return two (tensors * 256,) arrays: each byte's share of 2^24, and the start of that share, 2^24 a tensor."""
    frequencies = np.stack([_frequencies(*model) for model in models])
    ends = frequencies.cumsum(1, dtype=np.uint64)
    starts = ends - frequencies + (np.arange(len(models), dtype=np.uint64) << SCALE)[:, None]
    return frequencies.ravel(), starts.ravel()


def _frequencies(ones: int, size: int) -> Numbers:
    """Return (256,) probabilities of a bitmap's bytes, by Python's integers; the likeliest byte gets the remainder."""
    zeros, bits = 8 * size - ones, 8 * size
    classes = [max(1, (ones**k * zeros ** (8 - k) << BITS) // bits**8) for k in range(9)]
    frequencies: npt.NDArray[np.int64] = np.array(classes, np.int64)[ONES]
    frequencies[0 if ones <= zeros else 255] += (1 << BITS) - frequencies.sum()
    return frequencies.astype(np.uint64)
