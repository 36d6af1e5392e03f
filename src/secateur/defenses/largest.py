"""Largest: the weights with the largest gradients are not sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from secateur.catalogue import method
from secateur.defenses.withholding import Withholding, top


@method("defense", "largest", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class Largest(Withholding):
    """Prunes the weights with the largest gradients before they are sent (Largest; priprune Section 5.1, Insight 1).

    Acts on: a federation's client, on top of any base pruning.
    """

    def choose(self, steepness: Tensor, chance: Tensor, keep: Tensor) -> Tensor:
        """By |gradient|."""
        return top(steepness, keep, self.number(keep))


@method("defense", "pseudo-largest", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class PseudoLargest(Largest):
    """Withholds the weights with the largest gradients, and trains on with them (Largest (Pseudo); priprune Fig. 7).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True
