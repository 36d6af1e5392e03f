"""L1 unstructured pruning."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from secateur.catalogue import method
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import Scope, prune_lowest, weights_of


@method("pruner", "l1-unstructured", "samia_ppb")
@dataclass(frozen=True)
class L1Unstructured:
    """Drops the weights of least magnitude, layer by layer (L1 unstructured; Han et al. 2015, in samia_ppb).

    Every Conv and Linear weight takes part, first and last included; biases and BatchNorm are left alone.
    """

    scope: Scope = "layer"

    def scores(self, net: nn.Module, batch: Batch, rng: Generator) -> Params:
        """|w|."""
        return {name: weight.detach().abs() for name, weight in weights_of(net).items()}

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask."""
        return prune_lowest(self.scores(net, batch, rng), sparsity, self.scope)
