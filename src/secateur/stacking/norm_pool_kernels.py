"""Triton kernels of BatchNorm, ReLU and the largest of every two by two as one layer, as those of batchnorm_kernels.py.

Only a quarter is written on the way, and read on the way back; which of four was the largest is found again there.
x is (U, P, C), of pictures with an even number of lines and `width` columns; what is pooled is (U, P / 4, C).
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from secateur.stacking.batchnorm_kernels import PROGRAMS, factored, kept, measured, tile_of


@triton.jit
def _places(u, q, c, Q, W: tl.constexpr, C: tl.constexpr):
    """Of pooled places q and channels c: which there are, where they lie, and where the first of each one's four."""
    inside = (q < Q)[:, None] & (c < C)[None, :]
    column, line = q % (W // 2), q // (W // 2)  # of all pictures, one under the other
    first = u * 4 * Q * C + (2 * line * W + 2 * column)[:, None] * C + c[None, :]
    return inside, u * Q * C + q[:, None] * C + c[None, :], first


@triton.jit
def _looked(x, at, inside, step, mean, scale, bias):
    """An entry at some step from its corner: less the mean, and normalised."""
    d = tl.load(x + at + step, mask=inside, other=0) - mean[None, :]
    return d, d * scale[None, :] + bias[None, :]


@triton.jit
def _largest(x, at, inside, C: tl.constexpr, W: tl.constexpr, mean, scale, bias):
    """The first of the largest of four, less the mean and normalised, and its number; NaN is larger than all."""
    d, value = _looked(x, at, inside, 0, mean, scale, bias)
    number = tl.zeros(value.shape, dtype=tl.int32)
    for k in tl.static_range(1, 4):
        other, normal = _looked(x, at, inside, (k // 2 * W + k % 2) * C, mean, scale, bias)
        larger = (normal > value) | (normal != normal)
        d, value = tl.where(larger, other, d), tl.where(larger, normal, value)
        number = tl.where(larger, k, number)
    return d, value, number


@triton.jit
def _given(mean, scale, bias, u, c, C: tl.constexpr, bias_stride):
    of, inside = u * C + c, c < C
    shift = tl.load(bias + u * bias_stride + c, mask=inside, other=0)
    return tl.load(mean + of, mask=inside, other=0), tl.load(scale + of, mask=inside, other=0), shift


@triton.jit
def _pooled(
    x, mean, scale, bias, out, Q, bias_stride,
    W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    q = tl.program_id(0) * R + tl.arange(0, R)
    centre, slope, shift = _given(mean, scale, bias, u, c, C, bias_stride)
    inside, of_pooled, at = _places(u, q, c, Q, W, C)
    _, value, _ = _largest(x, at, inside, C, W, centre, slope, shift)
    tl.store(out + of_pooled, tl.where(value < 0, 0.0, value), mask=inside)


@triton.jit
def _summed(
    x, g, mean, scale, bias, out, Q, bias_stride, stretch,
    W: tl.constexpr, C: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Over a stretch of pooled places: the sums of g and of g (x - mean), into (2, U, stretches, C)."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    centre, slope, shift = _given(mean, scale, bias, u, c, C, bias_stride)
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
    """(x - mean) a + b, and + g c at the largest of four, for a, b and c in (3, U, C)."""
    u = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * T + tl.arange(0, T)
    q = tl.program_id(0) * R + tl.arange(0, R)
    centre, slope, shift = _given(mean, scale, bias, u, c, C, bias_stride)
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
        found = d * a[None, :] + b[None, :] + tl.where(number == k, gradient, 0.0)
        tl.store(out + at + here, found, mask=inside)


def pooled(x: Tensor, weight: Tensor, bias: Tensor, eps: float, width: int) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(U, P / 4, C) for weight and bias (U, C), and mean, variance, 1 / deviation and scale, (U, C) each."""
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
    """The gradients with respect to x, weight and bias by g (U, P / 4, C)."""
    (U, P, C), (R, T) = x.shape, tile_of(x)
    Q, tiles = P // 4, triton.cdiv(C, T)
    stretch = max(R, triton.next_power_of_2(Q * U * tiles // PROGRAMS))
    out, sums = torch.empty_like(x), x.new_empty(2, U, triton.cdiv(Q, stretch), C)
    given = Q, bias.stride(0)
    with torch.cuda.device_of(x):
        _summed[sums.shape[2], tiles, U](x, g, mean, scale, bias, sums, *given, stretch, width, C, R, T)
        found = factored(sums, x, inverse, scale)
        grid = triton.cdiv(Q, R), tiles, U
        _spread[grid](x, g, mean, scale, bias, found, out, *given, width, C, R, T)
    return out, found[3], found[4]
