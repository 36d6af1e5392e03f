"""Real removal: a smaller dense network with the function of a masked one, and the savings of both."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.errors import WrongInput
from secateur.interfaces import Mask
from secateur.metrics.cost import Cost, cost
from secateur.models.create import example_rows
from secateur.pruning.channels import CONVS, Channels, Depthwise, Sum, analyse, is_depthwise
from secateur.pruning.masks import LAYERS
from secateur.tree import apply_mask


@dataclass(frozen=True)
class Savings:
    """Savings of a pruning. The masked model has the original's shapes, so its cost is the original's."""

    masked: Cost
    removed: Cost | None  # None if the mask cannot really be removed; `note` says why
    nonzero: int  # parameters of the masked model that are not zero
    masked_share: float  # share of the Conv weights (of the Linear weights in a net without Conv) set to zero
    removed_share: float  # share of the same weights removed; near 1 - (1 - s)^2 if inputs and outputs both shrink
    note: str = ""


def remove(net: nn.Module, mask: Mask, input_shape: tuple[int, ...]) -> nn.Module:
    """Return a masked copy of the net without its dead channels; in eval mode the outputs are the same.

    A channel is removed only if its whole group is dead: the layers that make it, the BatchNorms that read it, and all
    summands of a shortcut. Other masked channels stay as zeros. Masks of single weights and masks of the form
    conv-only cannot be removed and raise WrongInput.
    """
    masked = apply_mask(copy.deepcopy(net), mask)
    try:
        channels = analyse(masked, input_shape)
    except WrongInput as error:  # its advice is for pruning
        problem = f"{error.message.partition(';')[0]}, so no channel can be removed"
        raise WrongInput(error.field, f"{problem}; leave it masked, or prune with torch-pruning") from error
    gone = channels.all_of_group(dead_atoms(masked, mask, channels) & ~channels.fixed)
    small = copy.deepcopy(masked)
    for name, atoms in channels.makes.items():
        shrink_layer(small, name, ~gone[atoms], ~gone[channels.reads[name]])
    for name, norm in channels.norms.items():
        shrink_norm(small, name, ~gone[norm.reads])
    _check_same(masked, small, input_shape)
    return small


def dead_atoms(net: nn.Module, mask: Mask, channels: Channels) -> Tensor:
    """Return (atoms,) bool: where the masked net is exactly zero for every input."""
    dead = torch.zeros(len(channels.group), dtype=torch.bool)
    for name, atoms in channels.makes.items():
        dead[atoms] = _dead_rows(net.get_submodule(name), name, mask)
    for step in channels.steps:
        if isinstance(step, Sum):
            dead[step.gives] = dead[step.left] & dead[step.right]
        elif isinstance(step, Depthwise):
            if net.get_submodule(step.name).bias is not None and (dead[step.reads] & ~dead[step.gives]).any():
                raise _conv_only(f"the bias of {step.name} still speaks where its channel is masked")
            dead[step.gives] |= dead[step.reads]
        elif isinstance(net.get_submodule(step.name).weight, Tensor):
            closed = _mask_dropped(mask, f"{step.name}.weight", len(step.gives))
            closed &= _mask_dropped(mask, f"{step.name}.bias", len(step.gives))
            if (dead[step.reads] & ~closed).any():
                raise _conv_only(f"the BatchNorm {step.name} still shifts a filter that is masked")
            dead[step.gives] = closed
    for operation, atoms in channels.shifts:
        if dead[atoms].any():
            raise WrongInput("mask", f"cannot be removed: {operation} turns a masked channel into something but zero")
    return dead


def _dead_rows(layer: nn.Module, name: str, mask: Mask) -> Tensor:
    """Return (n,) bool: the outputs of a layer whose weight and bias are all masked."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    kept = mask.get(f"{name}.weight", torch.ones_like(weight, dtype=torch.bool)).flatten(1).cpu()
    if (kept.any(1) != kept.all(1)).any():
        raise WrongInput("mask", f"drops single weights of layer {name!r}; only masks of whole filters can be removed")
    rows = ~kept.any(1)
    if layer.bias is not None and (rows & ~_mask_dropped(mask, f"{name}.bias", len(rows))).any():
        raise _conv_only(f"the bias of {name} still speaks where its filter is masked")
    return rows


def _mask_dropped(mask: Mask, name: str, length: int) -> Tensor:
    """Return (length,) bool: the entries that the mask drops; none if the tensor has no mask."""
    return ~mask[name].cpu() if name in mask else torch.zeros(length, dtype=torch.bool)


def _conv_only(why: str) -> WrongInput:
    """Return the error for a mask of the form conv-only."""
    return WrongInput("mask", f"cannot be removed: {why}; prune with mask full instead of conv-only")


def shrink_layer(net: nn.Module, name: str, outputs: Tensor, inputs: Tensor) -> None:
    """Shrink a convolution or linear layer to these outputs and inputs, (n,) bool each, in place."""
    layer = net.get_submodule(name)
    if not outputs.any() or not inputs.any():
        raise WrongInput("mask", f"would leave the layer {name} without channels; keep at least one")
    depthwise = is_depthwise(layer)
    _slice(layer, "weight", outputs, None if depthwise else inputs)
    _slice(layer, "bias", outputs)
    if depthwise:
        layer.groups = int(outputs.sum())  # type: ignore[assignment]
    unit = "features" if isinstance(layer, nn.Linear) else "channels"
    setattr(layer, f"out_{unit}", int(outputs.sum()))
    setattr(layer, f"in_{unit}", int(inputs.sum()))


def shrink_norm(net: nn.Module, name: str, kept: Tensor) -> None:
    """Shrink a BatchNorm to these channels, (n,) bool, in place."""
    layer = net.get_submodule(name)
    for part in ("weight", "bias", "running_mean", "running_var"):
        _slice(layer, part, kept)
    layer.num_features = int(kept.sum())  # type: ignore[assignment]


def _slice(layer: nn.Module, part: str, rows: Tensor, columns: Tensor | None = None) -> None:
    """Keep some rows (and columns) of a parameter or buffer, if the layer has it."""
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
    rows = example_rows(masked, input_shape)
    with torch.no_grad():
        wanted = masked.eval()(rows)
        try:
            got = copy.deepcopy(small).eval()(rows)
            same = got.shape == wanted.shape and bool((got - wanted).abs().max() <= 1e-4 * (1 + wanted.abs().max()))
        except RuntimeError:
            same = False
    if not same:
        raise WrongInput("model", "its forward does not follow narrower layers (does it name a number of channels?)")


def savings(net: nn.Module, mask: Mask, input_shape: tuple[int, ...], repeats: int = 30) -> Savings:
    """Measure a masked copy of the net, and a copy without the channels that can be removed."""
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
    """Return the weights over which a structured sparsity is counted."""
    convs = [module.weight for module in net.modules() if isinstance(module, CONVS)]
    return convs or [module.weight for module in net.modules() if isinstance(module, LAYERS)]
