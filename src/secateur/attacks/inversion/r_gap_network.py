"""Network as the chain of layers that R-GAP inverts: linear maps, each followed by an invertible activation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.attacks.inversion.problem import structure
from secateur.errors import WrongInput
from secateur.functional import Noisy
from secateur.interfaces import Knowledge, Params

EDGE = 1e-15  # distance from the end of an activation's range: perturbed updates lead beyond the range


def _unsoftplus(module: nn.Softplus, y: Tensor) -> Tensor:
    positive = y.clamp_min(EDGE)
    curved = positive + torch.log(-torch.expm1(-module.beta * positive)) / module.beta
    return torch.where(module.beta * curved > module.threshold, y, curved)


Inverse = Callable[[nn.Module, Tensor], Tensor]
INVERSES: dict[type[nn.Module], Inverse] = {
    nn.Identity: lambda m, y: y,
    nn.LeakyReLU: lambda m, y: torch.where(y < 0, y / m.negative_slope, y),  # type: ignore[operator]
    nn.ELU: lambda m, y: torch.where(y < 0, torch.log1p((y / m.alpha).clamp_min(EDGE - 1)), y),  # type: ignore[operator]
    nn.Sigmoid: lambda m, y: y.clamp(EDGE, 1 - EDGE).logit(),
    nn.Tanh: lambda m, y: y.clamp(EDGE - 1, 1 - EDGE).atanh(),
    nn.Softplus: _unsoftplus,  # type: ignore[dict-item]
}
REASONS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (nn.ReLU, "loses all that is below 0, so it cannot be undone; LeakyReLU can"),
    (_BatchNorm, "is a normalisation, which the recursion does not pass"),
    ((nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), "pools, so it cannot be undone"),
)
ALLOWED = "Conv2d without bias, Linear, Flatten, LeakyReLU, ELU, Sigmoid, Tanh, Softplus"


@dataclass(frozen=True, eq=False)
class LinearMap:
    """Linear map of the chain and the activation after it; a Linear is a convolution of a picture of one pixel."""

    name: str
    weight: Tensor  # (O, C, h, w)
    bias: Tensor | None  # (O,); only for a Linear
    shape: tuple[int, int, int]  # (C, H, W) of the input
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)
    activation: nn.Module = field(default_factory=nn.Identity)

    @property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the output, (O, H', W')."""
        geometry = zip(self.shape[1:], self.weight.shape[2:], self.stride, self.padding, self.dilation, strict=True)
        height, width = (
            (size + 2 * pad - by * (window - 1) - 1) // step + 1 for size, window, step, pad, by in geometry
        )
        return self.weight.shape[0], height, width

    def undo(self, y: Tensor) -> Tensor:
        """Return the input of the activation for its output y."""
        return INVERSES[type(self.activation)](self.activation, y)

    def slope(self, z: Tensor) -> Tensor:
        """Return the derivative of the activation at z."""
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            output = self.activation(leaf.clone())  # a copy: the activation may work in place
            return torch.autograd.grad(output.sum(), leaf)[0]


class ModuleCall(NamedTuple):
    """Call of a module without children: its input and its output."""

    name: str
    module: nn.Module
    inputs: Tensor
    output: Tensor


def chain(knowledge: Knowledge, sent: Params) -> list[LinearMap]:
    """Return the layers in the order of the forward pass, in float64; refuse a network that is no such chain."""
    values = {name: value.double() if value.is_floating_point() else value for name, value in sent.items()}
    if noisy := [name for name, module in knowledge.net.named_modules() if isinstance(module, Noisy)]:
        raise _make_refusal(f"{noisy[0]} is a sample of noise that the attacker does not have (precode)")
    steps, before, output = _trace(knowledge, values)
    for step in steps:
        reason = _refusal(step.module)
        if reason is not None:
            raise _make_refusal(f"{step.name} ({type(step.module).__name__}) {reason}")
    layers: list[LinearMap] = []
    for name, module, inputs, result in steps:
        _require_same(name, inputs, before)
        before = result
        if isinstance(module, nn.Conv2d | nn.Linear):
            if any(layer.name == name for layer in layers):
                raise _make_refusal(f"{name} is used more than once; every layer must be used once")
            layers.append(_layer(name, module, values, inputs))
        elif not isinstance(module, nn.Flatten | nn.Identity):
            if not layers or type(layers[-1].activation) is not nn.Identity:
                raise _make_refusal(f"{name} must follow a Conv2d or Linear: one activation a layer")
            layers[-1] = replace(layers[-1], activation=module)
    _require_same("the output", output, before)
    if not layers or not isinstance(steps[-1].module, nn.Linear):
        raise _make_refusal("the last module must be Linear: the recursion begins at its gradient")
    return layers


