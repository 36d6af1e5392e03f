"""L1 and L2 structured pruning: whole filters of least norm.

Slimming shares the masks of channels and the groups of coupled layers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.errors import WrongInput, check_number
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.channels import CONVS, Channels, analyse, is_depthwise
from secateur.pruning.masks import Scope, check_name, prune_lowest

Groups = Literal["per-conv", "coupled"]
Form = Literal["full", "conv-only"]  # of a mask


@method("pruner", "l1-structured", "samia_ppb")
@dataclass(frozen=True)
class L1Structured:
    """Drops the filters of least L1 norm, conv by conv (L1 structured; Li et al. 2017, in samia_ppb).

    Equation: `score(filter) = sum |w|; the lowest go`.

    On a net without convolutions the filters are the output rows of every Linear but the last. A depthwise filter goes
    with the channel that it reads.
    `groups`: "per-conv" chooses in every layer by itself, as in the paper; "coupled" chooses all channels that a
    shortcut joins as one.
    `mask`: "full" covers the filter, its bias and every BatchNorm gamma and beta that reads it. "conv-only" covers the
    weight alone, as the authors' code does; the BatchNorm still shifts the channel, so it cannot really be removed.
    """

    order: ClassVar[int] = 1  # of the norm
    scope: Scope = "layer"
    groups: Groups = "per-conv"
    mask: Form = "full"

    def check(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        """Refuse a network without filters, or one that the channel analysis cannot follow where it is needed."""
        filter_layers(net)
        if not self._needs_no_graph:
            analyse(net, input_shape)

    @property
    def _needs_no_graph(self) -> bool:
        return (self.groups, self.mask) == ("per-conv", "conv-only")  # any module will do

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """Return the mask."""
        check_channels(self, sparsity)
        norms = filter_norms(net, self.order)
        if self._needs_no_graph:
            return filter_mask(net, prune_lowest(norms, sparsity, self.scope), bias=False)
        channels = analyse(net, tuple(batch.inputs.shape[1:]))
        if self.groups == "coupled":
            rows = _choose_coupled(channels, norms, sparsity, self.order, self.scope)
        else:
            chosen = {name: norm for name, norm in norms.items() if not is_depthwise(net.get_submodule(name))}
            rows = prune_lowest(chosen, sparsity, self.scope)
        dead = torch.zeros(len(channels.group), dtype=torch.bool)
        for name, kept in rows.items():
            dead[channels.makes[name]] = ~kept
        return channel_mask(net, channels, channels.spread(dead), self.mask)


@method("pruner", "l2-structured", "samia_ppb")
@dataclass(frozen=True)
class L2Structured(L1Structured):
    """Drops the filters of least L2 norm, conv by conv (L2 structured; He et al. 2018, in samia_ppb).

    Equation: `score(filter) = sqrt(sum w^2); the lowest go`.

    The fields are those of l1-structured.
    """

    order: ClassVar[int] = 2


def check_channels(pruner: Any, sparsity: float) -> None:
    """Refuse a sparsity, groups or a form of mask that a pruner of channels cannot use."""
    check_number("sparsity", sparsity, "[0, 1)")
    check_name("groups", pruner.groups, get_args(Groups))
    check_name("mask", pruner.mask, get_args(Form))


def filter_norms(net: nn.Module, order: int) -> Params:
    """Return the L1 or L2 norm of every filter, by layer."""
    weights: Params = {name: net.get_submodule(name).weight for name in filter_layers(net)}  # type: ignore[misc]
    return {name: w.detach().flatten(1).norm(order, dim=1).cpu() for name, w in weights.items()}


def filter_layers(net: nn.Module) -> list[str]:
    """Return the layers whose output channels are pruned: every Conv, or without any every Linear but the last."""
    modules = dict(net.named_modules())
    convs = [name for name, module in modules.items() if isinstance(module, CONVS)]
    linears = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
    if not (names := convs or linears[:-1]):
        raise WrongInput("model", "it has no Conv and no Linear before its last layer, so it has no filters to prune")
    return names


def _choose_coupled(channels: Channels, norms: Params, sparsity: float, order: int, scope: str) -> dict[str, Tensor]:
    """Choose as `prune_lowest`, by the norm of all filters of a group together."""
    powers = torch.zeros(len(channels.group), dtype=torch.float64)
    for name, norm in norms.items():
        powers.index_add_(0, channels.group[channels.makes[name]], norm.double() ** order)
    layers = group_layers(channels, norms)
    chosen = prune_lowest({name: powers[groups] ** (1 / order) for name, groups in layers.items()}, sparsity, scope)
    keep = torch.ones(len(channels.group), dtype=torch.bool)
    for name, groups in layers.items():
        keep[groups] = chosen[name]
    return {name: keep[channels.group[channels.makes[name]]] for name in norms}


def group_layers(channels: Channels, layers: Iterable[str]) -> dict[str, Tensor]:
    """Return the groups of channels that can be removed, by the layers that make them, joined by "+".

    A shortcut couples several layers into one entry. A group with an input or an output of the network, or with a
    channel of a layer that is not in `layers`, stays.
    """
    layers = list(layers)
    stays = set(channels.group[channels.fixed].tolist())
    makers: dict[int, dict[str, None]] = defaultdict(dict)
    for name, atoms in channels.makes.items():
        for group in channels.group[atoms].tolist():
            makers[group][name] = None
            if name not in layers:
                stays.add(group)
    coupled: dict[str, list[int]] = defaultdict(list)
    for group, names in makers.items():
        if group not in stays:
            coupled["+".join(names)].append(group)
    if not coupled:
        raise WrongInput("groups", "coupled leaves nothing to prune: every channel is tied to an input or an output")
    return {name: torch.tensor(groups) for name, groups in coupled.items()}


def channel_mask(net: nn.Module, channels: Channels, dead: Tensor, form: str) -> Mask:
    """Return the mask of dead atoms: their filters; in the full form also biases, and the gammas and betas behind."""
    rows = {name: ~dead[atoms] for name, atoms in channels.makes.items() if dead[atoms].any()}
    mask = filter_mask(net, rows, bias=form == "full")
    if form == "full":
        for name, norm in channels.norms.items():
            layer = net.get_submodule(name)
            if isinstance(layer.weight, Tensor):
                kept = ~dead[norm.gives].to(layer.weight.device)
                mask |= {f"{name}.weight": kept, f"{name}.bias": kept.clone()}
    return mask


def filter_mask(net: nn.Module, rows: dict[str, Tensor], bias: bool) -> Mask:
    """Return the mask that keeps these output channels of Conv and Linear layers, with or without their biases."""
    mask: Mask = {}
    for name, kept in rows.items():
        layer = net.get_submodule(name)
        weight: Tensor = layer.weight  # type: ignore[assignment]
        kept = kept.to(weight.device)
        mask[f"{name}.weight"] = kept.view(-1, *[1] * (weight.dim() - 1)).expand_as(weight).clone()
        if bias and layer.bias is not None:
            mask[f"{name}.bias"] = kept.clone()
    return mask
