"""L1 and L2 structured pruning: whole filters of least norm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.channels import Channels, analyse
from secateur.pruning.masks import Scope, check_sparsity, one_of, prune_lowest
from secateur.pruning.structure import Form, Groups, channel_mask, coupled_layers, filter_layers, filter_mask


@method("pruner", "l1-structured", "samia_ppb")
@dataclass(frozen=True)
class L1Structured:
    """Drops the filters of least L1 norm, conv by conv (L1 structured; Li et al. 2017, in samia_ppb).

    On a net without convolutions the filters are the output rows of every Linear but the last. `groups`: "per-conv"
    chooses in every layer by itself, as the paper; "coupled" chooses the channels that a shortcut joins together.
    `mask`: "full" covers the filter, its bias and every BatchNorm gamma and beta that reads it; "conv-only" covers
    the weight alone, as the authors' code (the BatchNorm's shift still speaks, and it is never removed for real).
    """

    scope: Scope = "layer"
    groups: Groups = "per-conv"
    mask: Form = "full"

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        return _prune(self, net, batch, sparsity, order=1)


@method("pruner", "l2-structured", "samia_ppb")
@dataclass(frozen=True)
class L2Structured:
    """Drops the filters of least L2 norm, conv by conv (L2 structured; He et al. 2018, in samia_ppb).

    The fields are those of l1-structured.
    """

    scope: Scope = "layer"
    groups: Groups = "per-conv"
    mask: Form = "full"

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        return _prune(self, net, batch, sparsity, order=2)


def _prune(how: L1Structured | L2Structured, net: nn.Module, batch: Batch, sparsity: float, order: int) -> Mask:
    check_sparsity(sparsity)
    one_of("groups", how.groups, get_args(Groups))
    one_of("mask", how.mask, get_args(Form))
    norms = filter_norms(net, order)
    if (how.groups, how.mask) == ("per-conv", "conv-only"):  # needs no graph, so any module will do
        return filter_mask(net, prune_lowest(norms, sparsity, how.scope), bias=False)
    channels = analyse(net, tuple(batch.inputs.shape[1:]))
    if how.groups == "coupled":
        rows = _choose_coupled(channels, norms, sparsity, order, how.scope)
    else:
        rows = prune_lowest(norms, sparsity, how.scope)
    dead = torch.zeros(len(channels.group), dtype=torch.bool)
    for name, kept in rows.items():
        dead[channels.makes[name]] = ~kept
    return channel_mask(net, channels, channels.spread(dead), how.mask)


def filter_norms(net: nn.Module, order: int) -> Params:
    """The L1 or L2 norm of every filter, by layer."""
    weights: Params = {name: net.get_submodule(name).weight for name in filter_layers(net)}  # type: ignore[misc]
    return {name: w.detach().flatten(1).norm(order, dim=1).cpu() for name, w in weights.items()}


def _choose_coupled(channels: Channels, norms: Params, sparsity: float, order: int, scope: str) -> dict[str, Tensor]:
    """As `prune_lowest`, over the norm of all filters of a group together."""
    powers = torch.zeros(len(channels.group), dtype=torch.float64)
    for name, norm in norms.items():
        powers.index_add_(0, channels.group[channels.makes[name]], norm.double() ** order)
    layers = coupled_layers(channels, norms)
    chosen = prune_lowest({name: powers[groups] ** (1 / order) for name, groups in layers.items()}, sparsity, scope)
    keep = torch.ones(len(channels.group), dtype=torch.bool)
    for name, groups in layers.items():
        keep[groups] = chosen[name]
    return {name: keep[channels.group[channels.makes[name]]] for name in norms}
