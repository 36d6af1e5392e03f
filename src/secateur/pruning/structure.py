"""From whole channels to masks: what filter pruning and slimming share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor, nn

from secateur.errors import WrongInput
from secateur.interfaces import Mask
from secateur.pruning.channels import Channels
from secateur.pruning.operations import CONVS

Groups = Literal["per-conv", "coupled"]
Form = Literal["full", "conv-only"]  # of a mask


def filter_layers(net: nn.Module) -> list[str]:
    """The layers whose output channels are pruned: every Conv, or in a net without any every Linear but the last."""
    modules = dict(net.named_modules())
    convs = [name for name, module in modules.items() if isinstance(module, CONVS)]
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not (names := convs or linears[:-1]):
        raise WrongInput("model", "it has no Conv and no Linear before its last layer, so it has no filters to prune")
    return names


def coupled_layers(channels: Channels, layers: Iterable[str]) -> dict[str, Tensor]:
    """The groups of channels that can go, by the layers that make them; a shortcut joins several into one entry.

    A group that holds an input or an output of the network, or a channel of a layer not asked for, stays.
    """
    layers = list(layers)
    stays = set(channels.group[channels.fixed].tolist())
    makers: dict[int, dict[str, None]] = defaultdict(dict)
    for name, atoms in channels.makes.items():
        for group in channels.group[atoms].tolist():
            makers[group][name] = None
            if name not in layers:
                stays.add(group)
    found: dict[str, list[int]] = defaultdict(list)
    for group, names in makers.items():
        if group not in stays:
            found["+".join(names)].append(group)
    if not found:
        raise WrongInput("groups", "coupled leaves nothing to prune: every channel is tied to an input or an output")
    return {name: torch.tensor(groups) for name, groups in found.items()}


def filter_mask(net: nn.Module, rows: dict[str, Tensor], bias: bool) -> Mask:
    """The mask that keeps these output channels of Conv and Linear layers, in the weight alone or in the bias too."""
    mask: Mask = {}
    for name, kept in rows.items():
        layer = net.get_submodule(name)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        kept = kept.to(weight.device)
        mask[f"{name}.weight"] = kept.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight).clone()
        if bias and layer.bias is not None:
            mask[f"{name}.bias"] = kept.clone()
    return mask


def channel_mask(net: nn.Module, channels: Channels, dead: Tensor, form: str) -> Mask:
    """The mask of dead atoms: filters, and in the full form their biases and the gammas and betas that read them."""
    rows = {name: ~dead[atoms] for name, atoms in channels.makes.items() if dead[atoms].any()}
    mask = filter_mask(net, rows, bias=form == "full")
    if form == "full":
        for name, norm in channels.norms.items():
            layer = net.get_submodule(name)
            if isinstance(layer.weight, Tensor):
                kept = ~dead[norm.gives].to(layer.weight.device)
                mask |= {f"{name}.weight": kept, f"{name}.bias": kept.clone()}
    return mask
