"""SynFlow in a federation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, nn

from secateur.catalogue import method
from secateur.federated.base import BasePruning, pruned_once
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.synflow import SynFlow


@method("base-pruning", "synflow", "priprune", cycles="one shot", at_client=False)
@dataclass(frozen=True)
class SynFlowOnce(BasePruning):
    """Removes the weights of least synaptic flow, without data, once, at the server (SynFlow; priprune Table 1).

    Its 100 rounds of scoring are all before round 1; of `batch` only the shape is used.
    """

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of the whole federation."""
        return pruned_once(SynFlow(), net, state, batch, self.rate, rng)
