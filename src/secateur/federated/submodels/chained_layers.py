"""A chain of layers as a function of many flat vectors at once: the stacked clients of one width, without vmap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from secateur.federated.collaborative.per_user_gradients import hooked
from secateur.gpu.stacked_layers import conv2d, linear, norm_relu, norm_relu_pool
from secateur.models.mapp import Scaler

Step = Callable[[Tensor, Iterator[Tensor]], Tensor]  # takes its parameters off what is given


class Chain:
    """The layers of a network that `fits`."""

    def __init__(self, net: nn.Module) -> None:
        self.steps = list(_steps(_layers(net)))
        self.shapes = [tuple(value.shape) for value in net.parameters()]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    def __call__(self, flat: Tensor, inputs: Tensor) -> Tensor:
        """(lanes, B, classes) of flat (lanes, P) and inputs (lanes, B, ...)."""
        parts = flat.split_with_sizes(self.sizes, 1)  # one gradient of all; a slice each would be as many of the whole
        given = iter([part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)])
        x = inputs.flatten(0, 1)
        for step in self.steps:
            x = step(x, given)
        return x.view(len(flat), -1, *x.shape[1:])


def _steps(layers: Sequence[nn.Module]) -> Iterator[Step]:
    """A layer each, but that a convolution does the scaling after it, and BatchNorm the ReLU and a pooling."""
    left = list(layers)
    while left:
        layer = left.pop(0)
        match layer:
            case nn.Conv2d():
                scaler = left.pop(0) if left and isinstance(left[0], Scaler) else None
                rate = scaler.rate if isinstance(scaler, Scaler) else 1.0
                yield partial(_conv2d, rate, bool(left) and isinstance(left[0], nn.BatchNorm2d))
            case nn.BatchNorm2d():
                left.pop(0)
                pools = bool(left) and isinstance(left[0], nn.MaxPool2d)
                left = left[pools:]
                yield partial(_norm, norm_relu_pool if pools else norm_relu, layer.eps)
            case nn.Linear():
                yield lambda x, given: linear(x, next(given), next(given))
            case _:
                yield partial(_itself, layer)


def _conv2d(rate: float, normed: bool, x: Tensor, given: Iterator[Tensor]) -> Tensor:
    weight, bias = next(given), next(given)
    bias = bias.detach() if normed else bias  # BatchNorm takes it away again: its gradient is 0, by layers round-off
    return conv2d(x, weight, bias) if rate == 1 else conv2d(x, weight / rate, bias / rate)


def _norm(layer: Callable[..., Tensor], eps: float, x: Tensor, given: Iterator[Tensor]) -> Tensor:
    return layer(x, next(given), next(given), eps)


def _itself(layer: nn.Module, x: Tensor, given: Iterator[Tensor]) -> Tensor:
    found: Tensor = layer(x)
    return found


def fits(net: nn.Module) -> bool:
    """Whether it is a sequence of layers that are known here."""
    layers = _layers(net)
    weighty = [layer for layer in layers if [*layer.parameters()]]
    once = len(weighty) == len(set(weighty))  # one that stands in two places has its parameters once
    return once and not any(map(hooked, net.modules())) and all(map(_known, layers, [*layers[1:], None]))


def _layers(net: nn.Module) -> list[nn.Module]:
    """Those of nested sequences, in order."""
    return [layer for module in net for layer in _layers(module)] if type(net) is nn.Sequential else [net]


def _known(layer: nn.Module, after: nn.Module | None) -> bool:
    if type(layer) is nn.Conv2d:
        odd = all(size % 2 for size in layer.kernel_size)
        same = layer.padding in ("same", tuple(size // 2 for size in layer.kernel_size)) and odd
        plain = layer.stride == layer.dilation == (1, 1) and layer.groups == 1 and layer.padding_mode == "zeros"
        return same and plain and layer.bias is not None
    if type(layer) is nn.BatchNorm2d:
        plain = layer.affine and layer.bias is not None and not layer.track_running_stats
        return plain and type(after) is nn.ReLU
    if type(layer) is nn.Linear:
        return layer.bias is not None
    if type(layer) is nn.MaxPool2d:
        given = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices
        return given == (2, 2, 0, 1, False, False)
    if type(layer) is nn.Flatten:
        return layer.start_dim == 1
    return type(layer) in (nn.ReLU, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.Identity, Scaler)
