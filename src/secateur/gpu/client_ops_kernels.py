"""Triton kernels of client_ops.py: each kernel passes over the memory once.

Every tensor is one contiguous row per lane; a stride of 0 is one row that all lanes share. Masks are bytes, called
flags here, and are read four at a time if the row stride is a multiple of four. Reads of sixteen bytes would be
possible, but would make each thread's reads of floats non-contiguous.
"""

# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # entries per program


@triton.jit
def _copy_kernel(
    source, into, of, to, n, source_stride, into_stride, OF: tl.constexpr, TO: tl.constexpr, B: tl.constexpr
):
    """Copy rows. If OF (or TO), lanes read (or write) the rows at the indices `of` (or `to`), else their own rows."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    first = tl.load(of + lane).to(tl.int64) if OF else lane
    second = tl.load(to + lane).to(tl.int64) if TO else lane
    value = tl.load(source + first * source_stride + at, mask=at < n)
    tl.store(into + second * into_stride + at, value, mask=at < n)


@triton.jit
def _add_kernel(total, values, weights, n, stride, lanes, SQUARED: tl.constexpr, B: tl.constexpr):
    """Add weighted lanes to the total. Lanes of weight 0 are not read, so that even NaN adds nothing."""
    at = tl.program_id(0) * B + tl.arange(0, B)
    acc = tl.load(total + at, mask=at < n)
    row = values + at
    for lane in range(0, lanes):
        weight = tl.load(weights + lane)
        value = tl.load(row, mask=at < tl.where(weight != 0, n, 0), other=0).to(acc.dtype)
        acc += weight * (value * value if SQUARED else value)
        row += stride
    tl.store(total + at, acc, mask=at < n)


@triton.jit
def _check_kernel(
    values, bad, sizes, n, stride, into_stride, SIZE: tl.constexpr, SQUARED: tl.constexpr, B: tl.constexpr
):
    """Store 1 if the sum of a program's entries is not finite, and the bytes of the non-zero entries."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    value = tl.load(values + lane * stride + at, mask=at < n, other=0)
    value = value * value if SQUARED else value
    into = lane * into_stride + tl.program_id(0)
    finite = tl.abs(tl.sum(value, 0)) < float("inf")
    tl.store(bad + into, tl.where(finite, 0, 1))
    tl.store(sizes + into, tl.sum((value != 0).to(tl.int32), 0) * SIZE)


@triton.jit(do_not_specialize=["fours", "kept_fours"])
def _mix_kernel(
    where, values, others, keep, into, n, stride, fours, W: tl.constexpr, kept_fours, KEPT_W: tl.constexpr,
    MASKED: tl.constexpr, B: tl.constexpr
):  # fmt: skip
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    value = tl.load(values + lane * stride + at, mask=at < n)
    other = tl.load(others + at, mask=at < n)
    result = tl.where(chosen, value, other)
    if MASKED:
        result = tl.where(tl.load(keep + lane * kept_fours * KEPT_W + at, mask=at < n, other=0) != 0, result, 0.0)
    tl.store(into + lane * n + at, result, mask=at < n)


@triton.jit(do_not_specialize=["fours"])
def _split_kernel(
    where, values, inside, outside, n, fours, stride, W: tl.constexpr, BOTH: tl.constexpr, B: tl.constexpr
):
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    value = tl.load(values + lane * stride + at, mask=at < n)
    tl.store(outside + lane * n + at, tl.where(chosen, 0.0, value), mask=at < n)
    if BOTH:
        tl.store(inside + lane * n + at, tl.where(chosen, value, 0.0), mask=at < n)


@triton.jit(do_not_specialize=["fours"])
def _erase_kernel(where, values, n, fours, stride, W: tl.constexpr, B: tl.constexpr):
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    row = values + lane * stride + at
    tl.store(row, tl.where(chosen, 0.0, tl.load(row, mask=at < n)), mask=at < n)  # partial sectors: no faster


