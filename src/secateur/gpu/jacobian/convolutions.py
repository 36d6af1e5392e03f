"""The gradient of a convolution by its input, taken in whichever of some ways is the fastest on this GPU.

cuDNN times algorithms of one kind of call against each other, never a transposed convolution against the convolution
that it equals. Which is the faster depends on the shapes, so each is timed once, and kept.
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
    """Of a convolution."""

    size: Sides  # of its input
    window: Sides
    stride: Sides
    padding: Sides
    dilation: Sides
    groups: int


Way = Callable[[Tensor, Tensor, Geometry], Tensor]  # by the output (N, O, h, w), weights (O, I, ...) -> (N, I, H, W)


def by_input(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The gradient by the input, (N, I, H, W), of one by the output, (N, O, h, w)."""
    timed = gradient.is_cuda and gradient.dtype != torch.float64
    return (fastest(gradient, weight, geometry) if timed else transposed)(gradient, weight, geometry)


known: dict[tuple[Geometry, torch.Size, int, torch.dtype, torch.device, bool], Way] = {}


def fastest(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Way:
    """The way that took the least time when such a gradient, of up to twice or half as many rows, came first."""
    exact = not torch.backends.cudnn.allow_tf32
    key = geometry, weight.shape, len(gradient).bit_length(), gradient.dtype, gradient.device, exact
    if key not in known:
        if capturing():
            return transposed
        given = gradient, weight, geometry
        known[key] = min(ways(weight, geometry), key=lambda way: milliseconds(partial(way, *given), gradient.device))
    return known[key]


def ways(weight: Tensor, geometry: Geometry) -> Iterator[Way]:
    """Those that can take this one."""
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
    """By the transposed convolution."""
    size, window, stride, padding, dilation, groups = geometry
    sides = zip(size, window, stride, padding, dilation, strict=True)
    extra = [(side + 2 * pad - by * (wide - 1) - 1) % step for side, wide, step, pad, by in sides]  # left over
    return laid_out(F.conv_transpose2d(gradient, weight, None, stride, padding, extra, groups, dilation))


def turned(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """By a convolution with the weights turned round; of stride 1."""
    reach = zip(geometry.dilation, geometry.window, geometry.padding, strict=True)
    padding = [by * (window - 1) - pad for by, window, pad in reach]
    return laid_out(F.conv2d(gradient, _round(weight), None, 1, padding, geometry.dilation))


def turned_and_padded(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """The same with further input channels of zeros, up to as many as tensor cores take at once."""
    channels = weight.shape[1]
    wide = laid_out(F.pad(weight, (0, 0, 0, 0, 0, -channels % ALIGNED)))
    return laid_out(turned(gradient, wide, geometry)[:, :channels])


def by_phases(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """By one convolution of stride 1 for every place within a step, whose weights meet no zeros."""
    shape = len(gradient), weight.shape[1], *geometry.size
    out = torch.empty(shape, dtype=gradient.dtype, device=gradient.device, memory_format=torch.channels_last)
    (down, right), sides = geometry.stride, list(zip(*geometry[:4], strict=True))
    for at in product(range(down), range(right)):
        rows, columns = (
            _phase(place, short, *side) for place, short, side in zip(at, gradient.shape[2:], sides, strict=True)
        )
        some = weight[:, :, rows.first :: down, columns.first :: right]
        into = out[:, :, at[0] :: down, at[1] :: right]
        if some.numel() and into.numel():
            found = F.conv2d(gradient, _round(some), None, 1, (rows.padding, columns.padding))
            into.copy_(found[:, :, rows.found, columns.found])
        else:
            into.zero_()
    return out


def by_columns(gradient: Tensor, weight: Tensor, geometry: Geometry) -> Tensor:
    """By a product with all weights at every place, then added up where the windows overlap."""
    size, window, stride, padding, dilation, _ = geometry
    columns = weight.flatten(1).T.expand(len(gradient), -1, -1) @ gradient.flatten(2)  # (N, I window, h w)
    return laid_out(F.fold(columns, size, window, dilation, padding, stride))


def from_one_channel(values: Tensor, weight: Tensor, geometry: Geometry) -> Tensor | None:
    """Of gradients (K B, 1, h, w), by weights (K, I, ...) of one channel for each feature; None for other strides."""
    if geometry.stride != (1, 1) or geometry.dilation != (1, 1) or geometry.groups > 1:
        return None
    down, right = (window - 1 - pad for window, pad in zip(geometry.window, geometry.padding, strict=True))
    padded = F.pad(values, (right, right, down, down))
    windows = padded.unfold(2, geometry.window[0], 1).unfold(3, geometry.window[1], 1)  # (K B, 1, H, W, window)
    taps = weight.flip(2, 3).flatten(2).transpose(1, 2)  # (K, window, I)
    found = windows.reshape(len(weight), -1, taps.shape[1]) @ taps
    return laid_out(found.view(len(values), *geometry.size, -1).permute(0, 3, 1, 2))


class _Phase(NamedTuple):
    """Along one side, the inputs at one place within a step."""

    first: int  # the first weight that meets them
    padding: int
    found: slice  # what of the convolution's output is theirs


def _phase(place: int, short: int, size: int, window: int, step: int, pad: int) -> _Phase:
    """Input step j + place meets weight first + step t at output j + ahead - t."""
    ahead, first = divmod(place + pad, step)
    count, taps = len(range(place, size, step)), len(range(first, window, step))
    before = taps - 1 - ahead
    padding = max(before, count + ahead - short, 0)
    return _Phase(first, padding, slice(padding - before, padding - before + count))


def _round(weight: Tensor) -> Tensor:
    """(I, O, ...), turned round."""
    return laid_out(weight.flip(2, 3).transpose(0, 1))
