"""Real removal: from a masked network to a smaller dense one with the same function.

What a pruning saves: the masked model against the removed one.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur.errors import WrongInput
from secateur.interfaces import Mask
from secateur.metrics.cost import Cost, cost
from secateur.pruning.channels import CONVS, Channels, Norm, analyse
from secateur.pruning.masks import LAYERS
from secateur.tree import apply_mask


def remove(net: nn.Module, mask: Mask, input_shape: tuple[int, ...]) -> nn.Module:
    """A copy of the net, masked, without the channels that the mask kills; in eval mode its outputs are the same.

    A channel goes only when its whole group is dead: every layer that makes it, every BatchNorm that reads it, and
    every summand of a shortcut. What is masked without that stays as zeros. Masks of single weights and masks of the
    form conv-only cannot be removed and are wrong input.
    """
    masked = apply_mask(copy.deepcopy(net), mask)
    channels = analyse(masked, input_shape)
    gone = channels.everywhere(dead_atoms(masked, mask, channels) & ~channels.fixed)
    small = copy.deepcopy(masked)
    for name, atoms in channels.makes.items():
        shrink_layer(small, name, ~gone[atoms], ~gone[channels.reads[name]])
    for name, norm in channels.norms.items():
        shrink_norm(small, name, ~gone[norm.reads])
    _check_same(masked, small, input_shape)
    return small


def dead_atoms(net: nn.Module, mask: Mask, channels: Channels) -> Tensor:
    """(atoms,) bool: where the masked net is exactly zero, for every input."""
    dead = torch.zeros(len(channels.group), dtype=torch.bool)
    for name, atoms in channels.makes.items():
        dead[atoms] = _dead_rows(net.get_submodule(name), name, mask)
    for step in channels.steps:
        if not isinstance(step, Norm):
            dead[step.gives] = dead[step.left] & dead[step.right]
        elif isinstance(net.get_submodule(step.name).weight, Tensor):
            closed = _dropped(mask, f"{step.name}.weight", len(step.gives))
            closed &= _dropped(mask, f"{step.name}.bias", len(step.gives))
            if (dead[step.reads] & ~closed).any():
                raise _conv_only(f"the BatchNorm {step.name} still shifts a filter that is masked")
            dead[step.gives] = closed
    for operation, atoms in channels.shifts:
        if dead[atoms].any():
            raise WrongInput("mask", f"cannot be removed: {operation} turns a masked channel into something but zero")
    return dead


def _dead_rows(layer: nn.Module, name: str, mask: Mask) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]
    kept = mask.get(f"{name}.weight", torch.ones_like(weight, dtype=torch.bool)).flatten(1).cpu()
    if (kept.any(1) != kept.all(1)).any():
        raise WrongInput("mask", f"drops single weights of layer {name!r}; only masks of whole filters can be removed")
    rows = ~kept.any(1)
    if layer.bias is not None and (rows & ~_dropped(mask, f"{name}.bias", len(rows))).any():
        raise _conv_only(f"the bias of {name} still speaks where its filter is masked")
    return rows


def _dropped(mask: Mask, name: str, length: int) -> Tensor:
    return ~mask[name].cpu() if name in mask else torch.zeros(length, dtype=torch.bool)


def _conv_only(why: str) -> WrongInput:
    return WrongInput("mask", f"cannot be removed: {why}; prune with mask full instead of conv-only")


def shrink_layer(net: nn.Module, name: str, outputs: Tensor, inputs: Tensor) -> None:
    """Leave a convolution or linear layer these outputs and inputs, (n,) bool each, in place."""
    layer = net.get_submodule(name)
    if not outputs.any() or not inputs.any():
        raise WrongInput("mask", f"would leave the layer {name} without channels; keep at least one")
    _slice(layer, "weight", outputs, inputs)
    _slice(layer, "bias", outputs)
    unit = "features" if isinstance(layer, nn.Linear) else "channels"
    setattr(layer, f"out_{unit}", int(outputs.sum()))
    setattr(layer, f"in_{unit}", int(inputs.sum()))


def shrink_norm(net: nn.Module, name: str, kept: Tensor) -> None:
    """Leave a BatchNorm these channels, (n,) bool, in place."""
    layer = net.get_submodule(name)
    for part in ("weight", "bias", "running_mean", "running_var"):
        _slice(layer, part, kept)
    layer.num_features = int(kept.sum())  # type: ignore[assignment]


def _slice(layer: nn.Module, part: str, rows: Tensor, columns: Tensor | None = None) -> None:
    """Keep some rows (and columns) of a parameter or buffer, where the layer has it."""
    value = getattr(layer, part)
    if value is None:
        return
    kept = value.detach()[rows.to(value.device)]
    if columns is not None:
        kept = kept[:, columns.to(value.device)]
    is_parameter = isinstance(value, nn.Parameter)
    setattr(layer, part, nn.Parameter(kept, value.requires_grad) if is_parameter else kept)


def _check_same(masked: nn.Module, small: nn.Module, input_shape: tuple[int, ...]) -> None:
    """Refuse a model whose forward does not follow its layers' new widths, such as one that names a size itself.

    `masked` is put into eval mode.
    """
    first = next(masked.parameters())
    rows = torch.randn(2, *input_shape, generator=Generator().manual_seed(0)).to(first)
    with torch.no_grad():
        wanted = masked.eval()(rows)
        try:
            got = copy.deepcopy(small).eval()(rows)
            same = got.shape == wanted.shape and bool((got - wanted).abs().max() <= 1e-4 * (1 + wanted.abs().max()))
        except RuntimeError:
            same = False
    if not same:
        raise WrongInput("model", "its forward does not follow narrower layers (does it name a number of channels?)")


@dataclass(frozen=True)
class Savings:
    """What was removed. The masked model has the original's shapes, so its cost is the original's."""

    masked: Cost
    removed: Cost | None  # None where the mask cannot be removed for real; `note` says why
    nonzero: int  # parameters of the masked model that are not zero
    masked_share: float  # of the Conv weights (of the Linear weights in a net without Conv): set to zero
    removed_share: float  # of the same weights: really gone; near 1 - (1 - s)^2 where inputs and outputs both shrink
    note: str = ""


def savings(net: nn.Module, mask: Mask, input_shape: tuple[int, ...], repeats: int = 30) -> Savings:
    """Mask a copy, remove from another what can be removed, and measure both."""
    masked = apply_mask(copy.deepcopy(net), mask)
    small, note = None, ""
    try:
        small = remove(net, mask, input_shape)
    except WrongInput as error:
        note = str(error)
    before = _weights(masked)
    total = sum(value.numel() for value in before)
    return Savings(
        masked=cost(masked, input_shape, repeats),
        removed=cost(small, input_shape, repeats) if small is not None else None,
        nonzero=sum(int(torch.count_nonzero(value)) for value in masked.parameters()),
        masked_share=1 - sum(int(torch.count_nonzero(value)) for value in before) / total,
        removed_share=1 - sum(value.numel() for value in _weights(small)) / total if small is not None else 0.0,
        note=note,
    )


def _weights(net: nn.Module) -> list[Tensor]:
    """The weights that a structured sparsity is counted over."""
    convs = [module.weight for module in net.modules() if isinstance(module, CONVS)]
    return convs or [module.weight for module in net.modules() if isinstance(module, LAYERS)]
