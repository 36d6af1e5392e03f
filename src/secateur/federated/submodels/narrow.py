"""A network of a client's width: its structure, static BatchNorm and the Scaler (HeteroFL; mapp_fl Section 7)."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur.federated.submodels.cutting import Asked, Structure
from secateur.federated.submodels.rules.heterofl import HeteroFL
from secateur.models.create import check
from secateur.models.mapp import Scaler
from secateur.pruning.operations import NORMS
from secateur.pruning.removal import shrink_layer, shrink_norm


def static(net: nn.Module) -> nn.Module:
    """A copy whose BatchNorms take the batch's own statistics, in training and in testing, and keep none."""
    made = copy.deepcopy(net)
    for module in made.modules():
        if isinstance(module, NORMS):
            module.track_running_stats = False
            module.running_mean = module.running_var = module.num_batches_tracked = None
    return made


def narrowed(
    net: nn.Module, structure: Structure, rate: float, scaler: bool, input_shape: tuple[int, ...], classes: int
) -> nn.Module:
    """The structure of a client's model that keeps this share of the channels; its weights mean nothing."""
    made = copy.deepcopy(net)
    if rate == 1:
        return made
    cut = structure.cut(HeteroFL(), Asked(0, 1, 1), rate)  # any rule's sub-models have this structure
    for name, layer in structure.layers.items():
        outputs, inputs = (torch.zeros(len(each), dtype=torch.bool) for each in layer)
        outputs[cut.channels[name]] = True
        inputs[cut.inputs(name, len(inputs))] = True
        shrink_layer(made, name, outputs, inputs)
    for name, places in structure.norms.items():
        kept = torch.zeros(len(places), dtype=torch.bool)
        kept[cut.channels[name]] = True
        shrink_norm(made, name, kept)
    _scale(made, rate, scaler, [name for name in structure.layers if name not in structure.outputs])
    check(made, input_shape, classes)
    return made


def _scale(net: nn.Module, rate: float, scaler: bool, layers: list[str]) -> None:
    """Divide what hidden layers give by the share of channels kept (mapp_fl Eq. 9): in the network's own Scalers.

    A network without any gets the same behind its layers.
    """
    own = [module for module in net.modules() if isinstance(module, Scaler)]
    for module in own:
        module.rate = rate if scaler else 1.0
    for name in layers if scaler and not own else ():
        net.get_submodule(name).register_forward_hook(partial(_divided, rate))


def _divided(rate: float, layer: nn.Module, given: Any, made: Tensor) -> Tensor:
    return made / rate
