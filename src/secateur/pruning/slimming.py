"""Network slimming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.channels import NORMS, Channels, Depthwise, Sum, analyse
from secateur.pruning.filters import Form, Groups, channel_mask, check_channels, group_layers
from secateur.pruning.masks import prune_lowest, warn_of_floor


@method("pruner", "slimming", "samia_ppb")
@dataclass(frozen=True)
class Slimming:
    """Drops the channels of least |gamma| under one global threshold (network slimming; Liu et al. 2017, in samia_ppb).

    The original is trained with `l1` * sum |gamma| (the paper's Eq. 1; `penalty`). A filter is dropped if every
    BatchNorm that reads it drops its channel and nothing else reads it. `groups` and `mask` are those of l1-structured.
    With "coupled" a group's score is the mean of its |gamma|, so that one threshold suits large and small groups.

    Equation: `L = CE + l1 sum |gamma|; score(channel) = |gamma|; the lowest go`.
    """

    l1: float = 1e-4
    groups: Groups = "per-conv"
    mask: Form = "full"

    def penalty(self, net: nn.Module) -> Callable[[Params], Tensor]:
        """Return the function `l1` * sum |gamma| of the parameters, a term of the original's training loss."""
        names = [f"{name}.weight" for name, module in net.named_modules() if _has_gamma(module)]
        if not names:
            raise _no_gamma()
        return lambda params: self.l1 * torch.stack([params[name].abs().sum() for name in names]).sum()

    def check(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        """Refuse a network without gammas, or one that the channel analysis cannot follow."""
        if not any(_has_gamma(module) for module in net.modules()):
            raise _no_gamma()
        analyse(net, input_shape)

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """Return the mask."""
        check_channels(self, sparsity)
        if not any(_has_gamma(module) for module in net.modules()):
            raise _no_gamma()
        channels = analyse(net, tuple(batch.inputs.shape[1:]))
        gammas: Params = {
            name: net.get_submodule(name).weight.detach().abs().cpu()  # type: ignore[operator]
            for name in channels.norms
            if _has_gamma(net.get_submodule(name))
        }
        choose = _mask_coupled if self.groups == "coupled" else _per_conv
        return channel_mask(net, channels, choose(channels, gammas, sparsity), self.mask)


def _has_gamma(module: nn.Module) -> bool:
    return isinstance(module, NORMS) and module.weight is not None


def _no_gamma() -> WrongInput:
    return WrongInput("pruner", "slimming needs BatchNorm layers with a gamma, and this model has none")


def _per_conv(channels: Channels, gammas: Params, sparsity: float) -> Tensor:
    """Return an (atoms,) mask of the dead atoms, if the channels of every BatchNorm are chosen independently.

    In a DenseNet many BatchNorms read one channel, and one BatchNorm reads many layers. A layer that several choices
    together would empty keeps its best channel.
    """
    dead, floored = _dead_atoms(channels, gammas, prune_lowest(gammas, sparsity, "global"))
    is_read = channels.raw.clone()
    for norm in channels.norms.values():
        is_read[norm.reads[~dead[norm.gives]]] = True
    follows = {step.name: step.reads for step in channels.steps if isinstance(step, Depthwise)}
    for name, atoms in channels.makes.items():
        if not is_read[atoms].any() and (readers := _readers(channels, gammas, atoms)):
            floored.append(name)
            _, norm_name, position = max(readers)
            norm = channels.norms[norm_name]
            dead[norm.gives[position]] = False
            is_read[norm.reads[position]] = True
        dead[atoms] = ~is_read[atoms] | dead[follows[name]] if name in follows else ~is_read[atoms]
    warn_of_floor(floored)
    return dead


def _dead_atoms(channels: Channels, gammas: Params, kept: Mask) -> tuple[Tensor, list[str]]:
    """Return the atoms that are zero behind the BatchNorms, and the BatchNorms that would have lost every channel.

    A channel that is dead before a BatchNorm is dead behind it, for any gamma.
    """
    dead = torch.zeros(len(channels.group), dtype=torch.bool)
    floored = []
    for step in channels.steps:
        if isinstance(step, Sum):
            dead[step.gives] = dead[step.left] & dead[step.right]
            continue
        if isinstance(step, Depthwise):
            dead[step.gives] = dead[step.reads]
            continue
        arrives = ~dead[step.reads]
        alive = kept.get(step.name, arrives) & arrives
        if not alive.any():
            floored.append(step.name)
            alive[gammas[step.name].where(arrives, -1).argmax()] = True
        dead[step.gives] = ~alive
    return dead, floored


def _readers(channels: Channels, gammas: Params, atoms: Tensor) -> list[tuple[float, str, int]]:
    """Return the BatchNorm channels that read the atoms, with their |gamma|."""
    return [
        (float(gammas[name][position]), name, position)
        for name in gammas
        for position in torch.isin(channels.norms[name].reads, atoms).nonzero().flatten().tolist()
    ]


def _mask_coupled(channels: Channels, gammas: Params, sparsity: float) -> Tensor:
    """Return an (atoms,) mask of the dead atoms, if groups are chosen by the mean of their |gamma|."""
    total, count = torch.zeros(2, len(channels.group), dtype=torch.float64)
    for name, gamma in gammas.items():
        groups = channels.group[channels.norms[name].gives]
        total.index_add_(0, groups, gamma.double())
        count.index_add_(0, groups, torch.ones_like(gamma, dtype=torch.float64))
    layers = {name: ids[count[ids] > 0] for name, ids in group_layers(channels, channels.makes).items()}
    layers = {name: ids for name, ids in layers.items() if len(ids)}
    chosen = prune_lowest({name: total[ids] / count[ids] for name, ids in layers.items()}, sparsity, "global")
    gone = torch.zeros(len(channels.group), dtype=torch.bool)
    for name, ids in layers.items():
        gone[ids] = ~chosen[name]
    return gone[channels.group]
