"""Triton kernels of gradient_products.py: one pass over the gradients of many trials, each (lanes, n)."""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, STRETCH = 1024, 8192  # entries per loop step, and entries per program


@triton.jit
def _load(value, aim, mask, at, n, lane, MASKED: tl.constexpr):
    """Load entries of the value, 0 where they are not compared, and of the aim."""
    entries = tl.load(value + lane * n + at, mask=at < n, other=0)
    if MASKED:
        entries = tl.where(tl.load(mask + lane * n + at, mask=at < n, other=0) != 0, entries, 0.0)
    return entries, tl.load(aim + lane * n + at, mask=at < n, other=0)


@triton.jit
def _sum_kernel(value, aim, mask, out, n, MASKED: tl.constexpr, L: tl.constexpr, B: tl.constexpr):
    """Sum the three products over a stretch of entries, into (lanes, stretches, 3)."""
    lane = tl.program_id(1).to(tl.int64)
    dot = tl.zeros((B,), dtype=tl.float32)
    trial, target = dot, dot
    for step in range(0, L, B):
        entries, aims = _load(value, aim, mask, tl.program_id(0) * L + step + tl.arange(0, B), n, lane, MASKED)
        dot += entries * aims
        trial += entries * entries
        target += aims * aims
    into = out + (lane * tl.num_programs(0) + tl.program_id(0)) * 3
    tl.store(into, tl.sum(dot, 0))
    tl.store(into + 1, tl.sum(trial, 0))
    tl.store(into + 2, tl.sum(target, 0))


@triton.jit
def _pull_kernel(value, aim, mask, slopes, out, n, MASKED: tl.constexpr, B: tl.constexpr):
    lane, at = tl.program_id(1).to(tl.int64), tl.program_id(0) * B + tl.arange(0, B)
    entries, aims = _load(value, aim, mask, at, n, lane, MASKED)
    slope = tl.load(slopes + lane * 3) * aims + 2 * tl.load(slopes + lane * 3 + 1) * entries
    if MASKED:
        slope = tl.where(tl.load(mask + lane * n + at, mask=at < n, other=0) != 0, slope, 0.0)
    tl.store(out + lane * n + at, slope, mask=at < n)


def sum_products(value: Tensor, aim: Tensor, mask: Tensor | None) -> Tensor:
    """Return <value, aim>, |value|^2 and |aim|^2 of each lane, (lanes, 3); the mask selects the compared values."""
    lanes, n = len(value), value[0].numel()
    out = value.new_empty(lanes, triton.cdiv(n, STRETCH), 3)
    with torch.cuda.device_of(value):
        _sum_kernel[out.shape[1], lanes](*_pointers(value, aim, mask), out, n, mask is not None, STRETCH, BLOCK)
    return out.sum(1)


def pull_back(value: Tensor, aim: Tensor, mask: Tensor | None, slopes: Tensor) -> Tensor:
    """Return the slope by the value for slopes (lanes, 3) of the three products."""
    out, n = torch.empty_like(value, memory_format=torch.contiguous_format), value[0].numel()
    with torch.cuda.device_of(value):
        grid = triton.cdiv(n, BLOCK), len(value)
        _pull_kernel[grid](*_pointers(value, aim, mask), slopes.contiguous(), out, n, mask is not None, BLOCK)
    return out


def _pointers(value: Tensor, aim: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    value = value.contiguous()
    return value, aim.contiguous(), value if mask is None else mask.contiguous().view(torch.uint8)
