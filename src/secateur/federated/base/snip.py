"""SNIP in a federation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from secateur.catalogue import method
from secateur.federated.base import BasePruning, pruned_once
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.snip import Snip


@method("base-pruning", "snip", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class SnipOnce(BasePruning):
    """Removes the weights whose removal changes one batch's loss least, once, at the server (SNIP; priprune Table 1).

    `batch` is the server's or one client's; the score is taken at the model that round 1 begins with.
    """

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of the whole federation."""
        return pruned_once(Snip(), net, state, batch, self.rate, rng)
