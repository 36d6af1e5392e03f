"""The space of recipes and its draws."""

import pytest

from secateur.config import Recommend, read
from secateur.errors import WrongInput
from secateur.evaluation.selection import Assessment
from secateur.experiments.recipe_space import RecipeSampler, build_space, list_known
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


def test_a_small_space_is_searched_whole():
    shares = [0.05 * place for place in range(1, 15)]
    sampler = RecipeSampler(
        space_of(pruner="l1-unstructured", sparsity=shares, defense="basic", learning_rate=1), {}, 0
    )
    recipes = []
    while drawn := sampler.draw(4):
        for recipe in drawn:
            loss = Estimate(*[recipe.compression.sparsity] * 3)
            sampler.tell(recipe, Assessment(0, "", 1, {"accuracy_drop": loss, "auc": loss, "bytes": loss}))
        recipes += drawn
    assert len(recipes) == len(set(recipes)) == len(shares)


def test_int8_alone_is_one_recipe_whatever_the_sparsity_and_the_schedule():
    space, ours = space_of(epochs=[1, 2]), [{"pruner": "int8", "sparsity": 0, "epochs": 2}]
    places = {"pruner": 1, "defense": 0}
    drawn = {space.build(places | {"sparsity": i, "epochs": i, "learning_rate": i}) for i in range(2)}
    (recipe,) = drawn
    assert recipe.title == "int8 with basic"
    (known,) = list_known(read(Recommend, None, FIELDS | {"compare": ours}), tabular=False)
    sampler = RecipeSampler(space_of(pruner="int8", defense="basic", epochs=[2], learning_rate=[0.001]), {}, seed=0)
    assert known == recipe and not sampler.include(known) and sampler.draw(1) == []


def test_no_pruner_is_refused_with_what_to_write_instead():
    with pytest.raises(WrongInput, match="name int8 alone to quantise without pruning"):
        space_of(pruner="none,int8")


def test_open_schedules_follow_fine_tuning():
    space = space_of(epochs="none", finetune={"epochs": 20, "learning_rate": 0.01})
    assert space.epochs == [5, 10, 20] and space.learning_rates == [0.003, 0.01]


def test_a_space_without_a_recipe_is_refused():
    with pytest.raises(WrongInput, match="no fine-tuning"):
        space_of(pruner="int8", defense="ppb")
    with pytest.raises(WrongInput, match="no fine-tuning"):
        space_of(pruner="l1-unstructured", sparsity=0)
