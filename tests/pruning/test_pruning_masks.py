from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from secateur.errors import WrongInput
from secateur.pruning.masks import prune_lowest, weights_of

sparsities = st.floats(0, 1, exclude_max=True)
shapes = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=4)


def drawn_scores(sizes, seed, levels):
    rng = torch.Generator().manual_seed(seed)
    return {f"layer{i}": torch.randint(levels, tuple(size), generator=rng).double() for i, size in enumerate(sizes)}


@given(shapes, sparsities, st.integers(0, 100), st.sampled_from([1, 3, 10**6]))
def test_layer_scope_prunes_exactly_the_first_of_the_lowest(sizes, sparsity, seed, levels):
    scores = drawn_scores(sizes, seed, levels)
    mask = prune_lowest(scores, sparsity, "layer")
    for name, score in scores.items():
        count = int(sparsity * score.numel())
        wanted = torch.ones(score.numel(), dtype=torch.bool)
        wanted[score.flatten().sort(stable=True).indices[:count]] = False
        assert torch.equal(mask[name], wanted.view(score.shape))
        assert mask[name].any()


@given(shapes, sparsities, st.integers(0, 100), st.sampled_from([1, 3, 10**6]))
@pytest.mark.filterwarnings("ignore:pruning would have emptied")
def test_global_scope_prunes_exactly_and_empties_nothing(sizes, sparsity, seed, levels):
    scores = drawn_scores(sizes, seed, levels)
    total = sum(score.numel() for score in scores.values())
    count = int(sparsity * total)
    if count > total - len(scores):
        with pytest.raises(WrongInput, match="sparsity"):
            prune_lowest(scores, sparsity, "global")
        return
    mask = prune_lowest(scores, sparsity, "global")
    assert sum(int((~value).sum()) for value in mask.values()) == count
    assert all(value.any() for value in mask.values())
    flat = torch.cat([score.flatten() for score in scores.values()])
    free = torch.ones(total, dtype=torch.bool)
    free[flat.sort(stable=True).indices[:count]] = False
    unfloored = dict(zip(scores, free.split([score.numel() for score in scores.values()]), strict=True))
    if all(value.any() for value in unfloored.values()):
        assert all(torch.equal(mask[name].flatten(), unfloored[name]) for name in scores)


def test_the_floor_is_stated_and_the_count_stays_exact():
    scores = {"weak": torch.tensor([0.1, 0.3, 0.2]), "strong": torch.tensor([4.0, 5.0, 6.0, 7.0])}
    with pytest.warns(UserWarning, match="would have emptied weak: the best of each was kept"):
        mask = prune_lowest(scores, 4 / 7, "global")
    assert mask["weak"].tolist() == [False, True, False]
    assert mask["strong"].tolist() == [False, False, True, True]


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.5, float("nan"), float("inf")])
def test_sparsity_outside_its_range_is_wrong_input(sparsity):
    with pytest.raises(WrongInput, match=r"sparsity: .* must be in \[0, 1\)"):
        prune_lowest({"a": torch.ones(3)}, sparsity, "layer")


def test_an_unknown_scope_and_scores_that_are_not_finite_are_wrong_input():
    with pytest.raises(WrongInput, match="scope: 'globl' is not known; did you mean 'global'"):
        prune_lowest({"a": torch.ones(3)}, 0.5, "globl")
    with pytest.raises(WrongInput, match="scores of a are not finite"):
        prune_lowest({"a": torch.tensor([1.0, torch.nan])}, 0.5, "layer")


def test_a_shared_weight_counts_once_and_only_conv_and_linear_weights_count():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(4, 4), nn.Linear(4, 4))
    net[3].weight = net[2].weight
    assert list(weights_of(net)) == ["0.weight", "2.weight"]
    assert list(weights_of(nn.Linear(2, 2))) == ["weight"]
    with pytest.raises(WrongInput, match="nothing to prune"):
        weights_of(nn.ReLU())
