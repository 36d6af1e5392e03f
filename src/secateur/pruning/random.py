"""Random pruning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from secateur.catalogue import method
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import Scope, prune_lowest, weights_of


@method("pruner", "random", "priprune")
@dataclass(frozen=True)
class Random:
    """Drops weights at random, drawn over the whole network (the Random base pruning of priprune)."""

    scope: Scope = "global"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """Uniform draws; in float64, where equal ones do not occur."""
        return {
            name: torch.rand(weight.shape, generator=rng, device=rng.device, dtype=torch.float64).to(weight.device)
            for name, weight in weights_of(net).items()
        }

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        return prune_lowest(self.scores(net, batch, rng), sparsity, self.scope)
