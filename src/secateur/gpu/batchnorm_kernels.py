"""Triton kernels of BatchNorm for many users, alone, with ReLU, and with ReLU and 2x2 max-pooling.

Each direction passes over the memory twice: once for the sums, once to write. x and g, the gradient of the output, are
(U, P, C): users, places, channels. Statistics and factors are (U, C); a first stride of 0 is one row that all users
share.

With pooling, the forward pass writes a quarter of the entries and the backward pass reads a quarter. The backward pass
finds again which of four entries was the largest. x is then of images with an even number of lines and `width` columns,
and the pooled output is (U, P / 4, C).
"""

# ruff: noqa: ANN001, ANN201, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PLACES, CHANNELS = 32, 64  # of a tile; with fewer channels it has more places
PROGRAMS = 1024  # programs that share the sums: several for each of a GPU's processors
PARTS = 32  # partial sums that are loaded at once


def normalised(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, skip: Tensor | None, relu: bool
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the normalised x, plus `skip`, through ReLU if `relu`.

    The second result is mean, variance, 1 / deviation and scale, (U, C) each.
    """
    weight, bias = (value.expand(len(x), -1) for value in (weight, bias))
    with torch.cuda.device_of(x):
        moments = measured(x, weight, bias, eps)
        return _write(x, skip, moments[0], moments[3:], relu), tuple(moments[:4])


def returned(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, relu: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias; `relu` is the bias if the output went through ReLU."""
    relu = None if relu is None else relu.expand(len(x), -1)
    with torch.cuda.device_of(x):
        factors = factored(_summed(x, g, mean, scale, relu), x, inverse, scale)
        return _write(x, g, mean, factors[:3], relu is not None, (scale, relu)), factors[3], factors[4]


def pooled(x: Tensor, weight: Tensor, bias: Tensor, eps: float, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the pooled output (U, P / 4, C), for weight and bias (U, C).

    The second result is mean, variance, 1 / deviation and scale, (U, C) each.
    """
    (U, P, C), (R, T) = x.shape, tile_of(x)
    out = x.new_empty(U, P // 4, C)
    with torch.cuda.device_of(x):
        moments = measured(x, weight, bias, eps)[:4]
        grid = triton.cdiv(P // 4, R), triton.cdiv(C, T), U
        mean, _, _, scale = moments
        _pooled[grid](x, mean, scale, bias, out, P // 4, bias.stride(0), width, C, R, T)
    return out, tuple(moments)


def spread(
    g: Tensor, x: Tensor, mean: Tensor, inverse: Tensor, scale: Tensor, bias: Tensor, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients with respect to x, weight and bias of the pooled layer, for g (U, P / 4, C)."""
    (U, P, C), (R, T) = x.shape, tile_of(x)
    Q, tiles = P // 4, triton.cdiv(C, T)
    stretch = max(R, triton.next_power_of_2(Q * U * tiles // PROGRAMS))
    out, sums = torch.empty_like(x), x.new_empty(2, U, triton.cdiv(Q, stretch), C)
    sizes = Q, bias.stride(0)
    with torch.cuda.device_of(x):
        _pool_sums[sums.shape[2], tiles, U](x, g, mean, scale, bias, sums, *sizes, stretch, width, C, R, T)
        factors = factored(sums, x, inverse, scale)
        grid = triton.cdiv(Q, R), tiles, U
        _spread[grid](x, g, mean, scale, bias, factors, out, *sizes, width, C, R, T)
    return out, factors[3], factors[4]


def measured(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return mean, variance, 1 / deviation, scale, bias and ones, (6, U, C), for weight and bias (U, C)."""
    (U, P, C), (_, W), sums = x.shape, tile_of(x), _summed(x)
    moments, grid = x.new_empty(6, U, C), (triton.cdiv(C, W), U)
    strides = weight.stride(0), bias.stride(0)
    _moments[grid](sums, x, weight, bias, moments, U, P, C, *strides, sums.shape[2], eps, PARTS, W)
    return moments


def factored(sums: Tensor, x: Tensor, inverse: Tensor, scale: Tensor) -> Tensor:
    """Return a, b and c of dx = (x - mean) a + b + g c, then the gradients of weight and bias, (5, U, C)."""
    (U, P, C), (_, W) = x.shape, tile_of(x)
    factors, grid = x.new_empty(5, U, C), (triton.cdiv(C, W), U)
    _factors[grid](sums, inverse, scale, factors, U, P, C, sums.shape[2], PARTS, W)
    return factors


def _summed(x: Tensor, *back: Tensor | None) -> Tensor:
    """Return both sums of `_sums`, (2, U, stretches, C), of x alone or with g, mean, scale and bias."""
    (U, P, C), (R, W) = x.shape, tile_of(x)
    tiles = triton.cdiv(C, W)
    stretch = max(R, triton.next_power_of_2(P * U * tiles // PROGRAMS))
    sums = x.new_empty(2, U, triton.cdiv(P, stretch), C)
    relu, pointers = bool(back) and back[-1] is not None, _pointers(x, *(back or [None] * 4))
    _sums[sums.shape[2], tiles, U](x, *pointers, sums, P, C, pointers[-1].stride(0), stretch, not back, relu, R, W)
    return sums


def _write(
    x: Tensor, g: Tensor | None, mean: Tensor, factors: Tensor, relu: bool, back: tuple[Tensor | None, ...] = ()
) -> Tensor:
    """Return the output of `_written`; `back` is (scale, bias) in the backward pass."""
    (U, P, C), (R, W) = x.shape, tile_of(x)
    out = torch.empty_like(x)
    grid = triton.cdiv(P, 2 * R), triton.cdiv(C, W), U
    pointers = _pointers(x, g, mean, *(back or [None] * 2))
    _written[grid](x, *pointers, factors, out, P, C, pointers[-1].stride(0), g is not None, relu, bool(back), 2 * R, W)
    return out


def _pointers(x: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors with x in place of each None, which the kernel does not read."""
    return [x if tensor is None else tensor for tensor in tensors]


def tile_of(x: Tensor) -> tuple[int, int]:
    """Return the places and the channels of a tile."""
    width = min(CHANNELS, triton.next_power_of_2(x.shape[2]))
    return PLACES * CHANNELS // width, width


@triton.jit
def _sums(
    x, g, mean, scale, bias, out, P, C, bias_stride, stretch,
    SQUARE: tl.constexpr, RELU: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Sum g and g (x - mean) over a stretch of places, into (2, U, stretches, C).

    SQUARE: sum d = x - the user's first place, and d^2; without a nearby centre the variance would lose its digits.
    RELU: take g only where the output was not 0.
    """
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * W + tl.arange(0, W)
    start = u * P * C
    centre = tl.load(x + start + c if SQUARE else mean + u * C + c, mask=c < C, other=0)
    if RELU:
        slope = tl.load(scale + u * C + c, mask=c < C, other=0)
        shift = tl.load(bias + u * bias_stride + c, mask=c < C, other=0)
    total = tl.zeros((R, W), dtype=tl.float32)
    along = tl.zeros((R, W), dtype=tl.float32)
    for step in range(0, stretch, R):
        p = tl.program_id(0) * stretch + step + tl.arange(0, R)
        inside = (p < P)[:, None] & (c < C)[None, :]
        at = start + p[:, None] * C + c[None, :]
        d = tl.where(inside, tl.load(x + at, mask=inside, other=0) - centre[None, :], 0.0)
        value = d if SQUARE else tl.load(g + at, mask=inside, other=0)
        if RELU:
            value = tl.where(d * slope[None, :] + shift[None, :] > 0, value, 0.0)
        total += value
        along += value * d
    kept(out, total, along, u, c, C)


@triton.jit
def kept(out, total, along, u, c, C):
    """Store a stretch's two sums into (2, U, stretches, C)."""
    into = out + (u * tl.num_programs(0) + tl.program_id(0)) * C + c
    tl.store(into, tl.sum(total, 0), mask=c < C)
    tl.store(into + tl.num_programs(2) * tl.num_programs(0) * C, tl.sum(along, 0), mask=c < C)


@triton.jit
def _moments(
    sums, x, weight, bias, out, U, P, C, weight_stride, bias_stride, parts, eps, S: tl.constexpr, W: tl.constexpr
):
    """Store mean, variance, 1 / deviation, scale, bias and ones into (6, U, C)."""
    u = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * W + tl.arange(0, W)
    inside = c < C
    total, along = _both(sums, u, c, U, C, parts, S, W)
    away = total / P
    mean = tl.load(x + u * P * C + c, mask=inside, other=0) + away
    var = along / P - away * away
    var = tl.where(var < 0, 0.0, var)  # tl.maximum would hide NaN
    inverse = 1 / tl.sqrt(var + eps)
    scale = tl.load(weight + u * weight_stride + c, mask=inside, other=0) * inverse
    into = out + u * C + c
    tl.store(into, mean, mask=inside)
    tl.store(into + U * C, var, mask=inside)
    tl.store(into + 2 * U * C, inverse, mask=inside)
    tl.store(into + 3 * U * C, scale, mask=inside)
    tl.store(into + 4 * U * C, tl.load(bias + u * bias_stride + c, mask=inside, other=0), mask=inside)
    tl.store(into + 5 * U * C, scale * 0 + 1, mask=inside)


@triton.jit
def _both(sums, u, c, U, C, parts, S: tl.constexpr, W: tl.constexpr):
    """Return both sums of a user over all stretches, (C,) each."""
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
    """Store a, b and c of dx = (x - mean) a + b + g c, then the gradients of weight and bias, into (5, U, C)."""
    u = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * W + tl.arange(0, W)
    inside, of = c < C, u * C + c
    total, along = _both(sums, u, c, U, C, parts, S, W)
    inverse_, scale_ = tl.load(inverse + of, mask=inside, other=0), tl.load(scale + of, mask=inside, other=0)
    into = out + of
    tl.store(into, -scale_ * inverse_ * inverse_ * along / P, mask=inside)
    tl.store(into + U * C, -scale_ * total / P, mask=inside)
    tl.store(into + 2 * U * C, scale_, mask=inside)
    tl.store(into + 3 * U * C, along * inverse_, mask=inside)
    tl.store(into + 4 * U * C, total, mask=inside)


@triton.jit
def _written(
    x, g, mean, scale, bias, factors, out, P, C, bias_stride,
    TWO: tl.constexpr, RELU: tl.constexpr, BACK: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Write a tile of (x - mean) a + b, with TWO also + g c, for a, b and c in (3, U, C).

    RELU: write the ReLU of that; in the BACK pass take g only where the output was not 0.
    """
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * W + tl.arange(0, W)
    p = tl.program_id(0) * R + tl.arange(0, R)
    inside = (p < P)[:, None] & (c < C)[None, :]
    at = u * P * C + p[:, None] * C + c[None, :]
    of, step = factors + u * C + c, tl.num_programs(2) * C
    centre = tl.load(mean + u * C + c, mask=c < C, other=0)
    slope = tl.load(of, mask=c < C, other=0)
    shift = tl.load(of + step, mask=c < C, other=0)
    d = tl.load(x + at, mask=inside, other=0) - centre[None, :]
    value = d * slope[None, :] + shift[None, :]
    if TWO:
        other = tl.load(g + at, mask=inside, other=0)
        if RELU and BACK:
            by = tl.load(scale + u * C + c, mask=c < C, other=0)
            plus = tl.load(bias + u * bias_stride + c, mask=c < C, other=0)
            other = tl.where(d * by[None, :] + plus[None, :] > 0, other, 0.0)
        value += other * tl.load(of + 2 * step, mask=c < C, other=0)[None, :]
    if RELU and not BACK:
        value = tl.where(value < 0, 0.0, value)
    tl.store(out + at, value, mask=inside)


@triton.jit
def _pooled(
    x, mean, scale, bias, out, Q, bias_stride,
    W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write the ReLU of the largest of four normalised entries."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    q = tl.program_id(0) * R + tl.arange(0, R)
    centre, slope, shift = _affine(mean, scale, bias, u, c, C, bias_stride)
    inside, of_pooled, at = _places(u, q, c, Q, W, C)
    _, value, _ = _largest(x, at, inside, C, W, centre, slope, shift)
    tl.store(out + of_pooled, tl.where(value < 0, 0.0, value), mask=inside)


@triton.jit
def _pool_sums(
    x, g, mean, scale, bias, out, Q, bias_stride, stretch,
    W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Sum g and g (x - mean) over a stretch of pooled places, into (2, U, stretches, C)."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    centre, slope, shift = _affine(mean, scale, bias, u, c, C, bias_stride)
    total = tl.zeros((R, T), dtype=tl.float32)
    along = tl.zeros((R, T), dtype=tl.float32)
    for step in range(0, stretch, R):
        q = tl.program_id(0) * stretch + step + tl.arange(0, R)
        inside, of_pooled, at = _places(u, q, c, Q, W, C)
        d, value, _ = _largest(x, at, inside, C, W, centre, slope, shift)
        gradient = tl.load(g + of_pooled, mask=inside, other=0)
        gradient = tl.where(value > 0, gradient, 0.0)
        total += gradient
        along += gradient * d
    kept(out, total, along, u, c, C)


@triton.jit
def _spread(
    x, g, mean, scale, bias, factors, out, Q, bias_stride,
    W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Write (x - mean) a + b, and + g c at the largest of four, for a, b and c in (3, U, C)."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    q = tl.program_id(0) * R + tl.arange(0, R)
    centre, slope, shift = _affine(mean, scale, bias, u, c, C, bias_stride)
    of, step = factors + u * C + c, tl.num_programs(2) * C
    a, b = tl.load(of, mask=c < C, other=0), tl.load(of + step, mask=c < C, other=0)
    by = tl.load(of + 2 * step, mask=c < C, other=0)
    inside, of_pooled, at = _places(u, q, c, Q, W, C)
    _, value, number = _largest(x, at, inside, C, W, centre, slope, shift)
    gradient = tl.load(g + of_pooled, mask=inside, other=0) * by[None, :]
    gradient = tl.where(value > 0, gradient, 0.0)
    for k in tl.static_range(0, 4):
        here = (k // 2 * W + k % 2) * C
        d, _ = _looked(x, at, inside, here, centre, slope, shift)
        dx = d * a[None, :] + b[None, :] + tl.where(number == k, gradient, 0.0)
        tl.store(out + at + here, dx, mask=inside)


@triton.jit
def _affine(mean, scale, bias, u, c, C: tl.constexpr, bias_stride):
    """Return a user's mean, scale and bias of the channels c."""
    of, inside = u * C + c, c < C
    shift = tl.load(bias + u * bias_stride + c, mask=inside, other=0)
    return tl.load(mean + of, mask=inside, other=0), tl.load(scale + of, mask=inside, other=0), shift


@triton.jit
def _places(u, q, c, Q, W: tl.constexpr, C: tl.constexpr):
    """Return for pooled places q and channels c: which exist, their offsets, and those of the first of their four."""
    inside = (q < Q)[:, None] & (c < C)[None, :]
    column, line = q % (W // 2), q // (W // 2)  # of all pictures, one under the other
    first = u * 4 * Q * C + (2 * line * W + 2 * column)[:, None] * C + c[None, :]
    return inside, u * Q * C + q[:, None] * C + c[None, :], first


@triton.jit
def _largest(x, at, inside, C: tl.constexpr, W: tl.constexpr, mean, scale, bias):
    """Return the first largest of four, minus the mean and normalised, and its number; NaN is larger than all."""
    d, value = _looked(x, at, inside, 0, mean, scale, bias)
    number = tl.zeros(value.shape, dtype=tl.int32)
    for k in tl.static_range(1, 4):
        other, normal = _looked(x, at, inside, (k // 2 * W + k % 2) * C, mean, scale, bias)
        larger = (normal > value) | (normal != normal)
        d, value = tl.where(larger, other, d), tl.where(larger, normal, value)
        number = tl.where(larger, k, number)
    return d, value, number


@triton.jit
def _looked(x, at, inside, step, mean, scale, bias):
    """Return an entry at some step from its corner: minus the mean, and normalised."""
    d = tl.load(x + at + step, mask=inside, other=0) - mean[None, :]
    return d, d * scale[None, :] + bias[None, :]
