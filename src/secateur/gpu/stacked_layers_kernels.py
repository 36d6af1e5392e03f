"""Triton kernels of stacked_layers.py: convolutions as products of matrices that are never stored.

Pictures are (lanes, P, C): a lane's positions, picture by picture and line by line, by channels. Every position has
h * w * C inputs around it, tap by tap, which a product gathers when it needs them. Filters are (lanes, h * w * C, F).
One pass converts weights to filters, or back, and reads and writes contiguous memory. Sizes and channels are
compile-time constants, so that no position is computed by a division at run time.
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

INPUTS, OUTPUTS = 32, 128  # largest sides of a tile; its positions are those that were fastest on an H200
PROGRAMS = 4096  # for the gradient of the filters: many per multiprocessor of a GPU
SIDE, MOVED = 64, 2048  # largest side, and approximate number of weights, of a transposed tile


@triton.jit
def _load_patches(
    x, p, k, P, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, h: tl.constexpr, w: tl.constexpr
):  # fmt: skip
    """Load inputs k, a row, of the positions p, a column; 0 outside the picture."""
    tap = k // C
    down, right = tap // w - h // 2, tap % w - w // 2
    line, column = (p // W) % H + down, p % W + right
    inside = (p < P) & (k < h * w * C) & (line >= 0) & (line < H) & (column >= 0) & (column < W)
    return tl.load(x + (p + down * W + right) * C + k % C, mask=inside, other=0)


@triton.jit
def _convolve_kernel(
    x, filters, bias, out, P, F, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    BIAS: tl.constexpr, EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = h * w * C
    lane = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * M + tl.arange(0, M)
    o = tl.program_id(1) * N + tl.arange(0, N)
    total = tl.zeros((M, N), dtype=tl.float32)
    for start in range(0, K, R):
        k = start + tl.arange(0, R)
        inputs = _load_patches(x + lane * P * C, p[:, None], k[None, :], P, H, W, C, h, w)
        at = filters + lane * K * F + k[:, None] * F + o[None, :]
        weights = tl.load(at, mask=(k < K)[:, None] & (o < F)[None, :], other=0)
        total = tl.dot(inputs, weights, total, input_precision="ieee" if EXACT else "tf32")
    if BIAS:
        total += tl.load(bias + lane * F + o, mask=o < F, other=0)[None, :]
    into = out + lane * P * F + p[:, None] * F + o[None, :]
    tl.store(into, total, mask=(p < P)[:, None] & (o < F)[None, :])


@triton.jit
def _by_filters(
    g, x, out, P, F, stretch, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, h: tl.constexpr, w: tl.constexpr,
    EXACT: tl.constexpr, M: tl.constexpr, N: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Sum the gradient of the filters over a stretch of positions, into (stretches, lanes, K, F)."""
    K: tl.constexpr = h * w * C
    lane = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(F, N)
    k = tl.program_id(0) // tiles * R + tl.arange(0, R)
    o = tl.program_id(0) % tiles * N + tl.arange(0, N)
    total = tl.zeros((R, N), dtype=tl.float32)
    for step in range(0, stretch, M):
        p = tl.program_id(1) * stretch + step + tl.arange(0, M)
        inputs = _load_patches(x + lane * P * C, p[:, None], k[None, :], P, H, W, C, h, w)
        at = g + lane * P * F + p[:, None] * F + o[None, :]
        gradients = tl.load(at, mask=(p < P)[:, None] & (o < F)[None, :], other=0)
        total = tl.dot(tl.trans(inputs), gradients, total, input_precision="ieee" if EXACT else "tf32")
    into = out + ((tl.program_id(1) * tl.num_programs(2) + lane) * K + k[:, None]) * F + o[None, :]
    tl.store(into, total, mask=(k < K)[:, None] & (o < F)[None, :])


