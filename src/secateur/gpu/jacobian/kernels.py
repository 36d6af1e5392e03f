"""Triton kernels of `Flow`: one pass over the GPU's memory where operations of torch need four.

Gradients are (K, P, C): features, positions in the batch, channels, the memory order of channels_last pictures. Slopes
and normalised inputs (P, C) are shared by all features, and loaded once for several features.
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
FEATURES, PLACES, CHANNELS = 8, 8, 64  # size of a tile
WARPS = 4  # per tile
STRETCH = 128  # positions that one program sums
SIZES = ["K", "P", "height", "width"]  # not specialised; C is, as it gives the memory layout


@triton.jit
def _tile(
    first, second, slope, k, p, c, K, P, C, height, width,
    TWO: tl.constexpr, SLOPE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Load a tile of the sum of the parts times the slope, with its offsets and its bounds mask.

    The tile is (features, positions, channels). The second part has values at every DOWN-th and RIGHT-th position.
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
    """Return the features and channels of this program, and its index along the positions.

    Programs that differ only in features are adjacent, because they load the same slopes and normalised inputs.
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
    """Sum g and g x over a stretch of positions, into (2, stretches, K, C); KEEP stores g too."""
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
    """Store the sum g of the parts times the slope.

    CENTRED subtracts mean(g) and x mean(g x); `means` (2, K, C) holds the two means.
    """
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
    """Return the sum of the parts times the slope, (K B, C, H, W)."""
    return _write(parts, _like(slope, parts[0], len(slope)), None, None, len(slope))


def centred(parts: Parts, slope: Tensor | None, normal: Tensor, keep: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return g - mean(g) - x mean(g x), (K B, C, H, W), and g itself if `keep`, else None.

    g is the sum of the parts times the slope.
    """
    shared = None if slope is None else _like(slope, parts[0], len(normal))
    (K, P, C), (G, R, W) = _sizes(parts[0], len(normal)), _tiles(parts[0])
    second, steps = _second(parts)
    whole = torch.empty_like(parts[0], memory_format=torch.channels_last) if keep else None
    stretches = triton.cdiv(P, STRETCH)
    sums = torch.empty(2, stretches, K, C, device=normal.device)
    optional = [parts[0] if tensor is None else tensor for tensor in (shared, normal, whole)]
    with torch.cuda.device_of(normal):
        _sums[stretches * triton.cdiv(C, W) * triton.cdiv(K, G),](
            parts[0], second, *optional, sums, K, P, C, *normal.shape[2:],
            len(parts) == 2, slope is not None, *steps, keep, STRETCH, G, R, W, num_warps=WARPS,
        )  # fmt: skip
    if whole is not None:
        parts, shared = (whole,), None
    return _write(parts, shared, normal, sums.sum(1).div_(P), len(normal)), whole


def _write(parts: Parts, slope: Tensor | None, normal: Tensor | None, means: Tensor | None, batch: int) -> Tensor:
    out = torch.empty_like(parts[0], memory_format=torch.channels_last)
    (K, P, C), (G, R, W) = _sizes(out, batch), _tiles(out)
    second, steps = _second(parts)
    optional = [out if tensor is None else tensor for tensor in (slope, normal, means)]
    with torch.cuda.device_of(out):
        _written[triton.cdiv(P, R) * triton.cdiv(C, W) * triton.cdiv(K, G),](
            parts[0], second, *optional, out, K, P, C, *out.shape[2:],
            len(parts) == 2, slope is not None, *steps, normal is not None, G, R, W, num_warps=WARPS,
        )  # fmt: skip
    return out


def _second(parts: Parts) -> tuple[Tensor, tuple[int, ...]]:
    """Return the values of the last part, and their spacing down and right."""
    last = parts[-1]
    return (last.values, last.steps) if isinstance(last, Thin) else (last, (1, 1))


def _like(slope: Tensor, part: Tensor, batch: int) -> Tensor:
    """Expand the slope to (batch, C, H, W), channels_last."""
    return slope.expand(batch, *part.shape[1:]).contiguous(memory_format=torch.channels_last)


def _sizes(part: Tensor, batch: int) -> tuple[int, int, int]:
    """Return K, P and C."""
    return len(part) // batch, batch * part.shape[2] * part.shape[3], part.shape[1]


def _tiles(part: Tensor) -> tuple[int, int, int]:
    return FEATURES, PLACES, min(CHANNELS, triton.next_power_of_2(part.shape[1]))
