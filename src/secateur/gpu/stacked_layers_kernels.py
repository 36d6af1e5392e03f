"""Triton kernels of stacked_layers.py: convolutions as products of matrices that are never written down.

Pictures are rows (lanes, P, C): a lane's places, picture by picture and line by line, by channels. Around a place lie
h * w * C inputs, tap by tap; they are gathered where a product needs them. Filters are (lanes, h * w * C, F) there: one
pass over the weights lays them so, or one back, that reads and writes memory in runs. Sizes and channels are known when
a kernel is made, so that no place is found by dividing.
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

INPUTS, OUTPUTS = 32, 128  # most of a tile; it has as many places as were fastest on an H200
PROGRAMS = 4096  # that share the gradient of the filters: many for each of a GPU's processors
SIDE, MOVED = 64, 2048  # most of a side, and about how many weights, of a tile that is laid otherwise


@triton.jit
def _around(
    x, p, k, P, H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, h: tl.constexpr, w: tl.constexpr
):  # fmt: skip
    """Inputs k, a row, of the places p, a column; 0 outside of the picture."""
    tap = k // C
    down, right = tap // w - h // 2, tap % w - w // 2
    line, column = (p // W) % H + down, p % W + right
    inside = (p < P) & (k < h * w * C) & (line >= 0) & (line < H) & (column >= 0) & (column < W)
    return tl.load(x + (p + down * W + right) * C + k % C, mask=inside, other=0)


@triton.jit
def _convolved(
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
        inputs = _around(x + lane * P * C, p[:, None], k[None, :], P, H, W, C, h, w)
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
    """Over a stretch of places, into (stretches, lanes, K, F)."""
    K: tl.constexpr = h * w * C
    lane = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(F, N)
    k = tl.program_id(0) // tiles * R + tl.arange(0, R)
    o = tl.program_id(0) % tiles * N + tl.arange(0, N)
    total = tl.zeros((R, N), dtype=tl.float32)
    for step in range(0, stretch, M):
        p = tl.program_id(1) * stretch + step + tl.arange(0, M)
        inputs = _around(x + lane * P * C, p[:, None], k[None, :], P, H, W, C, h, w)
        at = g + lane * P * F + p[:, None] * F + o[None, :]
        gradients = tl.load(at, mask=(p < P)[:, None] & (o < F)[None, :], other=0)
        total = tl.dot(tl.trans(inputs), gradients, total, input_precision="ieee" if EXACT else "tf32")
    into = out + ((tl.program_id(1) * tl.num_programs(2) + lane) * K + k[:, None]) * F + o[None, :]
    tl.store(into, total, mask=(k < K)[:, None] & (o < F)[None, :])


@triton.jit
def _by_tap(
    given, out, stride, C, F, T: tl.constexpr, BACK: tl.constexpr, R: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """(F, C, T) of lanes that lie `stride` apart to (T, C, F), or back: one side runs along k, the other along o."""
    K = C * T
    lane = tl.program_id(2).to(tl.int64)
    k = tl.program_id(0) * R + tl.arange(0, R)
    o = tl.program_id(1) * N + tl.arange(0, N)
    inside = (k < K)[:, None] & (o < F)[None, :]
    by_filter = o[None, :] * K + k[:, None]
    by_tap = (k % T * C + k // T)[:, None] * F + o[None, :]
    given += lane * stride
    out += lane * K * F
    if BACK:
        tl.store(out + by_filter, tl.load(given + by_tap, mask=inside), mask=inside)
    else:
        tl.store(out + by_tap, tl.load(given + by_filter, mask=inside), mask=inside)


@triton.jit
def _turned(weight, out, stride, Q, T: tl.constexpr, R: tl.constexpr, N: tl.constexpr):
    """(Q, T) of lanes that lie `stride` apart to (T, Q), the last tap first: so a filter is turned."""
    lane = tl.program_id(1).to(tl.int64)
    q, tap = (tl.program_id(0) * R + tl.arange(0, R))[:, None], tl.arange(0, N)[None, :]
    inside = (q < Q) & (tap < T)
    value = tl.load(weight + lane * stride + q * T + tap, mask=inside)
    tl.store(out + lane * Q * T + (T - 1 - tap) * Q + q, value, mask=inside)


def by_tap(weight: Tensor) -> Tensor:
    """(lanes, h * w * C, F) of weight (lanes, F, C, h, w)."""
    weight = _lying(weight)
    (lanes, F, C), taps = weight.shape[:3], prod(weight.shape[3:])
    return _laid(weight, weight.new_empty(lanes, taps * C, F), C, F, taps, back=False)


def turned(weight: Tensor) -> Tensor:
    """(lanes, h * w * F, C) of weight (lanes, F, C, h, w): filters that lead back from the outputs to the inputs."""
    weight = _lying(weight)
    (lanes, F, C), taps = weight.shape[:3], prod(weight.shape[3:])
    out = weight.new_empty(lanes, taps * F, C)
    N = triton.next_power_of_2(taps)
    R = max(16, MOVED // N)
    with torch.cuda.device_of(weight):
        _turned[triton.cdiv(F * C, R), lanes](weight, out, weight.stride(0), F * C, taps, R, N)
    return out


def as_weights(found: Tensor, taps: Sequence[int]) -> Tensor:
    """(lanes, F, C, h, w) of found (lanes, h * w * C, F): they lie as the weights do, so all that follows is fast."""
    lanes, K, F = found.shape
    C = K // prod(taps)
    return _laid(found, found.new_empty(lanes, F, C, *taps), C, F, prod(taps), back=True)


def _laid(given: Tensor, out: Tensor, C: int, F: int, taps: int, back: bool) -> Tensor:
    N = _tile(F, SIDE)
    R = _tile(taps * C, max(SIDE, MOVED // N))
    grid = triton.cdiv(taps * C, R), triton.cdiv(F, N), len(given)
    with torch.cuda.device_of(given):
        _by_tap[grid](given, out, given.stride(0), C, F, taps, back, R, N)
    return out


def _lying(weight: Tensor) -> Tensor:
    """As it is where every lane's lie in one run; lanes may be apart, or all the same."""
    return weight if weight[0].is_contiguous() else weight.contiguous()


