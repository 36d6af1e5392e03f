"""Layers on the batches of many lanes at once, where every lane has weights of its own.

Batches are (lanes * B, ...), one lane after the other; weights have a first axis of lanes. vmap makes one convolution
in groups of such a layer, which is slow where groups are as narrow as here. On a GPU the kernels of
lane_layers_kernels.py read channels_last pictures as they lie.
"""

from __future__ import annotations

from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, vmap
from torch.autograd import Function
from torch.nn import functional as F

from secateur.federated.batchnorm import Moments, normalised, returned
from secateur.triton_kernels import loaded


def conv2d(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Stride 1, with zeros around that keep the size: weight (lanes, F, C, h, w) of odd h and w, bias (lanes, F)."""
    if kernels := _kernels_for(x):
        found: Tensor = _Conv2d.apply(x, weight, bias, kernels)  # type: ignore[no-untyped-call]
        return found
    padding = [size // 2 for size in weight.shape[3:]]
    return vmap(partial(F.conv2d, padding=padding))(_apart(x, len(weight)), weight, bias).flatten(0, 1)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weight (lanes, F, C), bias (lanes, F)."""
    return torch.baddbmm(bias[:, None], _apart(x, len(weight)), weight.mT).flatten(0, 1)


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """ReLU of BatchNorm by a lane's own batch; weight and bias (lanes, C)."""
    found: Tensor = _NormRelu.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return found


def max_pool2(x: Tensor) -> Tensor:
    """The largest of every two by two; what an odd size leaves at the end is left out."""
    if kernels := _kernels_for(x):
        found: Tensor = _MaxPool2.apply(x, kernels)  # type: ignore[no-untyped-call]
        return found
    return F.max_pool2d(x, 2)


class _Conv2d(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, kernels: ModuleType) -> Tensor:
        rows = _rows(x, len(weight))
        ctx.save_for_backward(rows, weight)
        ctx.kernels, ctx.size = kernels, x.shape[2:]
        by_tap = weight.permute(0, 3, 4, 2, 1).flatten(1, 3).contiguous()
        return _pictures(kernels.convolved(rows, by_tap, bias, ctx.size, weight.shape[3:]), x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (rows, weight), kernels, size = ctx.saved_tensors, ctx.kernels, ctx.size
        taps, of = weight.shape[3:], _rows(g, len(weight))
        by_weight, by_bias = kernels.by_filters(of, rows, size, taps)
        by_weight = by_weight.unflatten(1, (*taps, -1)).permute(0, 4, 3, 1, 2)
        by_x = None
        if ctx.needs_input_grad[0]:  # the same convolution, of g with turned filters
            turned = weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3).contiguous()
            by_x = _pictures(kernels.convolved(of, turned, None, size, taps), g)
        return by_x, by_weight, by_bias, None


class _NormRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = _rows(x, len(weight))
        out, moments = normalised(rows, weight, bias, eps, relu=True)
        ctx.save_for_backward(rows, bias, *moments)
        return _pictures(out, x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, bias, *moments = ctx.saved_tensors
        by_x, by_weight, by_bias = returned(_rows(g, len(bias)), rows, Moments(*moments), bias)
        return _pictures(by_x, g), by_weight, by_bias, None


class _MaxPool2(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: ModuleType) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.save_for_backward(x)
        ctx.kernels = kernels
        found: Tensor = kernels.pooled(x.movedim(1, -1)).movedim(-1, 1)
        return found

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        g = g.contiguous(memory_format=torch.channels_last)
        return ctx.kernels.spread(g.movedim(1, -1), x.movedim(1, -1)).movedim(-1, 1), None


def _apart(x: Tensor, lanes: int) -> Tensor:
    return x.view(lanes, -1, *x.shape[1:])


def _rows(x: Tensor, lanes: int) -> Tensor:
    """(lanes, places, C); of channels_last pictures a view."""
    return x.movedim(1, -1).reshape(lanes, -1, x.shape[1]).contiguous()


def _pictures(rows: Tensor, like: Tensor) -> Tensor:
    """What `_rows` makes of pictures of this size, as pictures."""
    return rows.view(len(like), *like.shape[2:], -1).movedim(-1, 1)


def _kernels_for(x: Tensor) -> ModuleType | None:
    return _kernels() if x.is_cuda and x.dtype == torch.float32 else None


@cache
def _kernels() -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        x = torch.zeros(1, 16, 3, device="cuda")
        out = kernels.convolved(x, x.new_zeros(1, 27, 8), None, (4, 4), (3, 3))
        kernels.by_filters(out, x, (4, 4), (3, 3))
        kernels.spread(kernels.pooled(x.view(1, 4, 4, 3)), x.view(1, 4, 4, 3))

    return loaded("secateur.federated.lane_layers_kernels", probe, "a step of sub-models")
