"""Layers on the batches of many users at once that give each user a gradient of its own.

Batches are (users * B, ...), one user after the other. The gradients of the parameters are written where they belong,
(users, ...), and autograd is told of none.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from secateur.federated.graphs import Aside
from secateur.jacobian.convolutions import Geometry, transposed
from secateur.stacking.batchnorm import Moments, normalised, returned


class Layer(NamedTuple):
    """Where a layer's gradients belong; None: nobody asks."""

    users: int
    aside: Aside
    weight: Tensor | None  # (users, ...)
    bias: Tensor | None

    def rows(self, x: Tensor) -> Tensor:
        """(users, places, C), for channels in the second axis; of channels_last pictures it is a view."""
        return x.movedim(1, -1).reshape(self.users, -1, x.shape[1]).contiguous()


class Conv2d(Function):
    """F.conv2d; the users' gradients of the filters are taken beside the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, layer: Layer) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.layer = geometry, layer
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """With respect to x."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        geometry = Geometry(x.shape[2:], weight.shape[2:], *ctx.geometry)
        # as x lies: a user's part of it is then whole, and no call copies it
        g = g.contiguous(memory_format=torch.channels_last if _channels_last(x) else torch.contiguous_format)
        if layer.weight is not None:
            parts = zip(layer.weight, g.chunk(layer.users), x.chunk(layer.users), strict=True)
            layer.aside([partial(_by_filters, *part, weight, geometry) for part in parts], g, x)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(layer.rows(g).sum(1))], g)
        return transposed(g, weight, geometry) if ctx.needs_input_grad[0] else None, None, None, None, None


class Linear(Function):
    """F.linear; the users' gradients of the weights are one product of many matrices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        """The output."""
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """With respect to x."""
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        own, inputs = (each.reshape(layer.users, -1, each.shape[-1]) for each in (g, x))
        if layer.weight is not None:
            layer.aside([lambda: layer.weight.copy_(own.mT @ inputs)], own, inputs)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(own.sum(1))], own)
        return g @ weight if ctx.needs_input_grad[0] else None, None, None, None


class BatchNorm(Function):
    """F.batch_norm in training, of a user's rows each, and what `norm_relu` adds to it; also mean and variance."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None, relu: bool, eps: float, layer: Layer
    ) -> tuple[Tensor, ...]:
        """The output, and the users' mean and biased variance."""
        rows = layer.rows(x)
        out, moments = normalised(rows, weight, bias, eps, None if skip is None else layer.rows(skip), relu)
        out = _like(out, x).data  # not a view: the network may change it in place
        ctx.by = relu, skip is not None
        ctx.save_for_backward(out if all(ctx.by) else bias, rows, *moments)
        ctx.layer = layer
        ctx.mark_non_differentiable(moments.mean, moments.var)
        return out, moments.mean, moments.var

    @staticmethod
    def backward(ctx: Any, g: Tensor, *_: Tensor) -> Any:
        """With respect to x and the skip."""
        (out, rows, *moments), (relu, skips), layer = ctx.saved_tensors, ctx.by, ctx.layer
        if relu and skips:  # the skip needs it in memory
            g = torch.ops.aten.threshold_backward(g, out, 0)
        inputs, weight, bias = returned(layer.rows(g), rows, Moments(*moments), out if relu and not skips else None)
        pairs = [(to, value) for to, value in ((layer.weight, weight), (layer.bias, bias)) if to is not None]
        layer.aside([partial(to.copy_, value) for to, value in pairs], weight, bias)
        return _like(inputs, g), None, None, g if skips else None, None, None, None


def _by_filters(into: Tensor, g: Tensor, x: Tensor, weight: Tensor, geometry: Geometry) -> None:
    """One user's gradient: cuDNN gives the sum over a batch, so every user is a call."""
    _, _, stride, padding, dilation, groups = geometry
    others = None, stride, padding, dilation, False, [0, 0], groups, [False, True, False]
    into.copy_(torch.ops.aten.convolution_backward(g, x, weight, *others)[1])


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """`Layer.rows` of an x, in its shape."""
    return rows.view(len(x), *x.shape[2:], -1).movedim(-1, 1)


def _channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)
