"""How the layers of a network take the gradients of many features back, each by what it alone knows.

A rule runs a layer on the batch and returns its output and the way back. What has no rule goes by torch.func.
A layer's settings are its module's; its tensors are asked for, as those that were sent count. What only the way back
needs is made there, once: a GPU waits for the host while the batch goes forward, and no longer afterwards.
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
Back = Callable[[Flow], Sequence[Flow]]  # of the output -> of every input
Sent = Callable[[Any], Any]  # a tensor of the module, or None -> what was sent for it
Rule = Callable[[Any, Tensor, Sent], tuple[Tensor, Back] | None]  # None: this one is out of the ordinary


def convolution(module: nn.Conv2d, x: Tensor, sent: Sent) -> tuple[Tensor, Back] | None:
    """By the transposed convolution or its like; no gradient of a weight is ever taken."""
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
    """By the weights' transpose."""
    weight = sent(module.weight)
    return F.linear(x, weight, sent(module.bias)), lambda flow: [Flow((flow.whole() @ weight,))]


def batchnorm(module: nn.BatchNorm1d | nn.BatchNorm2d, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """A factor a channel; by the batch's own statistics also what the means and the deviations answer."""
    shape = 1, -1, *[1] * (x.ndim - 2)
    mean, var, weight = sent(module.running_mean), sent(module.running_var), sent(module.weight)
    own = mean is None
    found, centre, factor = torch.native_batch_norm(x, weight, sent(module.bias), mean, var, own, 0.0, module.eps)
    output = laid_out(found)  # some versions forget the layout

    @cache
    def slope() -> Tensor:
        inverse = factor if own else torch.rsqrt(var + module.eps)
        return (inverse if weight is None else inverse * weight).view(shape).to(x.dtype)

    @cache
    def normal() -> Tensor:
        return laid_out((x - centre.view(shape)) * factor.view(shape)).to(x.dtype)

    if not own:
        return output, lambda flow: [flow.scaled(slope())]
    return output, lambda flow: [Flow((flow.centred(normal()),), slope())]


def relu(module: nn.ReLU, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """Where it is on."""
    output = F.relu(x)
    slope = cache(lambda: (output > 0).to(x.dtype))
    return output, lambda flow: [flow.scaled(slope())]


def activation(module: nn.Module, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """By the slope at every place."""
    with torch.enable_grad():
        leaf = x.detach().requires_grad_()
        output = module(leaf.clone())  # a copy: it may work in place
        (slope,) = torch.autograd.grad(output.sum(), leaf)
    return output.detach(), lambda flow: [flow.scaled(slope)]


def pool(module: Pool, x: Tensor, sent: Sent) -> tuple[Tensor, Back] | None:
    """To the largest place of every window, or to all alike, where windows tile the picture."""
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
    """To where every number was."""
    output: Tensor = module(x)
    shape, single = x.shape[1:], output.ndim == 2 and output.shape[1] == x.shape[1]  # places of a picture

    def back(flow: Flow) -> Sequence[Flow]:
        if single and (lone := flow.lone()):
            return [Flow((lone._replace(values=lone.values.view(-1, 1, *shape[1:])),))]
        return [Flow((laid_out(flow.whole().reshape(-1, *shape)),))]

    return output, back


def identity(module: nn.Module, x: Tensor, sent: Sent) -> tuple[Tensor, Back]:
    """As it is: also a dropout, as the network is evaluated."""
    return x, lambda flow: [flow]


def by_vjp(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Back]:
    """Any function of tensors: its own derivative, for many gradients at once."""

    def copied(*given: Tensor) -> Tensor:
        return call(*map(plain_copy, given))

    output, pull = vjp(copied, *inputs)  # type: ignore[misc]

    def back(flow: Flow) -> Sequence[Flow]:
        found = vmap(pull)(parted(flow.whole(), len(output)))
        return [Flow((laid_out(value.flatten(0, 1)),)) for value in found]

    return output, back


def plain_copy(x: Tensor) -> Tensor:
    """A copy for a function of the user's, which may change it, or ask for a view that no channels_last tensor has."""
    return x.clone(memory_format=torch.contiguous_format)


def added(first: Tensor, second: Tensor) -> tuple[Tensor, Back]:
    """To both; the sum of what came is taken once for the two."""

    def back(flow: Flow) -> Sequence[Flow]:
        plain = flow.slope is None and len(flow.parts) == 1
        return [flow if plain else Flow((flow.lone() or Shared(flow),))] * 2

    return first + second, back


def _tiles(module: nn.MaxPool2d | nn.AvgPool2d, window: tuple[int, int]) -> bool:
    """Whether its windows are of this size, and lie side by side."""
    wanted = {"kernel_size": window, "stride": window, "padding": (0, 0), "dilation": (1, 1)}
    found = {name: getattr(module, name, right) for name, right in wanted.items()}
    pairs = {name: (size, size) if isinstance(size, int) else tuple(size) for name, size in found.items()}
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
