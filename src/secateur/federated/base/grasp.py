"""GraSP in a federation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from secateur.catalogue import method
from secateur.federated.base import BasePruning, pruned_once
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.grasp import Grasp


@method("base-pruning", "grasp", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class GraspOnce(BasePruning):
    """Removes the weights that carry the gradient flow least, once, at the server (GraSP; priprune Table 1).

    `batch` should hold ten examples of every class; the score is taken at the model that round 1 begins with.
    """

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of the whole federation."""
        return pruned_once(Grasp(), net, state, batch, self.rate, rng)
