"""Gradient of a convolution by its input, computed by the fastest of several algorithms on this GPU.

cuDNN compares algorithms of one kind of call. cuDNN never compares a transposed convolution with the equal forward
convolution. The faster call depends on the shapes, so the algorithms are timed once per shape and the choice is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.gpu.graphs import capturing, milliseconds
from secateur.gpu.jacobian.flows import laid_out

Sides = tuple[int, ...]  # two
ALIGNED = 8  # channels


class Geometry(NamedTuple):
    """Sizes and settings of a convolution."""

    size: Sides  # of the input
    window: Sides
    stride: Sides
    padding: Sides
    dilation: Sides
    groups: int


Way = Callable[[Tensor, Tensor, Geometry], Tensor]  # output gradient (N, O, h, w), weights (O, I, ...) -> (N, I, H, W)


def by_input(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Return the gradient by the input, (N, I, H, W), from the gradient by the output, (N, O, h, w)."""
    timed = gradient.is_cuda and gradient.dtype != torch.float64
    return (fastest(gradient, weight, geometry) if timed else transposed)(gradient, weight, geometry)


known: dict[tuple[Geometry, torch.Size, int, torch.dtype, torch.device, bool], Way] = {}


def fastest(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Way:
    """Return the algorithm that was fastest at the first such gradient, with up to twice or half as many rows."""
    exact = not torch.backends.cudnn.allow_tf32
    key = geometry, weight.shape, len(gradient).bit_length(), gradient.dtype, gradient.device, exact
    if key not in known:
        if capturing():
            return transposed
        inputs = gradient, weight, geometry
        known[key] = min(ways(weight, geometry), key=lambda way: milliseconds(partial(way, *inputs), gradient.device))
    return known[key]


def ways(weight: Tensor, geometry: Geometry) -> Iterator[Way]:
    """Yield the algorithms that support this convolution."""
    yield transposed
    if geometry.groups > 1:
        return
    reach = [by * (window - 1) for by, window in zip(geometry.dilation, geometry.window, strict=True)]
    if geometry.stride == (1, 1) and all(most >= pad for most, pad in zip(reach, geometry.padding, strict=True)):
        yield turned
        if weight.shape[1] % ALIGNED:
            yield turned_and_padded
    if geometry.stride != (1, 1) and geometry.dilation == (1, 1):
        yield by_phases
    if weight[0].numel() <= len(weight):  # else the columns are larger than the gradient
        yield by_columns


def transposed(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Compute the gradient by a transposed convolution."""
    size, window, stride, padding, dilation, groups = geometry
    sides = zip(size, window, stride, padding, dilation, strict=True)
    extra = [(side + 2 * pad - by * (wide - 1) - 1) % step for side, wide, step, pad, by in sides]  # remainder
    return laid_out(F.conv_transpose2d(gradient, weight, None, stride, padding, extra, groups, dilation))


def turned(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Compute the gradient by a convolution with the weights rotated by 180 degrees; stride 1 only."""
    reach = zip(geometry.dilation, geometry.window, geometry.padding, strict=True)
    padding = [by * (window - 1) - pad for by, window, pad in reach]
    return laid_out(F.conv2d(gradient, _rotated(weight), None, 1, padding, geometry.dilation))


def turned_and_padded(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Compute as `turned`, with input channels padded with zeros to a multiple that suits tensor cores."""
    channels = weight.shape[1]
    wide = laid_out(F.pad(weight, (0, 0, 0, 0, 0, -channels % ALIGNED)))
    return laid_out(turned(gradient, wide, geometry)[:, :channels])


def by_phases(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Compute the gradient by one convolution of stride 1 per phase, i.e. offset within a stride.

    Unlike in a transposed convolution, no weight is multiplied with an inserted zero.
    """
    shape = len(gradient), weight.shape[1], *geometry.size
    out = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    (down, right), sides = geometry.stride, list(zip(*geometry[:4], strict=True))
    for at in product(range(down), range(right)):
        rows, columns = (
            _phase(offset, short, *side) for offset, short, side in zip(at, gradient.shape[2:], sides, strict=True)
        )
        taps = weight[:, :, rows.first :: down, columns.first :: right]
        into = out[:, :, at[0] :: down, at[1] :: right]
        if taps.numel() and into.numel():
            full = F.conv2d(gradient, _rotated(taps), None, 1, (rows.padding, columns.padding))
            into.copy_(full[:, :, rows.outputs, columns.outputs])
        else:
            into.zero_()
    return out


def by_columns(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """Compute a matrix product with all weights at every position, then add where the windows overlap."""
    size, window, stride, padding, dilation, _ = geometry
    columns = weight.flatten(1).T.expand(len(gradient), -1, -1) @ gradient.flatten(2)  # (N, I window, h w)
    return laid_out(F.fold(columns, size, window, dilation, padding, stride))


def from_one_channel(values: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Return the gradient by the input for gradients (K B, 1, h, w) in one channel per feature.

    `weight` (K, I, ...) holds the weights of that channel. None if stride, dilation or groups is not 1.
    """
    if geometry.stride != (1, 1) or geometry.dilation != (1, 1) or geometry.groups > 1:
        return None
    down, right = (window - 1 - pad for window, pad in zip(geometry.window, geometry.padding, strict=True))
    padded = F.pad(values, (right, right, down, down))
    windows = padded.unfold(2, geometry.window[0], 1).unfold(3, geometry.window[1], 1)  # (K B, 1, H, W, window)
    taps = weight.flip(2, 3).flatten(2).transpose(1, 2)  # (K, window, I)
    gradient = windows.reshape(len(weight), -1, taps.shape[1]) @ taps
    return laid_out(gradient.view(len(values), *geometry.size, -1).permute(0, 3, 1, 2))


class _Phase(NamedTuple):
    """Inputs at one offset within a stride, along one side."""

    first: int  # index of the first weight for these inputs
    padding: int
    outputs: slice  # their part of the convolution's output


def _phase(offset: int, short: int, size: int, window: int, step: int, pad: int) -> _Phase:
    """Return the phase at an offset: input step j + offset meets weight first + step t at output j + ahead - t."""
    ahead, first = divmod(offset + pad, step)
    count, taps = len(range(offset, size, step)), len(range(first, window, step))
    before = taps - 1 - ahead
    padding = max(before, count + ahead - short, 0)
    return _Phase(first, padding, slice(padding - before, padding - before + count))


def _rotated(weight: Tensor) -> Tensor:
    """Return the weights rotated by 180 degrees, (I, O, ...)."""
    return laid_out(weight.flip(2, 3).transpose(0, 1))
