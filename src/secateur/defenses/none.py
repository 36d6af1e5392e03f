"""No defense at all, for comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

from secateur.catalogue import method
from secateur.training import Recipe


@method("defense", "none", "-", acts_on="recipe")
@dataclass(frozen=True)
class NoDefense:
    """Fine-tunes for all epochs without early stopping or weight decay: what `basic` is measured against.

    Acts on: the recipe of fine-tuning.
    """

    def __call__(self, recipe: Recipe) -> Recipe:
        """The recipe without what protects."""
        return replace(recipe, patience=None, weight_decay=0.0)
