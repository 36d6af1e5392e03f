"""Every user's gradient of a convolution's filters, taken in whichever of some ways is the fastest on this GPU.

cuDNN gives the sum over a batch, so each of the users is a call, too small to fill a GPU. A product of many matrices
and a convolution of many groups are calls for all users, and move more memory. Which is the faster depends on the
shapes, so each is timed once, and kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from secateur.federated.graphs import Aside
from secateur.jacobian.convolutions import Geometry
from secateur.precision import tf32
from secateur.timing import captured_milliseconds, capturing, cudnn_chooses

MOST = 2**28  # entries of the columns


class Asked(NamedTuple):
    """Batches are (users * B, ...), one user after the other."""

    gradient: Tensor  # by the output
    x: Tensor
    weight: Tensor
    geometry: Geometry
    into: Tensor  # (users, *weight.shape)


Jobs = list[Callable[[], object]]
Way = Callable[[Asked], Jobs]
known: dict[object, dict[Way, float]] = {}  # milliseconds


def fastest(asked: Asked, branches: int) -> Way:
    """The way that took the least time when such tensors came first; on a CPU, and too late to time, user by user."""
    if not branches:
        return by_user
    flags = torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark
    tensors = asked.x, asked.weight, asked.into
    key = asked.geometry, flags, *((each.shape, each.stride(), each.dtype, each.device) for each in tensors)
    if key not in known:
        if capturing():
            return by_user
        known[key] = {way: _milliseconds(way, asked, branches) for way in ways(asked)}
    return min(known[key], key=known[key].__getitem__)


def ways(asked: Asked) -> Iterator[Way]:
    """Those that can take this one."""
    yield by_user
    yield as_groups
    if asked.geometry.groups == 1 and len(asked.x) * _places(asked) * asked.weight[0].numel() <= MOST:
        yield by_columns


def by_user(asked: Asked) -> Jobs:
    """By a call each."""
    users, geometry = len(asked.into), asked.geometry

    def own(into: Tensor, gradient: Tensor, x: Tensor) -> None:
        into.copy_(_backward(gradient, x, asked.weight, geometry, geometry.groups))

    parts = zip(asked.into, asked.gradient.chunk(users), asked.x.chunk(users), strict=True)
    return [partial(own, *each) for each in parts]


def as_groups(asked: Asked) -> Jobs:
    """By one call, the users being groups of a convolution of their examples side by side."""
    users, geometry = len(asked.into), asked.geometry

    def beside(pictures: Tensor) -> Tensor:
        """(B, users * C, H, W), channels last."""
        places = pictures.movedim(1, -1)
        return places.view(users, -1, *places.shape[1:]).movedim(0, 3).flatten(3).movedim(-1, 1)

    def all_users() -> None:
        out, inputs, *window = asked.weight.shape
        like = asked.weight.new_empty(users * out, *window, inputs).movedim(-1, 1)  # nobody reads its entries
        with cudnn_chooses(by_timing=False):  # of its many slow algorithms for groups, which may take seconds
            found = _backward(beside(asked.gradient), beside(asked.x), like, geometry, users * geometry.groups)
        asked.into.copy_(found.view(asked.into.shape))

    return [all_users]


def by_columns(asked: Asked) -> Jobs:
    """By one product of many matrices, of what the filters saw at each place, side by side."""

    def all_users() -> None:
        users, out = asked.into.shape[:2]
        gradient = asked.gradient.movedim(1, -1).reshape(users, -1, out)
        into = asked.into.movedim(2, -1)  # as the columns' entries lie
        with tf32(torch.backends.cudnn.allow_tf32):
            columns = _windows(asked).reshape(users, gradient.shape[1], -1)
            if into[0].is_contiguous():
                torch.bmm(gradient.mT, columns, out=into.view(users, out, -1))
            else:
                into.copy_((gradient.mT @ columns).view(into.shape))

    return [all_users]


def _windows(asked: Asked) -> Tensor:
    """(users * B, h, w, window, I), a view of the padded x."""
    _, window, stride, padding, dilation, _ = asked.geometry
    (down, right), x = padding, asked.x.movedim(1, -1).contiguous()
    x = F.pad(x, (0, 0, right, right, down, down)) if down or right else x
    example, row, place, channel = x.stride()
    steps = row * stride[0], place * stride[1], row * dilation[0], place * dilation[1]
    shape = len(x), *asked.gradient.shape[2:], *window, x.shape[-1]
    return x.as_strided(shape, (example, *steps, channel))


def _backward(gradient: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, groups: int) -> Tensor:
    others = None, geometry.stride, geometry.padding, geometry.dilation, False, [0, 0], groups, [False, True, False]
    found: Tensor = torch.ops.aten.convolution_backward(gradient, x, weight, *others)[1]
    return found


def _places(asked: Asked) -> int:
    return asked.gradient.shape[2:].numel()


def _milliseconds(way: Way, asked: Asked, branches: int) -> float:
    aside = Aside(branches, asked.x.device)

    def work() -> None:
        with aside:
            aside(way(asked))

    try:
        return captured_milliseconds(work, asked.x.device)
    except RuntimeError:  # cuDNN may have nothing for so many groups, and memory may be short
        return math.inf
