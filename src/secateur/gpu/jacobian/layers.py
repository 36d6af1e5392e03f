"""Rules by which the layers of a network propagate the gradients of many features backward.

A rule runs a layer on the batch and returns its output and its backward function. Layers without a rule use torch.func.
A rule reads the layer's settings from the module, but its tensors from `sent`, because the sent tensors count. Tensors
for the backward pass only are computed there, once. The host is the bottleneck of the forward pass, not afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn import functional as F

from secateur.gpu.jacobian.convolutions import Geometry, by_input, from_one_channel
from secateur.gpu.jacobian.flows import Flow, Shared, Thin, laid_out, parted

Pool = nn.MaxPool2d | nn.AvgPool2d | nn.AdaptiveAvgPool2d
Back = Callable[[Flow], Sequence[Flow]]  # flow at the output -> flow at every input
Sent = Callable[[Any], Any]  # a tensor of the module, or None -> the tensor that was sent for it
Rule = Callable[[Any, Tensor, Sent], tuple[Tensor, Back] | None]  # None: the rule does not support this layer


def convolution(module: nn.Conv2d, x: Tensor, sent: Sent) -> tuple[Tensor, Back] | None:
    """Propagate through a convolution by `by_input`; no gradient by a weight is ever computed."""
    if x.ndim != 4 or isinstance(module.padding, str) or module.padding_mode != "zeros":
        return None
    weight, size = laid_out(sent(module.weight)), x.shape[2:]
    settings = module.stride, module.padding, module.dilation
    output = F.conv2d(x, weight, sent(module.bias), *settings, module.groups)
    geometry = Geometry(size, module.kernel_size, *settings, module.groups)
    thin = module.kernel_size == (1, 1) and module.padding == (0, 0) and module.stride != (1, 1)
    if thin:
        geometry = geometry._replace(size=output.shape[2:], stride=(1, 1))

    def back(flow: Flow) -> Sequence[Flow]:
        gradient = None
        if lone := flow.lone():
            gradient = from_one_channel(lone.values, weight[lone.channel], geometry)
        if gradient is None:
            whole, factor = flow.apart()
            gradient = by_input(whole, weight if factor is None else weight * factor.transpose(0, 1), geometry)
        return [Flow((Thin(gradient, size, module.stride) if thin else gradient,))]

    return output, back


def linear(module: nn.Linear, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Propagate through a linear layer by the transposed weights."""
    weight = sent(module.weight)
    return F.linear(x, weight, sent(module.bias)), lambda flow: [Flow((flow.whole() @ weight,))]


