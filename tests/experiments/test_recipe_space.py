"""The space of recipes and its draws."""

import pytest

from secateur.config import Recommend, read
from secateur.errors import WrongInput
from secateur.evaluation.selection import Assessment
from secateur.experiments.recipe_space import RecipeSampler, build_space
from secateur.metrics.membership import Estimate

pytest.importorskip("optuna")
FIELDS = {"pruner": ["l1-unstructured", "int8"], "sparsity": [0.5, 0.9], "defense": ["basic", "ppb"], "epochs": [2]}


def space_of(**fields):
    return build_space(read(Recommend, None, FIELDS | fields), tabular=False)


def draw_all(seed, generations=6):
    sampler = RecipeSampler(space_of(learning_rate=[0.001]), {"bytes": 0.5}, seed)
    recipes = []
    for _ in range(generations):
        for recipe in sampler.draw(2):
            size = Estimate(*[1 - recipe.compression.sparsity] * 3)
            sampler.tell(recipe, Assessment(len(recipes), "", 1, {"bytes": size, "auc": size}))
            recipes.append(recipe)
    return recipes


def test_every_recipe_is_drawn_once_and_equal_seeds_draw_alike():
    recipes = draw_all(seed=3)
    # four of l1-unstructured, and int8 alone once: it has no sparsity, and no fine-tuning for ppb
    assert len(recipes) == len(set(recipes)) == 5
    assert recipes == draw_all(seed=3)


def test_open_schedules_follow_fine_tuning():
    space = space_of(epochs="none", finetune={"epochs": 20, "learning_rate": 0.01})
    assert space.epochs == [5, 10, 20] and space.learning_rates == [0.003, 0.01]


def test_a_space_without_a_recipe_is_refused():
    with pytest.raises(WrongInput, match="no fine-tuning"):
        space_of(pruner="int8", defense="ppb")
    with pytest.raises(WrongInput, match="no fine-tuning"):
        space_of(pruner="l1-unstructured", sparsity=0)
