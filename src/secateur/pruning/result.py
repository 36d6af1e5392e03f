"""What a pruning saves: the masked model against the removed one."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.errors import WrongInput
from secateur.interfaces import Mask
from secateur.metrics.cost import Cost, cost
from secateur.pruning.masks import LAYERS
from secateur.pruning.operations import CONVS
from secateur.pruning.removal import remove
from secateur.tree import apply_mask


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
