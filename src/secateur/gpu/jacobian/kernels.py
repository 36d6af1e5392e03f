"""Triton kernels of `Flow`: a GPU's memory is passed over once where operations of torch would pass four times.

Gradients are (K, P, C): features, places of the batch, channels, as channels_last pictures lie in memory. What the
features share, slopes and normalised inputs (P, C), is loaded once for some of them.
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from secateur.gpu.jacobian.flows import Thin

Parts = tuple[Tensor, *tuple[Tensor | Thin, ...]]
FEATURES, PLACES, CHANNELS = 8, 8, 64  # of a tile
WARPS = 4  # that share one
STRETCH = 128  # places that one program adds up
SIZES = ["K", "P", "height", "width"]  # alike to a compiled kernel; by C it knows how rows lie in memory


@triton.jit
def _tile(
    first, second, slope, k, p, c, K, P, C, height, width,
    TWO: tl.constexpr, SLOPE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """(features, places, channels) of the sum of the parts times the slope, where it lies, and what is inside.

    The second part has values at every so many places down and right.
    """
    inside = (k < K)[:, None, None] & (p < P)[None, :, None] & (c < C)[None, None, :]
    shared = p[:, None] * C + c[None, :]
    inside_shared = (p < P)[:, None] & (c < C)[None, :]
    at = k.to(tl.int64)[:, None, None] * (P * C) + shared[None, :, :]
    value = tl.load(first + at, mask=inside, other=0).to(tl.float32)
    if TWO:
        if DOWN * RIGHT > 1:
            y, x = (p // width) % height, p % width
            high, wide = tl.cdiv(height, DOWN), tl.cdiv(width, RIGHT)
            place = (p // (height * width) * high + y // DOWN) * wide + x // RIGHT
            there = place[:, None] * C + c[None, :]
            places = P // (height * width) * high * wide
            at_second = k.to(tl.int64)[:, None, None] * (places * C) + there[None, :, :]
            filled = inside & ((y % DOWN == 0) & (x % RIGHT == 0))[None, :, None]
            value += tl.load(second + at_second, mask=filled, other=0).to(tl.float32)
        else:
            value += tl.load(second + at, mask=inside, other=0).to(tl.float32)
    if SLOPE:
        value *= tl.load(slope + shared, mask=inside_shared, other=0).to(tl.float32)[None, :, :]
    return value, at, inside, shared, inside_shared


@triton.jit
def _where(K, C, G: tl.constexpr, W: tl.constexpr):
    """The features and channels of this program and its place among the rest.

    Programs of other features come next to each other, as they load the same slopes and normalised inputs.
    """
    groups, widths = tl.cdiv(K, G), tl.cdiv(C, W)
    program = tl.program_id(0)
    k = (program % groups) * G + tl.arange(0, G)
    c = (program // groups % widths) * W + tl.arange(0, W)
    return k, c, program // (groups * widths)


@triton.jit(do_not_specialize=SIZES)
def _sums(
    first, second, slope, normal, whole, out, K, P, C, height, width,
    TWO: tl.constexpr, SLOPE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, KEEP: tl.constexpr,
    STRETCH: tl.constexpr, G: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Over a stretch of places: the sums of g and of g x, into (2, stretches, K, C); g itself where it is kept."""
    k, c, stretch = _where(K, C, G, W)
    total = tl.zeros((G, R, W), dtype=tl.float32)
    along = tl.zeros((G, R, W), dtype=tl.float32)
    for step in range(0, STRETCH, R):
        p = stretch * STRETCH + step + tl.arange(0, R)
        value, at, inside, shared, inside_shared = _tile(
            first, second, slope, k, p, c, K, P, C, height, width, TWO, SLOPE, DOWN, RIGHT
        )
        if KEEP:
            tl.store(whole + at, value.to(whole.dtype.element_ty), mask=inside)
        x = tl.load(normal + shared, mask=inside_shared, other=0).to(tl.float32)
        total += value
        along += value * x[None, :, :]
    inside = (k < K)[:, None] & (c < C)[None, :]
    into = out + (stretch * K + k[:, None]) * C + c[None, :]
    tl.store(into, tl.sum(total, 1), mask=inside)
    tl.store(into + tl.cdiv(P, STRETCH) * K * C, tl.sum(along, 1), mask=inside)