@triton.jit(do_not_specialize=["fours"])
def _descend_kernel(
    where, values, slopes, n, fours, stride, slope_stride, W: tl.constexpr, STEP: tl.constexpr, B: tl.constexpr
):
    """Step by one fma, to which nvcc compiles torch's value + alpha * slope too.

    STEP is a constant, because Triton passes a float argument as float32.
    """
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    chosen = tl.load(where + lane * fours * W + at, mask=at < n, other=0) != 0
    row = values + lane * stride + at
    value = tl.load(row, mask=at < n)
    slope = tl.load(slopes + lane * slope_stride + at, mask=at < n)
    result = tl.fma(tl.full((B,), STEP, value.dtype), slope, value)
    tl.store(row, tl.where(chosen, 0.0, result), mask=at < n)


@triton.jit
def _intersect_kernel(where, keep, into, n, stride, keep_stride, INVERTED: tl.constexpr, B: tl.constexpr):
    """Combine two masks. All tensors are bytes, so that a thread may read sixteen at once."""
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    flag = tl.load(where + lane * stride + at, mask=at < n, other=0)
    chosen = flag == 0 if INVERTED else flag != 0
    kept = tl.load(keep + lane * keep_stride + at, mask=at < n, other=0) != 0
    tl.store(into + lane * n + at, (chosen & kept).to(tl.uint8), mask=at < n)


@triton.jit(do_not_specialize=["fours"])
def _size_kernel(
    values, keep, into, n, stride, into_stride, fours, W: tl.constexpr, MASKED: tl.constexpr, B: tl.constexpr
):
    at, lane = tl.program_id(0) * B + tl.arange(0, B), tl.program_id(1).to(tl.int64)
    result = tl.abs(tl.load(values + lane * stride + at, mask=at < n))
    if MASKED:
        result = tl.where(tl.load(keep + lane * fours * W + at, mask=at < n, other=0) != 0, result, -1.0)
    tl.store(into + lane * into_stride + at, result, mask=at < n)


def rows_at(held: Tensor, places: Tensor) -> Tensor:
    """Return the rows at these indices, (lanes, ...)."""
    into = held.new_empty(len(places), *held.shape[1:])
    _copy(held, into, len(places), of=places)
    return into


def put_rows(held: Tensor, places: Tensor, rows: Tensor) -> None:
    """Write the rows to these indices; for a repeated index any one row remains."""
    _copy(rows, held, len(places), to=places)


def copies(value: Tensor, count: int) -> Tensor:
    """Return copies, (count, ...)."""
    into = value.new_empty(count, *value.shape)
    _copy(value.expand_as(into), into, count)
    return into


def add_weighted(total: Tensor, values: Tensor, weights: Tensor, squared: bool) -> None:
    """Add the lanes' values, or their squares, times the lanes' weights to `total`."""
    (rows, stride), n = _rows(values), total.numel()
    weights, block = weights.to(total.dtype).contiguous(), BLOCK // 4  # smaller blocks: enough programs to fill a GPU
    if n:
        with torch.cuda.device_of(total):
            _add_kernel[(triton.cdiv(n, block),)](total, rows, weights, n, stride, len(weights), squared, block)


def check_finite(parts: Sequence[tuple[Tensor, bool]]) -> tuple[Tensor, Tensor]:
    """Return per lane True if all entries, or their squares, are finite, and the bytes of the non-zero ones."""
    numbers = [value[0].numel() for value, _ in parts]
    programs = [triton.cdiv(n, BLOCK) for n in numbers]
    counts = parts[0][0].new_empty(2, len(parts[0][0]), sum(programs), dtype=torch.int32)
    outputs = zip(*(count.split(programs, 1) for count in counts), strict=True)
    for (value, squared), n, into in zip(parts, numbers, outputs, strict=True):
        rows, stride = _rows(value)
        _run_lanes(_check_kernel, value, rows, *into, n, stride, counts.shape[2], value.element_size(), squared)
    nonfinite, sizes = counts.sum(2)
    return nonfinite == 0, sizes


def mix(where: Tensor, values: Tensor, others: Tensor, keep: Tensor | None) -> Tensor:
    """Return the values (lanes, ...) where `where` is True, else the shared `others`; 0 where not kept."""
    into = values.new_empty(values.shape)
    (flags, *fours), (rows, stride) = _flags(where), _rows(values)
    kept, *kept_fours = (flags, 0, 1) if keep is None else _flags(keep.expand_as(values))
    arguments = (flags, rows, others.contiguous(), kept, into, others.numel(), stride)
    _run_lanes(_mix_kernel, into, *arguments, *fours, *kept_fours, keep is not None)
    return into


