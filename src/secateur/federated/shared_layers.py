"""The layers of one network on the batches of many users at once, each user with a gradient of its own.

Batches are (users * B, ...), one user after the other. The gradients of the parameters are written where they belong,
(users, ...), and autograd is told of none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from secateur.federated.batchnorm import Moments, normalised, returned
from secateur.federated.fusing import norm_relu
from secateur.federated.graphs import Aside
from secateur.interfaces import Params


class Layer(NamedTuple):
    """Where a layer's gradients belong; None: nobody asks."""

    users: int
    aside: Aside
    weight: Tensor | None  # (users, ...)
    bias: Tensor | None

    def rows(self, x: Tensor) -> Tensor:
        """(users, places, C), for channels in the second axis; of channels_last pictures it is a view."""
        return x.movedim(1, -1).reshape(self.users, -1, x.shape[1]).contiguous()


class Layers(TorchFunctionMode):
    """Answers the layers of a forward that it knows; `names` are of the parameters that it has not met yet.

    A parameter counts as known once. Where it is used again, or by a function that is not known here, autograd finds a
    gradient of it, which is that of all users together.
    """

    def __init__(self, users: int, aside: Aside, leaves: Params, into: Params, running: dict[int, Tensor]) -> None:
        super().__init__()
        self.users, self.aside, self.into = users, aside, into
        self.running = running  # (users, C) by the id of the tensor that the network holds
        self.names = {id(value): name for name, value in leaves.items()}
        self.known: dict[Any, Callable[..., Tensor | None]] = {
            F.conv2d: self._conv2d,
            F.linear: self._linear,
            F.batch_norm: self._batch_norm,
            norm_relu: self._norm_relu,
        }

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        found = self.known[func](*args, **kwargs) if func in self.known else None
        return func(*args, **kwargs) if found is None else found

    def _layer(self, weight: Tensor | None, bias: Tensor | None) -> Layer | None:
        """None where a parameter is not one of the network's own, or was met before."""
        given = [value for value in (weight, bias) if value is not None and value.requires_grad]
        if any(id(value) not in self.names for value in given):
            return None
        names = {id(value): self.names.pop(id(value)) for value in given}
        to = [self.into[names[id(value)]] if id(value) in names else None for value in (weight, bias)]
        return Layer(self.users, self.aside, *to)

    def _conv2d(
        self,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        layer = None if isinstance(padding, str) or input.ndim != 4 else self._layer(weight, bias)
        if layer is None:
            return None
        geometry = [[each] * 2 if isinstance(each, int) else list(each) for each in (stride, padding, dilation)]
        return _called(_Conv2d, input, weight, bias, (*geometry, groups), layer)[0]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        layer = self._layer(weight, bias)
        return None if layer is None else _called(_Linear, input, weight, bias, layer)[0]

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
        skip: Tensor | None = None,
        relu: bool = False,
    ) -> Tensor | None:
        held = [value for value in (running_mean, running_var) if value is not None]
        running = [self.running[id(value)] for value in held if id(value) in self.running]
        layer = self._layer(weight, bias) if training and len(running) == len(held) else None
        if layer is None:
            return None
        weight = input.new_ones(input.shape[1]) if weight is None else weight
        bias = input.new_zeros(input.shape[1]) if bias is None else bias
        out, mean, var = _called(_BatchNorm, input, weight, bias, skip, relu, eps, layer)
        if running:
            places = input.numel() // mean.numel()
            self.aside([partial(_track, running, mean, var, places, momentum)], mean, var)
        return out

    def _norm_relu(self, x: Tensor, skip: Tensor | None, *norm: Any) -> Tensor | None:
        if skip is None or skip.shape == x.shape:
            return self._batch_norm(x, *norm, skip, True)
        out = self._batch_norm(x, *norm)
        return None if out is None else F.relu(out + skip)


@torch.no_grad()
def _track(running: Sequence[Tensor], mean: Tensor, var: Tensor, places: int, momentum: float) -> None:
    unbiased = var * (places / (places - 1))
    for old, new in zip(running, (mean, unbiased), strict=True):
        old.lerp_(new, momentum)


class _Conv2d(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Any, layer: Layer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.geometry, ctx.layer = geometry, layer
        return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        stride, padding, dilation, groups = ctx.geometry
        # as x lies: a user's part of it is then whole, and no call copies it
        g = g.contiguous(memory_format=torch.channels_last if _channels_last(x) else torch.contiguous_format)

        def back(g: Tensor, x: Tensor, which: Sequence[bool]) -> Any:
            others = (None, stride, padding, dilation, False, [0, 0], groups, which)
            return torch.ops.aten.convolution_backward(g, x, weight, *others)

        def own(user: int, g: Tensor, x: Tensor) -> None:
            layer.weight[user].copy_(back(g, x, [False, True, False])[1])

        if layer.weight is not None:
            parts = zip(range(layer.users), g.chunk(layer.users), x.chunk(layer.users), strict=True)
            layer.aside([partial(own, *each) for each in parts], g, x)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(layer.rows(g).sum(1))], g)
        return back(g, x, [True, False, False])[0] if ctx.needs_input_grad[0] else None, None, None, None, None


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: Layer) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        (x, weight), layer = ctx.saved_tensors, ctx.layer
        own, inputs = (each.reshape(layer.users, -1, each.shape[-1]) for each in (g, x))
        if layer.weight is not None:
            layer.aside([lambda: layer.weight.copy_(own.mT @ inputs)], own, inputs)
        if layer.bias is not None:
            layer.aside([lambda: layer.bias.copy_(own.sum(1))], own)
        return g @ weight if ctx.needs_input_grad[0] else None, None, None, None


class _BatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, skip: Tensor | None, relu: bool, eps: float, layer: Layer
    ) -> tuple[Tensor, ...]:
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
        (out, rows, *moments), (relu, skips), layer = ctx.saved_tensors, ctx.by, ctx.layer
        if relu and skips:  # the skip needs it in memory
            g = torch.ops.aten.threshold_backward(g, out, 0)
        inputs, weight, bias = returned(layer.rows(g), rows, Moments(*moments), out if relu and not skips else None)
        pairs = [(to, value) for to, value in ((layer.weight, weight), (layer.bias, bias)) if to is not None]
        layer.aside([partial(to.copy_, value) for to, value in pairs], weight, bias)
        return _like(inputs, g), None, None, g if skips else None, None, None, None


def _called(function: type[Function], *given: Any) -> tuple[Tensor, ...]:
    found = function.apply(*given)  # type: ignore[no-untyped-call]
    return found if isinstance(found, tuple) else (found,)


def _like(rows: Tensor, x: Tensor) -> Tensor:
    """`Layer.rows` of an x, in its shape."""
    return rows.view(len(x), *x.shape[2:], -1).movedim(-1, 1)


def _channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)