@triton.jit(do_not_specialize=SIZES)
def _written(
    first, second, slope, normal, means, out, K, P, C, height, width,
    TWO: tl.constexpr, SLOPE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, CENTRED: tl.constexpr,
    G: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """The sum of the parts times the slope; centred: less mean(g) and x mean(g x), which are in (2, K, C)."""
    k, c, row = _where(K, C, G, W)
    p = row * R + tl.arange(0, R)
    value, at, inside, shared, inside_shared = _tile(
        first, second, slope, k, p, c, K, P, C, height, width, TWO, SLOPE, DOWN, RIGHT
    )
    if CENTRED:
        x = tl.load(normal + shared, mask=inside_shared, other=0).to(tl.float32)
        of = means + k[:, None] * C + c[None, :]
        inside_means = (k < K)[:, None] & (c < C)[None, :]
        mean = tl.load(of, mask=inside_means, other=0)
        along = tl.load(of + K * C, mask=inside_means, other=0)
        value -= mean[:, None, :] + x[None, :, :] * along[:, None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def summed(parts: Parts, slope: Tensor) -> Tensor:
    """(K B, C, H, W): the sum of the parts times the slope."""
    return _write(parts, _like(slope, parts[0], len(slope)), None, None, len(slope))


def centred(parts: Parts, slope: Tensor | None, normal: Tensor, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """(K B, C, H, W): g - mean(g) - x mean(g x), where g is the sum of the parts times the slope; g, if it is kept."""
    shared = None if slope is None else _like(slope, parts[0], len(normal))
    (K, P, C), (G, R, W) = _sizes(parts[0], len(normal)), _tiles(parts[0])
    second, steps = _second(parts)
    whole = torch.empty_like(parts[0], memory_format=torch.channels_last) if keep else None
    stretches = triton.cdiv(P, STRETCH)
    sums = torch.empty(2, stretches, K, C, device=normal.device)
    given = [parts[0] if each is None else each for each in (shared, normal, whole)]
    with torch.cuda.device_of(normal):
        _sums[stretches * triton.cdiv(C, W) * triton.cdiv(K, G),](
            parts[0], second, *given, sums, K, P, C, *normal.shape[2:],
            len(parts) == 2, slope is not None, *steps, keep, STRETCH, G, R, W, num_warps=WARPS,
        )  # fmt: skip
    if whole is not None:
        parts, shared = (whole,), None
    return _write(parts, shared, normal, sums.sum(1).div_(P), len(normal)), whole


def _write(parts: Parts, slope: Tensor | None, normal: Tensor | None, means: Tensor | None, batch: int) -> Tensor:
    out = torch.empty_like(parts[0], memory_format=torch.channels_last)
    (K, P, C), (G, R, W) = _sizes(out, batch), _tiles(out)
    second, steps = _second(parts)
    given = [out if each is None else each for each in (slope, normal, means)]
    with torch.cuda.device_of(out):
        _written[triton.cdiv(P, R) * triton.cdiv(C, W) * triton.cdiv(K, G),](
            parts[0], second, *given, out, K, P, C, *out.shape[2:],
            len(parts) == 2, slope is not None, *steps, normal is not None, G, R, W, num_warps=WARPS,
        )  # fmt: skip
    return out


def _second(parts: Parts) -> tuple[Tensor, tuple[int, ...]]:
    """The last part and at every how many places, down and right, it has a value."""
    last = parts[-1]
    return (last.values, last.steps) if isinstance(last, Thin) else (last, (1, 1))


def _like(slope: Tensor, part: Tensor, batch: int) -> Tensor:
    """(batch, C, H, W)."""
    return slope.expand(batch, *part.shape[1:]).contiguous(memory_format=torch.channels_last)


def _sizes(part: Tensor, batch: int) -> tuple[int, int, int]:
    """K, P and C."""
    return len(part) // batch, batch * part.shape[2] * part.shape[3], part.shape[1]


def _tiles(part: Tensor) -> tuple[int, int, int]:
    return FEATURES, PLACES, min(CHANNELS, triton.next_power_of_2(part.shape[1]))