def split_where(where: Tensor, values: Tensor, both: bool) -> tuple[Tensor, Tensor]:
    """Return the values (lanes, ...) with zeros outside `where` (only with `both`), and with zeros inside."""
    outside = values.new_empty(values.shape)
    inside = torch.empty_like(outside) if both else outside
    (flags, *fours), (rows, stride) = _flags(where), _rows(values)
    _run_lanes(
        _split_kernel, outside, flags, rows, inside, outside, outside[0].numel(), fours[0], stride, fours[1], both
    )
    return inside, outside


def erase(where: Tensor, values: Tensor) -> None:
    """Set the values to 0 where `where` is True; all lanes may share `where`."""
    flags, fours, wide = _flags(where.expand_as(values))
    _run_lanes(_erase_kernel, values, flags, values, values[0].numel(), fours, values.stride(0), wide)


def descend(values: Tensor, slopes: Tensor, rate: float, where: Tensor) -> None:
    """Add -rate * slopes in place, and set entries to 0 where `where` is True; all lanes may share `where`."""
    (flags, fours, wide), (rows, stride) = _flags(where.expand_as(values)), _rows(slopes)
    _run_lanes(
        _descend_kernel, values, flags, values, rows, values[0].numel(), fours, values.stride(0), stride, wide, -rate
    )


def intersect(where: Tensor, keep: Tensor, inverted: bool) -> Tensor:
    """Return `where & keep` (lanes, ...), or `~where & keep` if `inverted`."""
    into = torch.empty(where.shape, dtype=torch.bool, device=where.device)
    (rows, stride), (kept, keep_stride) = _rows(where), _rows(keep)
    _run_lanes(
        _intersect_kernel, into, rows, kept, into.view(torch.uint8), into[0].numel(), stride, keep_stride, inverted
    )
    return into


def magnitudes(values: Sequence[Tensor], keeps: Sequence[Tensor]) -> Tensor:
    """Return the absolute values of all tensors, concatenated to (lanes, N), and -1 where they are not kept."""
    sizes = [value[0].numel() for value in values]
    into = values[0].new_empty(len(values[0]), sum(sizes))
    for i, part in enumerate(into.split(sizes, 1)):
        rows, stride = _rows(values[i])
        keep, *fours = _flags(keeps[i]) if keeps else (rows, 0, 1)
        _run_lanes(_size_kernel, part, rows, keep, part, sizes[i], stride, part.stride(0), *fours, bool(keeps))
    return into


def _copy(source: Tensor, into: Tensor, lanes: int, of: Tensor | None = None, to: Tensor | None = None) -> None:
    (rows, stride), (target, into_stride) = _rows(source), _rows(into)
    indices = [rows if index is None else index.contiguous() for index in (of, to)]
    arguments = (rows, target, *indices, into[0].numel(), stride, into_stride, of is not None, to is not None)
    _run_lanes(_copy_kernel, into[:1].expand(lanes, *into.shape[1:]), *arguments)


def _run_lanes(kernel, like: Tensor, *arguments: object) -> None:
    """Run a kernel over the entries of every lane of a tensor shaped as `like`."""
    if like.numel():
        with torch.cuda.device_of(like):
            kernel[triton.cdiv(like[0].numel(), BLOCK), len(like)](*arguments, BLOCK)


def _flags(value: Tensor) -> tuple[Tensor, int, int]:
    """Return the rows of a mask, their stride in units of `wide`, and `wide`: 4 if it divides the stride, else 1."""
    rows, stride = _rows(value)
    wide = 4 if stride % 4 == 0 else 1
    return rows, stride // wide, wide


def _rows(value: Tensor) -> tuple[Tensor, int]:
    """Return the tensor with contiguous rows, and the stride between rows; masks become uint8."""
    value = value if value[0].is_contiguous() else value.contiguous()
    return value.view(torch.uint8) if value.dtype == torch.bool else value, value.stride(0)
