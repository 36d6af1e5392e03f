"""Triton kernels of stacked_layers.py: BatchNorm with ReLU of many lanes, alone and with 2x2 max-pooling.

Each direction passes over the memory twice: once for the sums, once to write. x and g, the gradient of the output, are
(U, P, C): lanes, positions, channels. Statistics, weight and bias are (U, C); the rows of weight and bias have any
stride.

With pooling, the forward pass writes a quarter of the entries and the backward pass reads a quarter. The backward pass
finds again which of four entries was the largest. x is then of images with an even number of lines and `width` columns,
and the pooled output is (U, P / 4, C).
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

POSITIONS, CHANNELS = 32, 64  # of a tile; with fewer channels it has more positions
PROGRAMS = 1024  # programs that share the sums: several for each of a GPU's processors
PARTS = 32  # partial sums that are loaded at once


def normalise(x: Tensor, weight: Tensor, bias: Tensor, eps: float, width: int = 0) -> tuple[Tensor, Tensor]:
    """Return the ReLU of the normalised x, pooled if there is a width, and mean, 1 / deviation and scale, (3, U, C)."""
    (U, P, C), (R, T), pool = x.shape, _tile(x), 4 if width else 1
    out = x.new_empty(U, P // pool, C)
    with torch.cuda.device_of(x):
        moments = _measure(x, weight, eps)
        grid = triton.cdiv(P // pool, R), triton.cdiv(C, T), U
        _write[grid](x, moments[0], moments[2], bias, out, P // pool, bias.stride(0), width, pool, C, R, T)
    return out, moments


def normalise_back(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, bias: Tensor, width: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias, for g in the shape of the output."""
    (U, Q, C), (R, T), pool = g.shape, _tile(x), 4 if width else 1
    tiles, stretch = triton.cdiv(C, T), _stretch(x, Q)
    out, sums = torch.empty_like(x), x.new_empty(2, U, triton.cdiv(Q, stretch), C)
    tensors, sizes = (x, g, mean, scale, bias), (width, pool, C, R, T)
    with torch.cuda.device_of(x):
        _sum_back[sums.shape[2], tiles, U](*tensors, sums, Q, bias.stride(0), stretch, *sizes)
        factors = _factor(sums, x, inverse, scale)
        _write_back[triton.cdiv(Q, R), tiles, U](*tensors, factors, out, Q, bias.stride(0), *sizes)
    return out, factors[2], factors[3]