def _trace(knowledge: Knowledge, values: Params) -> tuple[list[ModuleCall], Tensor, Tensor]:
    """Return all module calls of a forward pass of noise in order, the noise, and the output."""
    device = next(iter(values.values())).device
    net = structure(knowledge.net, knowledge.batchnorm).to(device)
    probe = torch.randn(2, *knowledge.input_shape, generator=Generator().manual_seed(0), dtype=torch.double).to(device)
    module_inputs: dict[nn.Module, Tensor] = {}
    steps: list[ModuleCall] = []
    names = {module: name for name, module in net.named_modules() if not list(module.children())}

    def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        module_inputs[module] = inputs[0].clone()  # a copy: activations may work in place

    def leave(module: nn.Module, _: tuple[Tensor, ...], output: Tensor) -> None:
        steps.append(ModuleCall(names[module], module, module_inputs[module], output.clone()))

    hooks = [hook for m in names for hook in (m.register_forward_pre_hook(enter), m.register_forward_hook(leave))]
    with torch.no_grad():
        output = functional_call(net, values, (probe,))
    for hook in hooks:
        hook.remove()
    return steps, probe, output


def _make_refusal(reason: str) -> WrongInput:
    return WrongInput("attack r-gap", f"cannot invert this network: {reason}")


def _refusal(module: nn.Module) -> str | None:
    for kind, reason in REASONS:
        if isinstance(module, kind):
            return reason
    if isinstance(module, nn.Conv2d):
        return _refuse_convolution(module)
    if isinstance(module, nn.LeakyReLU | nn.ELU) and getattr(module, "negative_slope", 1) <= 0:
        return f"has the slope {module.negative_slope}; it can be undone only with one above 0"
    known = type(module) in INVERSES or isinstance(module, nn.Linear | nn.Flatten)
    return None if known else f"is no layer that can be undone; allowed: {ALLOWED}"


def _refuse_convolution(module: nn.Conv2d) -> str | None:
    if module.bias is not None:
        return "has a bias; the recursion is for convolutions without one"
    if module.groups != 1 or module.padding_mode != "zeros" or isinstance(module.padding, str):
        return "must have one group and a padding of zeros, written as numbers"
    return None


def _require_same(name: str, inputs: Tensor, before: Tensor) -> None:
    """Refuse a module whose input differs from the output before it, except in shape: a skip, a product or a pool."""
    if inputs.numel() != before.numel() or not torch.equal(inputs.flatten(), before.flatten()):
        raise _make_refusal(f"{name} does not take the output of the module before it; skips cannot be undone")


def _layer(name: str, module: nn.Conv2d | nn.Linear, values: Params, inputs: Tensor) -> LinearMap:
    weight = values[f"{name}.weight"]
    if isinstance(module, nn.Linear):
        if inputs.ndim != 2:
            raise _make_refusal(f"{name} (Linear) needs a vector as input; put Flatten before it")
        return LinearMap(name, weight[:, :, None, None], values.get(f"{name}.bias"), (inputs.shape[1], 1, 1))
    geometry = (module.stride, module.padding, module.dilation)
    return LinearMap(name, weight, None, tuple(inputs.shape[1:]), *geometry)  # type: ignore[arg-type]
