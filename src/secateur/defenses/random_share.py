"""Random: weights drawn at random are not sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.catalogue import method
from secateur.defenses.selection import largest
from secateur.defenses.withholding import Withholding
from secateur.interfaces import Params


@method("defense", "random", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class RandomShare(Withholding):
    """Prunes weights drawn at random before they are sent, anew in every round (Random; priprune Section 5.1).

    Acts on: a federation's client, on top of any base pruning.
    """

    def noise(self, weights: Params, rng: Generator) -> Params:
        """Uniform draws."""
        return uniform(weights, rng)

    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """By the draws."""
        return largest(chance, number)


@method("defense", "pseudo-random", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class PseudoRandomShare(RandomShare):
    """Withholds weights drawn at random, and trains on with them (Random (Pseudo); priprune Fig. 6).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True


def uniform(weights: Params, rng: Generator) -> Params:
    """A draw for every weight that can be withheld."""
    return {
        name: torch.rand(value.shape, generator=rng, device=rng.device)
        for name, value in weights.items()
        if value.ndim > 1
    }