@triton.jit
def _by_tap(
    source, out, stride, C, F, T: tl.constexpr, BACK: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Transpose (F, C, T) of lanes `stride` apart to (T, C, F), or BACK; k and o are contiguous on one side each."""
    K = C * T
    lane = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) * R + tl.arange(0, R)
    o = tl.program_id(1) * N + tl.arange(0, N)
    inside = (k < K)[:, None] & (o < F)[None, :]
    by_filter = o[None, :] * K + k[:, None]
    by_tap = (k % T * C + k // T)[:, None] * F + o[None, :]
    source += lane * stride
    out += lane * K * F
    if BACK:
        tl.store(out + by_filter, tl.load(source + by_tap, mask=inside), mask=inside)
    else:
        tl.store(out + by_tap, tl.load(source + by_filter, mask=inside), mask=inside)


@triton.jit
def _transpose_kernel(weight, out, stride, Q, T: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """Transpose (Q, T) of lanes `stride` apart to (T, Q), the last tap first, which rotates a filter by 180 degrees."""
    lane = tl.program_id(1).to(tl.int64)
    q, tap = (tl.program_id(0) * R + tl.arange(0, R))[:, None], tl.arange(0, N)[None, :]
    inside = (q < Q) & (tap < T)
    value = tl.load(weight + lane * stride + q * T + tap, mask=inside)
    tl.store(out + lane * Q * T + (T - 1 - tap) * Q + q, value, mask=inside)


def by_tap(weight: Tensor) -> Tensor:
    """Return weight (lanes, F, C, h, w) as filters (lanes, h * w * C, F)."""
    weight = _make_contiguous(weight)
    (lanes, F, C), taps = weight.shape[:3], prod(weight.shape[3:])
    return _transpose(weight, weight.new_empty(lanes, taps * C, F), C, F, taps, back=False)


def transpose_filters(weight: Tensor) -> Tensor:
    """Return weight (lanes, F, C, h, w) as filters (lanes, h * w * F, C) from the outputs back to the inputs."""
    weight = _make_contiguous(weight)
    (lanes, F, C), taps = weight.shape[:3], prod(weight.shape[3:])
    out = weight.new_empty(lanes, taps * F, C)
    N = triton.next_power_of_2(taps)
    R = max(16, MOVED // N)
    with torch.cuda.device_of(weight):
        _transpose_kernel[triton.cdiv(F * C, R), lanes](weight, out, weight.stride(0), F * C, taps, R, N)
    return out


def to_weights(filters: Tensor, taps: Sequence[int]) -> Tensor:
    """Return filters (lanes, h * w * C, F) as weights (lanes, F, C, h, w), in the memory order of the weights."""
    lanes, K, F = filters.shape
    C = K // prod(taps)
    return _transpose(filters, filters.new_empty(lanes, F, C, *taps), C, F, prod(taps), back=True)


def _transpose(source: Tensor, out: Tensor, C: int, F: int, taps: int, back: bool) -> Tensor:
    N = _tile(F, SIDE)
    R = _tile(taps * C, max(SIDE, MOVED // N))
    grid = triton.cdiv(taps * C, R), triton.cdiv(F, N), len(source)
    with torch.cuda.device_of(source):
        _by_tap[grid](source, out, source.stride(0), C, F, taps, back, R, N)
    return out


def _make_contiguous(weight: Tensor) -> Tensor:
    """Return the weights with every lane contiguous; lanes may have any stride, also 0."""
    return weight if weight[0].is_contiguous() else weight.contiguous()


def convolve(x: Tensor, filters: Tensor, bias: Tensor | None, size: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Convolve x (lanes, P, C), pictures of `size`, with filters (lanes, taps * C, F); return (lanes, P, F).

    The bias is (lanes, F).
    """
    (lanes, P, C), (_, K, F) = x.shape, filters.shape
    out = x.new_empty(lanes, P, F)
    N = _tile(F, OUTPUTS)
    positions, warps = (64, 2) if N > 16 else (128, 4)
    grid = triton.cdiv(P, positions), triton.cdiv(F, N), lanes
    arguments = x, filters, filters if bias is None else bias, out, P, F, *size, C, *taps
    with torch.cuda.device_of(x):
        _convolve_kernel[grid](
            *arguments, bias is not None, _is_exact(), positions, N, _tile(K, INPUTS), num_warps=warps
        )
    return out


def by_filters(g: Tensor, x: Tensor, size: Sequence[int], taps: Sequence[int]) -> Tensor:
    """Return the gradient of the weights, (lanes, F, C, h, w), from the gradient g of the output of `convolve`."""
    (lanes, P, F), C = g.shape, x.shape[2]
    K, positions = C * taps[0] * taps[1], 64
    R, N = _tile(K, INPUTS), _tile(F, OUTPUTS // 2)
    tiles = triton.cdiv(K, R) * triton.cdiv(F, N)
    steps = triton.cdiv(P, positions)
    stretch = positions * triton.cdiv(steps, max(1, min(steps, PROGRAMS // (lanes * tiles))))
    out = x.new_empty(triton.cdiv(P, stretch), lanes, K, F)
    with torch.cuda.device_of(x):
        _by_filters[tiles, len(out), lanes](g, x, out, P, F, stretch, *size, C, *taps, _is_exact(), positions, N, R)
    return to_weights(out.sum(0) if len(out) > 1 else out[0], taps)


def _tile(size: int, most: int) -> int:
    """Return a tile's side: a power of 2, at least 16, the minimum of tl.dot, and at most `most`."""
    width: int = max(16, min(most, triton.next_power_of_2(size)))
    return width


def _is_exact() -> bool:
    return not torch.backends.cuda.matmul.allow_tf32
