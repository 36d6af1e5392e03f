"""A chain of layers as a function of many flat parameter vectors: stacked clients of one width, without vmap."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from torch import Tensor, nn

from secateur.gpu.stacked_layers import conv2d, linear, norm_relu, norm_relu_pool
from secateur.models.mapp import Scaler

Step = Callable[[Tensor, Iterator[Tensor]], Tensor]  # (inputs, remaining parameters) -> outputs


class Chain:
    """The layers of a network for which `fits` is True."""

    def __init__(self, net: nn.Module) -> None:
        self.steps = list(_steps(_layers(net)))
        self.shapes = [tuple(value.shape) for value in net.parameters()]
        self.sizes = [math.prod(shape) for shape in self.shapes]

    def __call__(self, flat: Tensor, inputs: Tensor) -> Tensor:
        """Return outputs (lanes, B, classes) of flat parameters (lanes, P) and inputs (lanes, B, ...)."""
        parts = flat.split_with_sizes(self.sizes, 1)  # one gradient in all; slices would each have a full-size gradient
        parameters = iter([part.view(-1, *shape) for part, shape in zip(parts, self.shapes, strict=True)])
        x = inputs.flatten(0, 1)
        for step in self.steps:
            x = step(x, parameters)
        return x.view(len(flat), -1, *x.shape[1:])


def _steps(layers: Sequence[nn.Module]) -> Iterator[Step]:
    """Yield one step a layer; a convolution includes the scaler after it, and BatchNorm the ReLU and a pooling."""
    rest = list(layers)
    while rest:
        layer = rest.pop(0)
        match layer:
            case nn.Conv2d():
                scaler = rest.pop(0) if rest and isinstance(rest[0], Scaler) else None
                rate = scaler.rate if isinstance(scaler, Scaler) else 1.0
                yield partial(_conv2d, rate, bool(rest) and isinstance(rest[0], nn.BatchNorm2d))
            case nn.BatchNorm2d():
                rest.pop(0)
                pools = bool(rest) and isinstance(rest[0], nn.MaxPool2d)
                rest = rest[pools:]
                yield partial(_norm, norm_relu_pool if pools else norm_relu, layer.eps)
            case nn.Linear():
                yield lambda x, parameters: linear(x, next(parameters), next(parameters))
            case _:
                yield partial(_itself, layer)


def _conv2d(rate: float, normed: bool, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    weight, bias = next(parameters), next(parameters)
    bias = bias.detach() if normed else bias  # BatchNorm cancels the bias, so its gradient would be round-off
    return conv2d(x, weight, bias) if rate == 1 else conv2d(x, weight / rate, bias / rate)


def _norm(layer: Callable[..., Tensor], eps: float, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    return layer(x, next(parameters), next(parameters), eps)


def _itself(layer: nn.Module, x: Tensor, parameters: Iterator[Tensor]) -> Tensor:
    outputs: Tensor = layer(x)
    return outputs


def fits(net: nn.Module) -> bool:
    """Return True if the network is a sequence of supported layers."""
    layers = _layers(net)
    weighty = [layer for layer in layers if [*layer.parameters()]]
    once = len(weighty) == len(set(weighty))  # a layer that occurs twice has its parameters only once
    return once and not any(map(_hooked, net.modules())) and all(map(_known, layers, [*layers[1:], None]))


def _layers(net: nn.Module) -> list[nn.Module]:
    """Return the layers of nested sequences, in order."""
    return [layer for module in net for layer in _layers(module)] if type(net) is nn.Sequential else [net]


def _hooked(module: nn.Module) -> bool:
    """Return True if a module has hooks on its inputs or outputs."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


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
        settings = layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.ceil_mode, layer.return_indices
        return settings == (2, 2, 0, 1, False, False)
    if type(layer) is nn.Flatten:
        return layer.start_dim == 1
    return type(layer) in (nn.ReLU, nn.AdaptiveAvgPool2d, nn.AvgPool2d, nn.Identity, Scaler)
