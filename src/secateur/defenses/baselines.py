"""Baseline defenses: early stopping with weight decay (basic), and no protection at all (none)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from secateur.catalogue import method
from secateur.defenses import AGAINST_NOTHING
from secateur.training.recipe import Recipe


@method("defense", "basic", "samia_ppb", acts_on="recipe", strongest=AGAINST_NOTHING)
@dataclass(frozen=True)
class Basic:
    """Early stopping on the validation loss and weight decay, which every other defense keeps (samia_ppb 6.2).

    Acts on: the recipe of fine-tuning, which stays unchanged because both are in it from the start.

    Equation: `L = CE, with weight decay; the epoch of least validation loss is kept`.
    """

    def __call__(self, recipe: Recipe) -> Recipe:
        """Return the recipe unchanged."""
        return recipe


@method(
    "defense",
    "none",
    "-",
    acts_on="recipe",
    strongest=f"{AGAINST_NOTHING}; the plain attack on updates, as nothing is hidden",
)
@dataclass(frozen=True)
class NoDefense:
    """Fine-tunes for all epochs without early stopping or weight decay: what `basic` is measured against.

    Acts on: the recipe of fine-tuning.

    Equation: `L = CE`.
    """

    def __call__(self, recipe: Recipe) -> Recipe:
        """Return the recipe without early stopping and weight decay."""
        return replace(recipe, patience=None, weight_decay=0.0)
