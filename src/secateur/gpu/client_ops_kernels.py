"""Triton kernels of client_ops.py: every one passes over the memory once.

All tensors are rows, one a lane, whose entries lie end to end; a stride of 0 is one row that all lanes share. Flags are
read by four where rows are that far apart: were it sixteen, as bytes could be, threads would read their floats apart.
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # entries of a program


@triton.jit
def _copied(source, into, of, to, n, source_stride, into_stride, OF: tl.constexpr, TO: tl.constexpr, B: tl.constexpr):
    """OF and TO: lanes read and write rows of these numbers, else each its own."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    first = tl.load(of + lane).to(tl.int64) if OF else lane
    second = tl.load(to + lane).to(tl.int64) if TO else lane
    value = tl.load(source + first * source_stride + at, mask=at < n)
    tl.store(into + second * into_stride + at, value, mask=at < n)


@triton.jit
def _added(total, values, weights, n, stride, lanes, SQUARED: tl.constexpr, B: tl.constexpr):
    """What weighs 0 is not read, and so adds nothing whatever it is."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    found = tl.load(total + at, mask=at < n)
    row = values + at
    for lane in range(0, lanes):
        weight = tl.load(weights + lane)
        value = tl.load(row, mask=at < tl.where(weight != 0, n, 0), other=0).to(found.dtype)
        found += weight * (value * value if SQUARED else value)
        row += stride
    tl.store(total + at, found, mask=at < n)


@triton.jit
def _looked(values, astray, sizes, n, stride, into_stride, SIZE: tl.constexpr, SQUARED: tl.constexpr, B: tl.constexpr):
    """Whether the sum of a program's entries is not finite, and the bytes of those that are not 0."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    value = tl.load(values + lane * stride + at, mask=at < n, other=0)
    value = value * value if SQUARED else value
    into = lane * into_stride + tl.program_id(0)
    finite = tl.abs(tl.sum(value, 0)) < float("inf")
    tl.store(astray + into, tl.where(finite, 0, 1))
    tl.store(sizes + into, tl.sum((value != 0).to(tl.int32), 0) * SIZE)


