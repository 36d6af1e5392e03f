"""Basic: early stopping and weight decay."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.catalogue import method
from secateur.training import Recipe


@method("defense", "basic", "samia_ppb", acts_on="recipe")
@dataclass(frozen=True)
class Basic:
    """Early stopping on the validation loss and weight decay, which every other defense keeps (samia_ppb 6.2).

    Acts on: the recipe of fine-tuning, which it leaves as it is: both are in it from the start.
    """

    def __call__(self, recipe: Recipe) -> Recipe:
        """The recipe unchanged."""
        return recipe
