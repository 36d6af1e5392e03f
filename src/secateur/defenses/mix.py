"""Mix: some of the weights that are not sent have the largest gradients, the others are drawn."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.catalogue import method
from secateur.defenses.random_share import uniform
from secateur.defenses.selection import largest
from secateur.defenses.withholding import Withholding, whole_part
from secateur.errors import WrongInput
from secateur.interfaces import Params


@method("defense", "mix", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class Mix(Withholding):
    """Prunes half of its rate by the largest gradients and half at random before sending (Mix; priprune Section 5.1).

    Acts on: a federation's client, on top of any base pruning. `largest` is the share of the rate that goes to the
    largest gradients (Fig. A4 has 0, 1/3, 2/3 and 1); the others are drawn among what is left, so the two never meet.
    """

    largest: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.largest <= 1:
            raise WrongInput("largest", f"{self.largest} is not allowed; give a share from 0 to 1")

    def noise(self, weights: Params, rng: Generator) -> Params:
        """Uniform draws."""
        return uniform(weights, rng)

    def choose(self, steepness: Tensor, chance: Tensor, number: int | Tensor) -> Tensor:
        """By |gradient|, then by the draws."""
        first = whole_part(self.largest * number)
        steepest = largest(steepness, first)
        return steepest | largest(torch.where(steepest, -1, chance), number - first)


@method("defense", "pseudo-mix", "priprune", acts_on="client", adaptive=("support",))
@dataclass(frozen=True)
class PseudoMix(Mix):
    """Withholds half of its rate by the largest gradients and half at random, and trains on with them (Mix (Pseudo)).

    Acts on: a federation's client, on top of any base pruning.
    """

    pseudo: bool = True
