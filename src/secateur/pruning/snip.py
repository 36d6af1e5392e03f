"""SNIP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from secateur.catalogue import method
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.gradients import batch_loss
from secateur.pruning.masks import Scope, prune_lowest


@method("pruner", "snip", "priprune")
@dataclass(frozen=True)
class Snip:
    """Drops the weights whose removal changes one batch's loss least, |w * dL/dw| (SNIP; Lee et al. 2019, Eq. 5)."""

    scope: Scope = "global"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """|w * g|; the paper divides by the sum, which leaves the order as it is."""
        loss, weights = batch_loss(net, batch)
        grads = torch.autograd.grad(loss, list(weights.values()), materialize_grads=True)
        return {name: (w.detach() * g).abs() for (name, w), g in zip(weights.items(), grads, strict=True)}

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        return prune_lowest(self.scores(net, batch, rng), sparsity, self.scope)
