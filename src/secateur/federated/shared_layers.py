"""The forward of a network on the batches of many users at once: its layers are those of own_gradients.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from secateur.federated.fusing import norm_relu
from secateur.federated.graphs import Aside
from secateur.federated.own_gradients import BatchNorm, Conv2d, Layer, Linear
from secateur.interfaces import Params


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
        geometry = [(each,) * 2 if isinstance(each, int) else tuple(each) for each in (stride, padding, dilation)]
        return _called(Conv2d, input, weight, bias, (*geometry, groups), layer)[0]

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
        layer = self._layer(weight, bias)
        return None if layer is None else _called(Linear, input, weight, bias, layer)[0]

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
        *,
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
        out, mean, var = _called(BatchNorm, input, weight, bias, skip, relu, eps, layer)
        if running:
            places = input.numel() // mean.numel()
            self.aside([partial(_track, running, mean, var, places, momentum)], mean, var)
        return out

    def _norm_relu(self, x: Tensor, skip: Tensor | None, *norm: Any) -> Tensor | None:
        if skip is None or skip.shape == x.shape:
            return self._batch_norm(x, *norm, skip=skip, relu=True)
        out = self._batch_norm(x, *norm)
        return None if out is None else F.relu(out + skip)


@torch.no_grad()
def _track(running: Sequence[Tensor], mean: Tensor, var: Tensor, places: int, momentum: float) -> None:
    unbiased = var * (places / (places - 1))
    for old, new in zip(running, (mean, unbiased), strict=True):
        old.lerp_(new, momentum)


def _called(function: type[Function], *given: Any) -> tuple[Tensor, ...]:
    found = function.apply(*given)  # type: ignore[no-untyped-call]
    return found if isinstance(found, tuple) else (found,)
