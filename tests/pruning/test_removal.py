"""A removed network is smaller and computes what the masked one computes."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from pruning_nets import Dense, PreActivation, Residual, made, rows_of, tuned
from torch import nn

from secateur.catalogue import find
from secateur.errors import WrongInput
from secateur.pruning.filters import L1Structured
from secateur.pruning.removal import remove
from secateur.pruning.scores import L1Unstructured
from secateur.tree import count, params_of

SHAPES = {"resnet18": (3, 16, 16), "vgg16-bn": (3, 32, 32), "densenet121": (3, 16, 16)}
SHAPES |= {"digits-cnn": (1, 8, 8), "resnet18-w16": (3, 16, 16), "mapp-cnn-8": (3, 16, 16), "vgg-4": (3, 16, 16)}
SHAPES |= {"mlp": (50,), "mobilenet-v2-small": (1, 8, 8)}
NORMED = ("digits-cnn", "resnet18-w16", "mapp-cnn-8", "mobilenet-v2-small")
SMALL = [*((name, "l1-structured") for name in (*NORMED, "vgg-4", "mlp")), ("digits-cnn", "l2-structured")]


def check_removal(net, pruner, sparsity, shape, smaller=True):
    """Prune, fit the statistics to the pruned net, remove, and compare in float64 and in float32."""
    batch = rows_of(shape, count=4)
    mask = pruner(net, batch, sparsity, torch.Generator())
    masked = tuned(net, mask, batch.inputs)
    small = remove(masked, mask, shape)
    assert type(small) is type(net)
    assert not smaller or count(params_of(small)) < count(params_of(net))
    with torch.no_grad():
        wanted, got = masked(batch.inputs), small(batch.inputs)
        scale = max(1.0, wanted.abs().max().item())
        assert wanted.std(0).max() > 1e-3 * scale  # the net still listens to its input: else equality says nothing
        assert (got - wanted).abs().max() <= 1e-5 * scale
        if count(params_of(net)) > 1e6:
            return mask, small
        wanted, got = masked.double()(batch.inputs.double()), small.double()(batch.inputs.double())
        assert (got - wanted).abs().max() <= 1e-11 * scale
    return mask, small


@lru_cache(maxsize=1)
def net_of(name):
    return made(find("model", name), input_shape=SHAPES[name], classes=3)


@pytest.mark.filterwarnings("ignore:pruning would have emptied")
@pytest.mark.parametrize(  # each network, pruner and group; small networks below have all combinations
    ("name", "pruner", "groups", "sparsity"),
    [
        ("resnet18", "l1-structured", "coupled", 0.9),
        ("vgg16-bn", "slimming", "per-conv", 0.5),
        ("densenet121", "l1-structured", "coupled", 0.9),
        ("densenet121", "slimming", "per-conv", 0.5),
    ],
)
def test_removal_equals_the_masked_model(name, pruner, groups, sparsity):
    check_removal(net_of(name), find("pruner", pruner)(groups=groups), sparsity, SHAPES[name])


@pytest.mark.filterwarnings("ignore:pruning would have emptied")
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("groups", ["per-conv", "coupled"])
@pytest.mark.parametrize(("name", "pruner"), [*SMALL, *((name, "slimming") for name in NORMED)])
def test_removal_equals_the_masked_model_on_small_networks(name, pruner, groups, sparsity):
    check_removal(net_of(name), find("pruner", pruner)(groups=groups), sparsity, SHAPES[name], smaller=sparsity > 0)


@pytest.mark.filterwarnings("ignore:pruning would have emptied")
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("make", [Residual, PreActivation, Dense])
def test_removal_equals_the_masked_model_with_shortcuts_sums_and_concatenations(make, scope):
    for groups in ("per-conv", "coupled"):
        for sparsity in (0.25, 0.5, 0.75):
            net = made(make, seed=int(4 * sparsity))
            check_removal(net, L1Structured(scope=scope, groups=groups), sparsity, (3, 6, 6), smaller=False)
            if make is not PreActivation:
                check_removal(net, find("pruner", "slimming")(groups=groups), sparsity, (3, 6, 6), smaller=False)


def test_per_conv_removes_only_channels_that_are_dead_in_their_whole_group():
    mask, small = check_removal(made(Residual), L1Structured(), 0.5, (3, 6, 6))
    dead = ~mask["stem.weight"].flatten(1).any(1) & ~mask["conv2.weight"].flatten(1).any(1)
    assert small.stem.out_channels == small.conv2.out_channels == small.head.in_features == 6 - int(dead.sum())
    assert small.conv1.out_channels == small.conv2.in_channels == small.norm1.num_features == 6


def test_coupled_removes_every_chosen_channel():
    _, small = check_removal(made(Residual), L1Structured(groups="coupled"), 0.5, (3, 6, 6))
    assert (small.stem.out_channels, small.conv1.out_channels, small.conv2.out_channels) == (3, 6, 3)
    assert small.norm0.running_mean.shape == (3,) and small.head.weight.shape == (4, 3)


def test_a_depthwise_filter_goes_with_the_channel_that_it_reads(rng):
    net = made(lambda: nn.Sequential(nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1)))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([5.0, 1, 4, 3, 2, 6]).view(6, 1, 1, 1).expand(6, 3, 1, 1))
    net.append(nn.Flatten()).append(nn.Linear(64, 2))
    mask = L1Structured()(net, rows_of((3, 6, 6)), 0.5, rng)
    assert mask["0.weight"].flatten(1).all(1).tolist() == [True, False, True, False, False, True]
    assert torch.equal(mask["1.weight"].flatten(1).all(1), mask["0.weight"].flatten(1).all(1))
    assert torch.equal(mask["1.bias"], mask["0.bias"])
    small = remove(net, mask, (3, 6, 6))
    assert (small[1].groups, small[1].in_channels, small[1].out_channels, small[1].weight.shape[0]) == (3, 3, 3, 3)
    assert torch.equal(small[1].weight, net[1].weight[[0, 2, 5]])


def test_the_net_is_left_as_it_was():
    net = made(Residual).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    mask = L1Structured(groups="coupled")(net, rows_of((3, 6, 6)), 0.5, torch.Generator())
    small = remove(net, mask, (3, 6, 6))
    assert net.training and small.training and net.stem.out_channels == 6
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize("net", [Residual, lambda: nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(144, 2))])
def test_conv_only_masks_are_never_removed(net, rng):
    net = made(net)
    mask = L1Structured(mask="conv-only")(net, rows_of((3, 6, 6)), 0.5, rng)
    with pytest.raises(WrongInput, match=r"mask: cannot be removed: .* instead of conv-only"):
        remove(net, mask, (3, 6, 6))


def test_a_norm_that_still_shifts_a_masked_filter_cannot_be_removed(rng):
    net = made(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    )
    mask = L1Structured(mask="conv-only")(net, rows_of((3, 6, 6)), 0.5, rng)
    with pytest.raises(WrongInput, match="the BatchNorm 1 still shifts"):
        remove(net, mask, (3, 6, 6))


def test_masks_of_single_weights_cannot_be_removed(rng):
    net = made(Residual)
    with pytest.raises(WrongInput, match=r"mask: drops single weights of layer 'stem'; only masks of whole filters"):
        remove(net, L1Unstructured()(net, rows_of((3, 6, 6)), 0.5, rng), (3, 6, 6))


@pytest.mark.parametrize(
    ("layer", "named"),
    [(nn.Sigmoid(), r"Sigmoid \(1\)"), (nn.BatchNorm2d(4, affine=False), "BatchNorm without gamma and beta")],
)
def test_what_turns_zero_into_something_else_forbids_removal(layer, named, rng):
    net = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 1), layer, nn.Flatten(), nn.Linear(144, 2)))
    mask = L1Structured()(net, rows_of((3, 6, 6)), 0.5, rng)
    with pytest.raises(WrongInput, match=f"mask: cannot be removed: {named}"):
        remove(net, mask, (3, 6, 6))


def test_a_forward_that_names_its_width_is_found_out(rng):
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 1), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.conv(x).mean((2, 3)).view(-1, 4))

    net = made(Named)
    with pytest.raises(WrongInput, match="its forward does not follow narrower layers"):
        remove(net, L1Structured()(net, rows_of((3, 6, 6)), 0.5, rng), (3, 6, 6))


def test_a_mask_that_empties_a_layer_is_wrong_input():
    net = made(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)))
    mask = {"0.weight": torch.zeros(4, 3, dtype=torch.bool), "0.bias": torch.zeros(4, dtype=torch.bool)}
    with pytest.raises(WrongInput, match="would leave the layer 0 without channels"):
        remove(net, mask, (3,))
