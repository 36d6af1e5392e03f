from __future__ import annotations

import pytest
import torch
from pruning_nets import Dense, Residual, made, rows_of
from test_filters import dropped
from torch import nn

from secateur.errors import WrongInput
from secateur.interfaces import TrainsWithPenalty
from secateur.pruning.slimming import Slimming

IMAGES = rows_of((3, 6, 6))


def chain(first: list[float], second: list[float]) -> nn.Module:
    net = nn.Sequential(
        *(nn.Conv2d(3, len(first), 3), nn.BatchNorm2d(len(first)), nn.ReLU()),
        *(nn.Conv2d(len(first), len(second), 3), nn.BatchNorm2d(len(second)), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(len(second) * 4, 2)),
    )
    net[1].weight.data.copy_(torch.tensor(first))
    net[4].weight.data.copy_(torch.tensor(second))
    return net


def test_one_threshold_over_all_gammas_by_magnitude(rng):
    mask = Slimming()(chain([0.1, -0.9, 0.3], [0.2, 0.8, -0.05]), IMAGES, 0.5, rng)
    for name, rows in (("0", [0]), ("1", [0]), ("3", [0, 2]), ("4", [0, 2])):
        assert dropped(mask, f"{name}.weight") == rows and dropped(mask, f"{name}.bias") == rows
    assert set(mask) == {f"{i}.{part}" for i in (0, 1, 3, 4) for part in ("weight", "bias")}


def test_a_layer_that_would_vanish_keeps_one_channel_and_says_so(rng):
    with pytest.warns(UserWarning, match="would have emptied 1: the best of each was kept"):
        mask = Slimming()(chain([0.01, 0.03, 0.02], [0.2, 0.8, 0.5]), IMAGES, 0.5, rng)
    assert dropped(mask, "0.weight") == [0, 2] and dropped(mask, "3.weight") == [0]


def test_conv_only_covers_the_filters_of_the_dropped_gammas(rng):
    mask = Slimming(mask="conv-only")(chain([0.1, 0.9, 0.3], [0.2, 0.8, 0.05]), IMAGES, 0.5, rng)
    assert {name: dropped(mask, name) for name in mask} == {"0.weight": [0], "3.weight": [0, 2]}


def test_a_filter_that_several_norms_read_goes_only_when_all_of_them_drop_it(rng):
    net = made(Dense)
    for norm in (net.norm0, net.norm1, net.norm2):
        nn.init.ones_(norm.weight)
    net.norm1.weight.data[6:8] = 0.01  # conv1's first two channels, which norm2 reads too
    net.norm2.weight.data[6] = 0.01  # and drops the first
    net.norm0.weight.data[0] = 0.01  # the stem's first channel, which every later norm reads
    mask = Slimming()(net, IMAGES, 4 / 30, rng)
    assert dropped(mask, "conv1.weight") == [0]
    assert dropped(mask, "stem.weight") == [0]
    assert dropped(mask, "norm1.weight") == [0, 6, 7] and dropped(mask, "norm2.weight") == [0, 6]
    assert "conv2.weight" not in mask


def test_a_layer_that_many_norms_would_empty_together_keeps_its_best_channel(rng):
    net = made(Dense)
    for norm in (net.norm0, net.norm1, net.norm2):
        nn.init.ones_(norm.weight)
    net.norm1.weight.data[6:] = torch.tensor([0.01, 0.02, 0.03, 0.01])
    net.norm2.weight.data[6:10] = torch.tensor([0.01, 0.01, 0.02, 0.01])
    with pytest.warns(UserWarning, match="would have emptied conv1"):
        mask = Slimming()(net, IMAGES, 8 / 30, rng)
    assert dropped(mask, "conv1.weight") == [0, 1, 3]
    assert dropped(mask, "norm1.weight") == [6, 7, 9] and dropped(mask, "norm2.weight") == [6, 7, 8, 9]


def test_coupled_drops_whole_groups_by_their_mean_gamma(rng):
    net = made(Residual)
    net.norm0.weight.data.copy_(torch.tensor([0.1, 1, 1, 0.3, 1, 1]))
    net.norm2.weight.data.copy_(torch.tensor([1.0, 1, 1, 0.1, 1, 1]))
    net.norm1.weight.data.fill_(0.6)
    mask = Slimming(groups="coupled")(net, IMAGES, 2 / 18, rng)  # 6 joint groups and 12 of conv1
    # means .55 and .2: both under .6
    for name in ("stem.weight", "norm0.bias", "conv2.bias", "norm2.weight"):
        assert dropped(mask, name) == [0, 3]
    assert dropped(mask, "norm1.weight") == [] and "conv1.weight" not in mask


def test_the_penalty_is_l1_times_the_sum_of_magnitudes():
    net = chain([0.1, -0.9, 0.3], [0.2, 0.8, -0.05])
    params = {name: value.detach().requires_grad_() for name, value in net.named_parameters()}
    term = Slimming(l1=0.01).penalty(net)(params)
    assert term.item() == pytest.approx(0.01 * 2.35)
    (grad,) = torch.autograd.grad(term, [params["1.weight"]])
    assert grad.tolist() == pytest.approx([0.01, -0.01, 0.01])
    assert isinstance(Slimming(), TrainsWithPenalty)


def test_without_batchnorm_it_is_wrong_input(rng):
    for net in (nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 2)), nn.BatchNorm1d(5, affine=False)):
        with pytest.raises(WrongInput, match="slimming needs BatchNorm"):
            Slimming()(net, rows_of((5,)), 0.5, rng)
        with pytest.raises(WrongInput, match="slimming needs BatchNorm"):
            Slimming().penalty(net)