def batchnorm(module: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Propagate through BatchNorm by one factor per channel.

    If the batch's statistics are used, the terms of the mean and the deviation are added.
    """
    shape = 1, -1, *[1] * (x.ndim - 2)
    mean, var, weight = sent(module.running_mean), sent(module.running_var), sent(module.weight)
    of_batch = mean is None
    bias, eps = sent(module.bias), module.eps
    normalised, centre, factor = torch.native_batch_norm(x, weight, bias, mean, var, of_batch, 0.0, eps)
    output = laid_out(normalised)  # some versions of torch lose the layout

    @cache
    def slope() -> Tensor:
        inverse = factor if of_batch else torch.rsqrt(var + module.eps)
        return (inverse if weight is None else inverse * weight).view(shape).to(x.dtype)

    @cache
    def normal() -> Tensor:
        return laid_out((x - centre.view(shape)) * factor.view(shape)).to(x.dtype)

    if not of_batch:
        return output, lambda flow: [flow.scaled(slope())]
    return output, lambda flow: [Flow((flow.centred(normal()),), slope())]


def relu(module: nn.ReLU, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Propagate through ReLU where the output is positive."""
    output = F.relu(x)
    slope = cache(lambda: (output > 0).to(x.dtype))
    return output, lambda flow: [flow.scaled(slope())]


def activation(module: nn.Module, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Propagate through an elementwise activation by its slope at every entry."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        output = module(leaf.clone())  # a copy, as the module may work in place
        (slope,) = torch.autograd.grad(output.sum(), leaf)
    return output.detach(), lambda flow: [flow.scaled(slope)]


def pool(module: Pool, x: Tensor, sent: Sent) -> tuple[Tensor, Back] | None:
    """Propagate to the maximum of every window, or evenly to all its entries.

    None if the windows do not tile the picture.
    """
    output = module(x)
    if x.ndim != 4 or not isinstance(output, Tensor):
        return None
    window = x.shape[2] // output.shape[2], x.shape[3] // output.shape[3]
    even = tuple(size * parts for size, parts in zip(window, output.shape[2:], strict=True)) == x.shape[2:]
    if not even or not (isinstance(module, nn.AdaptiveAvgPool2d) or _tiles(module, window)):
        return None
    share = torch.full((1,) * x.ndim, 1 / (window[0] * window[1]), dtype=x.dtype, device=x.device)
    if isinstance(module, nn.MaxPool2d):
        _, at = F.max_pool2d(x, window, return_indices=True)
        share = laid_out(F.max_unpool2d(torch.ones_like(output), at, window, output_size=x.shape[2:]))

    def back(flow: Flow) -> Sequence[Flow]:
        lone = flow.lone()
        spread = F.interpolate(lone.values if lone else flow.whole(), scale_factor=window, mode="nearest")
        return [Flow((lone._replace(values=spread) if lone else laid_out(spread),), share)]

    return output, back


def flatten(module: nn.Module, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Propagate through a flattening by the inverse reshape."""
    output: Tensor = module(x)
    shape, single = x.shape[1:], output.ndim == 2 and output.shape[1] == x.shape[1]  # one position per channel

    def back(flow: Flow) -> Sequence[Flow]:
        if single and (lone := flow.lone()):
            return [Flow((lone._replace(values=lone.values.view(-1, 1, *shape[1:])),))]
        return [Flow((laid_out(flow.whole().reshape(-1, *shape)),))]

    return output, back


def identity(module: nn.Module, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Propagate unchanged; also for dropout, as the network is in evaluation mode."""
    return x, lambda flow: [flow]


def by_vjp(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Back]:
    """Propagate through any function of tensors by torch.func.vjp, for many gradients at once."""

    def copied(*tensors: Tensor) -> Tensor:
        return call(*map(plain_copy, tensors))

    output, pull = vjp(copied, *inputs)  # type: ignore[misc]

    def back(flow: Flow) -> Sequence[Flow]:
        gradients = vmap(pull)(parted(flow.whole(), len(output)))
        return [Flow((laid_out(value.flatten(0, 1)),)) for value in gradients]

    return output, back


def plain_copy(x: Tensor) -> Tensor:
    """Return a contiguous copy for a user's function.

    The function may change its input, or request a view that a channels_last tensor does not have.
    """
    return x.clone(memory_format=torch.contiguous_format)


def added(first: Tensor, second: Tensor) -> tuple[Tensor, Back]:
    """Propagate to both summands; the full gradient is computed once for the two."""

    def back(flow: Flow) -> Sequence[Flow]:
        plain = flow.slope is None and len(flow.parts) == 1
        return [flow if plain else Flow((flow.lone() or Shared(flow),))] * 2

    return first + second, back


def _tiles(module: nn.MaxPool2d | nn.AvgPool2d, window: tuple[int, int]) -> bool:
    """Return True if the windows have this size and tile the picture."""
    wanted = {"kernel_size": window, "stride": window, "padding": (0, 0), "dilation": (1, 1)}
    settings = {name: getattr(module, name, right) for name, right in wanted.items()}
    pairs = {name: (size, size) if isinstance(size, int) else tuple(size) for name, size in settings.items()}
    return pairs == wanted and getattr(module, "divisor_override", None) is None


RULES: dict[type[nn.Module], Rule] = {
    nn.Conv2d: convolution,
    nn.Linear: linear,
    nn.BatchNorm1d: batchnorm,
    nn.BatchNorm2d: batchnorm,
    nn.Flatten: flatten,
    **dict.fromkeys((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d), pool),
    **dict.fromkeys((nn.Identity, nn.Dropout, nn.Dropout2d), identity),
    nn.ReLU: relu,
    **dict.fromkeys((nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.SiLU, nn.GELU), activation),
}
