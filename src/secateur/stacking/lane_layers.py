"""Layers on the batches of many lanes at once, where every lane has weights of its own.

Batches are (lanes * B, ...), one lane after the other; weights have a first axis of lanes. vmap makes one convolution
in groups of such a layer, which is slow where groups are as narrow as here. On a GPU kernels read channels_last
pictures as they lie, and a sub-model's layer is three of them each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, vmap
from torch._C import _DisableFuncTorch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.grad import conv2d_weight

from secateur.stacking.batchnorm import Moments, normalised, returned
from secateur.triton_kernels import loaded

CONVOLUTION, POOLING = "secateur.stacking.lane_layers_kernels", "secateur.stacking.norm_pool_kernels"
DEVICE = "cuda"  # where kernels are tried


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, back: bool = False) -> Tensor:
    """Stride 1, with zeros around that keep the size: weight (lanes, F, C, h, w) of odd h and w, bias (lanes, F).

    Back is from F channels to C, with the filters turned, and bias (lanes, C).
    """
    if kernels := _convolving(x, weight):
        found: Tensor = _Conv2d.apply(x, weight, bias, back, kernels)  # type: ignore[no-untyped-call]
        return found
    weight = turned(weight) if back else weight
    one = partial(F.conv2d, padding=_padding(weight.shape[3:]))
    return vmap(one, (0, 0, None if bias is None else 0))(_apart(x, len(weight)), weight, bias).flatten(0, 1)


def by_filters(g: Tensor, x: Tensor, lanes: int, taps: Sequence[int]) -> Tensor:
    """(lanes, F, C, h, w) the gradient of the filters by g, that of what `conv2d` made of x."""
    recorded = torch.is_grad_enabled() and (g.requires_grad or x.requires_grad)  # kernels would leave it out
    if not recorded and (kernels := _convolving(x, g)):
        found: Tensor = kernels.by_filters(_rows(g, lanes), _rows(x, lanes), x.shape[2:], taps)
        return found
    shape = g.shape[1], x.shape[1], *taps

    def one(x: Tensor, g: Tensor) -> Tensor:
        return conv2d_weight(x, shape, g, padding=_padding(taps))  # type: ignore[no-any-return, no-untyped-call]

    return vmap(one)(_apart(x, lanes), _apart(g, lanes))


def turned(weight: Tensor) -> Tensor:
    """The filters that lead back from the outputs to the inputs."""
    return weight.flip(-2, -1).transpose(-4, -3)


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Weight (lanes, F, C), bias (lanes, F)."""
    return torch.baddbmm(bias[:, None], _apart(x, len(weight)), weight.mT).flatten(0, 1)


def norm_relu(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """ReLU of BatchNorm by a lane's own batch; weight and bias (lanes, C)."""
    found: Tensor = _NormRelu.apply(x, weight, bias, eps)  # type: ignore[no-untyped-call]
    return found


def norm_relu_pool(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Of that the largest of every two by two; what an odd size leaves at the end is left out."""
    kernels = kernels_for(x, POOLING)
    if kernels is not None and x.shape[2] % 2 == x.shape[3] % 2 == 0:
        found: Tensor = _NormReluPool.apply(x, weight, bias, eps, kernels)  # type: ignore[no-untyped-call]
        return found
    return F.max_pool2d(norm_relu(x, weight, bias, eps), 2)


class _Conv2d(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, back: bool, kernels: ModuleType) -> Tensor:
        rows = _rows(x, len(weight))
        ctx.save_for_backward(rows, weight)
        ctx.kernels, ctx.size, ctx.back = kernels, x.shape[2:], back
        filters = kernels.turned(weight) if back else kernels.by_tap(weight)
        bias = None if bias is None else bias.contiguous()
        out = kernels.convolved(rows, filters, bias, ctx.size, weight.shape[3:])
        return _pictures(out, (len(x), *ctx.size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (rows, weight), kernels, size = ctx.saved_tensors, ctx.kernels, ctx.size
        taps, of = weight.shape[3:], _rows(g, len(weight))
        by_weight = kernels.by_filters(*((rows, of) if ctx.back else (of, rows)), size, taps)
        by_bias = of.sum(1) if ctx.needs_input_grad[2] else None
        by_x = None
        if ctx.needs_input_grad[0]:  # the same convolution, of g with turned filters
            filters = kernels.by_tap(weight) if ctx.back else kernels.turned(weight)
            by_x = _pictures(kernels.convolved(of, filters, None, size, taps), (len(g), *size))
        return by_x, by_weight, by_bias, None, None


class _NormRelu(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = _rows(x, len(weight))
        out, moments = normalised(rows, weight, bias, eps, relu=True)
        ctx.save_for_backward(rows, bias, *moments)
        return _pictures(out, (len(x), *x.shape[2:]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        rows, bias, *moments = ctx.saved_tensors
        by_x, by_weight, by_bias = returned(_rows(g, len(bias)), rows, Moments(*moments), bias)
        return _pictures(by_x, (len(g), *g.shape[2:])), by_weight, by_bias, None


class _NormReluPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, kernels: ModuleType) -> Tensor:
        rows, size = _rows(x, len(weight)), x.shape[2:]
        out, (mean, _, inverse, scale) = kernels.pooled(rows, weight, bias, eps, size[1])
        ctx.save_for_backward(rows, mean, inverse, scale, bias)
        ctx.kernels, ctx.size = kernels, size
        return _pictures(out, (len(x), *(each // 2 for each in size)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        bias = ctx.saved_tensors[-1]
        by_x, *others = ctx.kernels.spread(_rows(g, len(bias)), *ctx.saved_tensors, ctx.size[1])
        return _pictures(by_x, (len(g), *ctx.size)), *others, None, None


def _apart(x: Tensor, lanes: int) -> Tensor:
    return x.view(lanes, -1, *x.shape[1:])


def _rows(x: Tensor, lanes: int) -> Tensor:
    """(lanes, places, C); of channels_last pictures a view."""
    return x.movedim(1, -1).reshape(lanes, -1, x.shape[1]).contiguous()


def _pictures(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """What `_rows` makes of pictures, as pictures: how many, and their size."""
    return rows.view(*shape, -1).movedim(-1, 1)


def _padding(taps: Sequence[int]) -> list[int]:
    return [size // 2 for size in taps]


def _convolving(*given: Tensor) -> ModuleType | None:
    """Of an outer vmap or grad tensors have no memory of their own: torch's operations then go level by level."""
    return None if any(map(is_functorch_wrapped_tensor, given)) else kernels_for(given[0], CONVOLUTION)


def kernels_for(x: Tensor, name: str) -> ModuleType | None:
    """Kernels that take such an x."""
    return _kernels(name) if x.is_cuda and x.dtype == torch.float32 else None


@cache
def _kernels(name: str) -> ModuleType | None:
    def probe(kernels: ModuleType) -> None:
        with _DisableFuncTorch():  # inside of vmap and grad new tensors would have no memory of their own
            x = torch.zeros(1, 16, 3, device=DEVICE)
            if name == CONVOLUTION:
                weight = kernels.by_filters(x.new_zeros(1, 16, 8), x, (4, 4), (3, 3))
                out = kernels.convolved(x, kernels.by_tap(weight), x.new_zeros(1, 8), (4, 4), (3, 3))
                kernels.convolved(out, kernels.turned(weight), None, (4, 4), (3, 3))
            else:
                out, (mean, *_) = kernels.pooled(x, x[:, 0], x[:, 0], 1.0, 4)
                kernels.spread(out, x, mean, mean, mean, mean, 4)

    return loaded(name, probe, "stacked networks")