def convolved(x: Tensor, filters: Tensor, bias: Tensor | None, size: Sequence[int], taps: Sequence[int]) -> Tensor:
    """(lanes, P, F) of x (lanes, P, C), pictures of `size`, with filters (lanes, taps * C, F) and bias (lanes, F)."""
    (lanes, P, C), (_, K, F) = x.shape, filters.shape
    out = x.new_empty(lanes, P, F)
    N = _tile(F, OUTPUTS)
    places, warps = (64, 2) if N > 16 else (128, 4)
    grid = triton.cdiv(P, places), triton.cdiv(F, N), lanes
    given = x, filters, filters if bias is None else bias, out, P, F, *size, C, *taps
    with torch.cuda.device_of(x):
        _convolved[grid](*given, bias is not None, _exact(), places, N, _tile(K, INPUTS), num_warps=warps)
    return out


def by_filters(g: Tensor, x: Tensor, size: Sequence[int], taps: Sequence[int]) -> Tensor:
    """(lanes, F, C, h, w) the gradient of the filters by g, that of what `convolved` made of x."""
    (lanes, P, F), C = g.shape, x.shape[2]
    K, places = C * taps[0] * taps[1], 64
    R, N = _tile(K, INPUTS), _tile(F, OUTPUTS // 2)
    tiles = triton.cdiv(K, R) * triton.cdiv(F, N)
    steps = triton.cdiv(P, places)
    stretch = places * triton.cdiv(steps, max(1, min(steps, PROGRAMS // (lanes * tiles))))
    out = x.new_empty(triton.cdiv(P, stretch), lanes, K, F)
    with torch.cuda.device_of(x):
        _by_filters[tiles, len(out), lanes](g, x, out, P, F, stretch, *size, C, *taps, _exact(), places, N, R)
    return as_weights(out.sum(0) if len(out) > 1 else out[0], taps)


def _tile(size: int, most: int) -> int:
    """A power of 2 from 16, the least of a product."""
    width: int = max(16, min(most, triton.next_power_of_2(size)))
    return width


def _exact() -> bool:
    return not torch.backends.cuda.matmul.allow_tf32
