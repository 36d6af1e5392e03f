"""Largest: the weights with the largest gradients are not sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from secateur.catalogue import method
from secateur.defenses.selection import largest
from secateur.defenses.withholding import Withholding


@method("defense", "largest", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class Largest(Withholding):
    """Prunes the weights with the largest gradients before they are sent (Largest; priprune Section 5.1, Insight 1).

    Acts on: a federation's client, on top of any base pruning.
    """

    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """By |gradient|."""
        return largest(steepness, number)


@method("defense", "pseudo-largest", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class PseudoLargest(Largest):
    """Withholds the weights with the largest gradients, and trains on with them (Largest (Pseudo); priprune Fig. 7).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True