@triton.jit(do_not_specialize=["fours", "kept_fours"])
def _mixed(
    where, values, others, keep, into, n, stride, fours, W: tl.constexpr, kept_fours, KEPT_W: tl.constexpr,
    MASKED: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    value = tl.load(values + lane * stride + at, mask=at < n)
    other = tl.load(others + at, mask=at < n)
    found = tl.where(chosen, value, other)
    if MASKED:
        found = tl.where(tl.load(keep + lane * kept_fours * KEPT_W + at, mask=at < n, other=0) != 0, found, 0.0)
    tl.store(into + lane * n + at, found, mask=at < n)


@triton.jit(do_not_specialize=["fours"])
def _parted(where, values, inside, outside, n, fours, stride, W: tl.constexpr, BOTH: tl.constexpr, B: tl.constexpr):
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    value = tl.load(values + lane * stride + at, mask=at < n)
    tl.store(outside + lane * n + at, tl.where(chosen, 0.0, value), mask=at < n)
    if BOTH:
        tl.store(inside + lane * n + at, tl.where(chosen, value, 0.0), mask=at < n)


@triton.jit(do_not_specialize=["fours"])
def _erased(where, values, n, fours, stride, W: tl.constexpr, B: tl.constexpr):
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    row = values + lane * stride + at
    tl.store(row, tl.where(chosen, 0.0, tl.load(row, mask=at < n)), mask=at < n)  # parts of a sector are no faster


@triton.jit(do_not_specialize=["fours"])
def _descended(
    where, values, slopes, n, fours, stride, slope_stride, W: tl.constexpr, STEP: tl.constexpr, B: tl.constexpr
):
    """One fma, which nvcc makes of torch's value + alpha * slope too. STEP is a constant: an argument is a float32."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    row = values + lane * stride + at
    value = tl.load(row, mask=at < n)
    slope = tl.load(slopes + lane * slope_stride + at, mask=at < n)
    found = tl.fma(tl.full((B,), STEP, value.dtype), slope, value)
    tl.store(row, tl.where(chosen, 0.0, found), mask=at < n)


@triton.jit
def _joined(where, keep, into, n, stride, keep_stride, INVERTED: tl.constexpr, B: tl.constexpr):
    """All of these are bytes, so that threads may read sixteen."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    said = tl.load(where + lane * stride + at, mask=at < n, other=0)
    chosen = said == 0 if INVERTED else said != 0
    kept = tl.load(keep + lane * keep_stride + at, mask=at < n, other=0) != 0
    tl.store(into + lane * n + at, (chosen & kept).to(tl.uint8), mask=at < n)


@triton.jit(do_not_specialize=["fours"])
def _sized(values, keep, into, n, stride, into_stride, fours, W: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr):
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    found = tl.abs(tl.load(values + lane * stride + at, mask=at < n))
    if MASKED:
        found = tl.where(tl.load(keep + lane * fours * W + at, mask=at < n, other=0) != 0, found, -1.0)
    tl.store(into + lane * into_stride + at, found, mask=at < n)


def rows_at(held: Tensor, places: Tensor) -> Tensor:
    """(lanes, ...) the rows of these numbers."""
    into = held.new_empty(len(places), *held.shape[1:])
    _copy(held, into, len(places), of=places)
    return into


def put_rows(held: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write the rows to these numbers; of equal numbers any one is left."""
    _copy(rows, held, len(places), to=places)


def copies(value: Tensor, count: int) -> Tensor:
    """(count, ...) copies."""
    into = value.new_empty(count, *value.shape)
    _copy(value.expand_as(into), into, count)
    return into


def add_weighted(total: Tensor, values: Tensor, weights: Tensor, squared: bool) -> None:
    """Add the lanes' values by their weights, or the squares of them."""
    (rows, stride), n = _rows(values), total.numel()
    weights, block = weights.to(total.dtype).contiguous(), BLOCK // 4  # so many programs as fill a GPU
    if n:
        with torch.cuda.device_of(total):
            _added[(triton.cdiv(n, block),)](total, rows, weights, n, stride, len(weights), squared, block)


def looked(parts: Sequence[tuple[Tensor, bool]]) -> tuple[Tensor, Tensor]:
    """(lanes,) whether all entries are finite, or their squares, and the bytes of those that are not 0."""
    numbers = [value[0].numel() for value, _ in parts]
    programs = [triton.cdiv(n, BLOCK) for n in numbers]
    found = parts[0][0].new_empty(2, len(parts[0][0]), sum(programs), dtype=torch.int32)
    places = zip(*(each.split(programs, 1) for each in found), strict=True)
    for (value, squared), n, into in zip(parts, numbers, places, strict=True):
        rows, stride = _rows(value)
        _each(_looked, value, rows, *into, n, stride, found.shape[2], value.element_size(), squared)
    astray, sizes = found.sum(2)
    return astray == 0, sizes


def mixed(where: Tensor, values: Tensor, others: Tensor, keep: Tensor | None) -> Tensor:
    """(lanes, ...) the values where this is said, else the others, which are the same for all; 0 where not kept."""
    into = values.new_empty(values.shape)
    (flags, *fours), (rows, stride) = _flags(where), _rows(values)
    kept, *kept_fours = (flags, 0, 1) if keep is None else _flags(keep.expand_as(values))
    given = (flags, rows, others.contiguous(), kept, into, others.numel(), stride)
    _each(_mixed, into, *given, *fours, *kept_fours, keep is not None)
    return into


def parted(where: Tensor, values: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """(lanes, ...) the values with zeros but where this is said, unless it is not `both`; and with zeros there."""
    outside = values.new_empty(values.shape)
    inside = torch.empty_like(outside) if both else outside
    (flags, *fours), (rows, stride) = _flags(where), _rows(values)
    _each(_parted, outside, flags, rows, inside, outside, outside[0].numel(), fours[0], stride, fours[1], both)
    return inside, outside


def erase(where: Tensor, values: Tensor) -> None:
    """Set the values to 0 where this is said, which may be shared."""
    flags, fours, wide = _flags(where.expand_as(values))
    _each(_erased, values, flags, values, values[0].numel(), fours, values.stride(0), wide)


def descend(values: Tensor, slopes: Tensor, rate: float, where: Tensor) -> None:
    """A step of -rate * slopes, and 0 where this is said, which may be shared."""
    (flags, fours, wide), (rows, stride) = _flags(where.expand_as(values)), _rows(slopes)
    _each(_descended, values, flags, values, rows, values[0].numel(), fours, values.stride(0), stride, wide, -rate)


def both(where: Tensor, keep: Tensor, inverted: bool) -> Tensor:
    """(lanes, ...) where this is said, or not where it is `inverted`, and kept."""
    into = torch.empty(where.shape, dtype=torch.bool, device=where.device)
    (rows, stride), (kept, keep_stride) = _rows(where), _rows(keep)
    _each(_joined, into, rows, kept, into.view(torch.uint8), into[0].numel(), stride, keep_stride, inverted)
    return into


def magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    """(lanes, N) the tensors without their signs end to end, -1 where they are not kept."""
    sizes = [value[0].numel() for value in values]
    into = values[0].new_empty(len(values[0]), sum(sizes))
    for i, part in enumerate(into.split(sizes, 1)):
        rows, stride = _rows(values[i])
        keep, *fours = _flags(keeps[i]) if keeps else (rows, 0, 1)
        _each(_sized, part, rows, keep, part, sizes[i], stride, part.stride(0), *fours, bool(keeps))
    return into


def _copy(source: Tensor, into: Tensor, lanes: int, of: Tensor | None = None, to: Tensor | None = None) -> None:
    (rows, stride), (target, into_stride) = _rows(source), _rows(into)
    numbers = [rows if each is None else each.contiguous() for each in (of, to)]
    given = (rows, target, *numbers, into[0].numel(), stride, into_stride, of is not None, to is not None)
    _each(_copied, into[:1].expand(lanes, *into.shape[1:]), *given)


def _each(kernel, like: Tensor, *given: object) -> None:
    """Run a kernel over every lane's entries."""
    if like.numel():
        with torch.cuda.device_of(like):
            kernel[triton.cdiv(like[0].numel(), BLOCK), len(like)](*given, BLOCK)


def _flags(value: Tensor) -> tuple[Tensor, int, int]:
    """The same of flags, the distance as a multiple of four where it is one, and that four."""
    rows, stride = _rows(value)
    wide = 4 if stride % 4 == 0 else 1
    return rows, stride // wide, wide


def _rows(value: Tensor) -> tuple[Tensor, int]:
    """A tensor whose rows' entries lie end to end, and how far apart the rows are."""
    value = value if value[0].is_contiguous() else value.contiguous()
    return value.view(torch.uint8) if value.dtype == torch.bool else value, value.stride(0)