def _measure(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return mean, 1 / deviation and scale, (3, U, C)."""
    (U, P, C), (R, T), stretch = x.shape, _tile(x), _stretch(x, x.shape[1])
    sums, moments, tiles = x.new_empty(2, U, triton.cdiv(P, stretch), C), x.new_empty(3, U, C), triton.cdiv(C, T)
    _sum[sums.shape[2], tiles, U](x, sums, P, C, stretch, R, T)
    _moments[tiles, U](sums, x, weight, moments, U, P, C, weight.stride(0), sums.shape[2], eps, PARTS, T)
    return moments


def _factor(sums: Tensor, x: Tensor, inverse: Tensor, scale: Tensor) -> Tensor:
    """Return a and b of dx = (x - mean) a + b + g scale, then the gradients of weight and bias, (4, U, C)."""
    (U, P, C), (_, T) = x.shape, _tile(x)
    factors = x.new_empty(4, U, C)
    _factors[triton.cdiv(C, T), U](sums, inverse, scale, factors, U, P, C, sums.shape[2], PARTS, T)
    return factors


def _tile(x: Tensor) -> tuple[int, int]:
    """Return the positions and the channels of a tile."""
    width = min(CHANNELS, triton.next_power_of_2(x.shape[2]))
    return POSITIONS * CHANNELS // width, width


def _stretch(x: Tensor, positions: int) -> int:
    """Return the number of positions whose sums are one program's."""
    (U, _, C), (R, T) = x.shape, _tile(x)
    stretch: int = max(R, triton.next_power_of_2(positions * U * triton.cdiv(C, T) // PROGRAMS))
    return stretch


@triton.jit
def _sum(x, out, P, C, stretch, R: tl.constexpr, T: tl.constexpr):
    """Sum d and d^2 over a stretch of positions, for d = x - the lane's first position, into (2, U, stretches, C).

    Without a nearby centre the variance would lose its digits.
    """
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    centre = tl.load(x + u * P * C + c, mask=c < C, other=0)
    total = tl.zeros((R, T), dtype=tl.float32)
    along = tl.zeros((R, T), dtype=tl.float32)
    for step in range(0, stretch, R):
        p = tl.program_id(0) * stretch + step + tl.arange(0, R)
        inside = (p < P)[:, None] & (c < C)[None, :]
        at = u * P * C + p[:, None] * C + c[None, :]
        d = tl.where(inside, tl.load(x + at, mask=inside, other=0) - centre[None, :], 0.0)
        total += d
        along += d * d
    _store(out, total, along, u, c, C)


@triton.jit
def _store(out, total, along, u, c, C):
    """Store a stretch's two sums into (2, U, stretches, C)."""
    into = out + (u * tl.num_programs(0) + tl.program_id(0)) * C + c
    tl.store(into, tl.sum(total, 0), mask=c < C)
    tl.store(into + tl.num_programs(2) * tl.num_programs(0) * C, tl.sum(along, 0), mask=c < C)


@triton.jit
def _moments(sums, x, weight, out, U, P, C, weight_stride, parts, eps, S: tl.constexpr, W: tl.constexpr):
    """Store mean, 1 / deviation and scale into (3, U, C)."""
    u = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * W + tl.arange(0, W)
    inside = c < C
    total, along = _load_sums(sums, u, c, U, C, parts, S, W)
    away = total / P
    var = along / P - away * away
    var = tl.where(var < 0, 0.0, var)  # tl.maximum would hide NaN
    inverse = 1 / tl.sqrt(var + eps)
    into = out + u * C + c
    tl.store(into, tl.load(x + u * P * C + c, mask=inside, other=0) + away, mask=inside)
    tl.store(into + U * C, inverse, mask=inside)
    tl.store(into + 2 * U * C, tl.load(weight + u * weight_stride + c, mask=inside, other=0) * inverse, mask=inside)


@triton.jit
def _load_sums(sums, u, c, U, C, parts, S: tl.constexpr, W: tl.constexpr):
    """Return both sums of a lane over all stretches, (C,) each."""
    total = tl.zeros((S, W), dtype=tl.float32)
    along = tl.zeros((S, W), dtype=tl.float32)
    for step in range(0, parts, S):
        s = step + tl.arange(0, S)
        inside = (s < parts)[:, None] & (c < C)[None, :]
        at = sums + (u * parts + s[:, None]) * C + c[None, :]
        total += tl.load(at, mask=inside, other=0)
        along += tl.load(at + U * parts * C, mask=inside, other=0)
    return tl.sum(total, 0), tl.sum(along, 0)


@triton.jit
def _factors(sums, inverse, scale, out, U, P, C, parts, S: tl.constexpr, W: tl.constexpr):
    """Store a and b of dx = (x - mean) a + b + g scale, then the gradients of weight and bias, into (4, U, C)."""
    u = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * W + tl.arange(0, W)
    inside, of = c < C, u * C + c
    total, along = _load_sums(sums, u, c, U, C, parts, S, W)
    inverse_, scale_ = tl.load(inverse + of, mask=inside, other=0), tl.load(scale + of, mask=inside, other=0)
    into = out + of
    tl.store(into, -scale_ * inverse_ * inverse_ * along / P, mask=inside)
    tl.store(into + U * C, -scale_ * total / P, mask=inside)
    tl.store(into + 2 * U * C, along * inverse_, mask=inside)
    tl.store(into + 3 * U * C, total, mask=inside)


@triton.jit
def _write(
    x, mean, scale, bias, out, Q, bias_stride,
    W: tl.constexpr, POOL: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write the ReLU of the largest of POOL normalised entries."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    q = tl.program_id(0) * R + tl.arange(0, R)
    centre, slope, shift = _affine(mean, scale, bias, u, c, C, bias_stride)
    inside, into, at = _positions(u, q, c, Q, W, POOL, C)
    _, value, _ = _pool_largest(x, at, inside, C, W, POOL, centre, slope, shift)
    tl.store(out + into, tl.where(value < 0, 0.0, value), mask=inside)


@triton.jit
def _sum_back(
    x, g, mean, scale, bias, out, Q, bias_stride, stretch,
    W: tl.constexpr, POOL: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sum g and g (x - mean), where the output was not 0, over a stretch of outputs, into (2, U, stretches, C)."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    centre, slope, shift = _affine(mean, scale, bias, u, c, C, bias_stride)
    total = tl.zeros((R, T), dtype=tl.float32)
    along = tl.zeros((R, T), dtype=tl.float32)
    for step in range(0, stretch, R):
        q = tl.program_id(0) * stretch + step + tl.arange(0, R)
        inside, of, at = _positions(u, q, c, Q, W, POOL, C)
        d, value, _ = _pool_largest(x, at, inside, C, W, POOL, centre, slope, shift)
        gradient = tl.where(value > 0, tl.load(g + of, mask=inside, other=0), 0.0)
        total += gradient
        along += gradient * d
    _store(out, total, along, u, c, C)


@triton.jit
def _write_back(
    x, g, mean, scale, bias, factors, out, Q, bias_stride,
    W: tl.constexpr, POOL: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) a + b, and + g scale at the largest of POOL entries, for a and b in (2, U, C)."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    q = tl.program_id(0) * R + tl.arange(0, R)
    centre, slope, shift = _affine(mean, scale, bias, u, c, C, bias_stride)
    factor = factors + u * C + c
    a, b = tl.load(factor, mask=c < C, other=0), tl.load(factor + tl.num_programs(2) * C, mask=c < C, other=0)
    inside, of, at = _positions(u, q, c, Q, W, POOL, C)
    _, value, number = _pool_largest(x, at, inside, C, W, POOL, centre, slope, shift)
    gradient = tl.load(g + of, mask=inside, other=0) * slope[None, :]
    gradient = tl.where(value > 0, gradient, 0.0)
    for k in tl.static_range(0, POOL):
        here = (k // 2 * W + k % 2) * C
        d, _ = _load_normalised(x, at, inside, here, centre, slope, shift)
        dx = d * a[None, :] + b[None, :] + tl.where(number == k, gradient, 0.0)
        tl.store(out + at + here, dx, mask=inside)


@triton.jit
def _affine(mean, scale, bias, u, c, C, bias_stride):
    """Return a lane's mean, scale and bias of the channels c."""
    of, inside = u * C + c, c < C
    shift = tl.load(bias + u * bias_stride + c, mask=inside, other=0)
    return tl.load(mean + of, mask=inside, other=0), tl.load(scale + of, mask=inside, other=0), shift


@triton.jit
def _positions(u, q, c, Q, W: tl.constexpr, POOL: tl.constexpr, C: tl.constexpr):
    """Return for outputs q and channels c: which exist, their offsets, and those of the first of their inputs."""
    inside = (q < Q)[:, None] & (c < C)[None, :]
    output = u * Q * C + q[:, None] * C + c[None, :]
    first = output
    if POOL > 1:
        column, line = q % (W // 2), q // (W // 2)  # of all pictures, one under the other
        first = u * POOL * Q * C + (2 * line * W + 2 * column)[:, None] * C + c[None, :]
    return inside, output, first


@triton.jit
def _pool_largest(x, at, inside, C: tl.constexpr, W: tl.constexpr, POOL: tl.constexpr, mean, scale, bias):
    """Return the first largest of POOL entries, minus the mean and normalised, and its number; NaN is the largest."""
    d, value = _load_normalised(x, at, inside, 0, mean, scale, bias)
    number = tl.zeros(value.shape, dtype=tl.int32)
    for k in tl.static_range(1, POOL):
        other, normal = _load_normalised(x, at, inside, (k // 2 * W + k % 2) * C, mean, scale, bias)
        larger = (normal > value) | (normal != normal)
        d, value = tl.where(larger, other, d), tl.where(larger, normal, value)
        number = tl.where(larger, k, number)
    return d, value, number


@triton.jit
def _load_normalised(x, at, inside, step, mean, scale, bias):
    """Return an entry at some step from its corner: minus the mean, and normalised."""
    d = tl.load(x + at + step, mask=inside, other=0) - mean[None, :]
    return d, d * scale[None, :] + bias[None, :]
