"""The loss of one batch on a copy of the network, for the scores that look at gradients."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

from secateur.interfaces import Batch
from secateur.pruning.masks import weights_of
from secateur.pruning.operations import NORMS


def batch_loss(net: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[Tensor, dict[str, nn.Parameter]]:
    """The mean cross-entropy of logits / temperature, and the copy's prunable weights to differentiate it by.

    BatchNorm uses the batch's own statistics, since the running ones mean nothing at initialisation, where SNIP and
    GraSP score; dropout is off, so that a score holds no chance.
    """
    twin = copy.deepcopy(net).eval().requires_grad_(False)
    for module in twin.modules():
        if isinstance(module, NORMS):
            module.train()
    weights = weights_of(twin)
    for weight in weights.values():
        weight.requires_grad_(True)
    batch = batch.to(next(iter(weights.values())).device)
    return F.cross_entropy(twin(batch.inputs) / temperature, batch.labels), weights
