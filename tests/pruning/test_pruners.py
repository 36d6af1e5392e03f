"""What every pruner of the catalogue must do, found from the catalogue."""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pruning_nets import made, rows_of
from torch import nn

from secateur.catalogue import methods
from secateur.errors import WrongInput
from secateur.pruning.removal import remove

COMPRESSORS = methods("pruner")
PRUNERS = {  # those that give a mask
    name: entry for name, entry in COMPRESSORS.items() if not {"reshape", "convert"} & set(dir(entry.make))
}
SCOPED = [name for name, pruner in PRUNERS.items() if "scope" in pruner.defaults]
STRUCTURED = [name for name, pruner in PRUNERS.items() if "groups" in pruner.defaults]


def net_of(first: int = 8, second: int = 10) -> nn.Module:
    def make():
        return nn.Sequential(
            *(nn.Conv2d(2, first, 3), nn.BatchNorm2d(first), nn.ReLU(), nn.Dropout(0.5)),
            *(nn.Conv2d(first, second, 3), nn.BatchNorm2d(second), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(second, 3)),
        )

    return made(make)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BATCH = rows_of((2, 6, 6), count=12)


def prune(name, net, sparsity, seed=0, **arguments):
    return PRUNERS[name](**arguments)(net, BATCH, sparsity, torch.Generator().manual_seed(seed))


def test_the_names_are_known():
    paper = "l1-unstructured l1-structured l2-structured slimming random snip grasp synflow"
    assert set(paper.split()) <= set(PRUNERS)


@pytest.mark.parametrize("name", PRUNERS)
def test_it_is_a_frozen_record_with_a_summary(name):
    make = PRUNERS[name].make
    assert is_dataclass(make) and make.__dataclass_params__.frozen
    assert all(not field.name.startswith("_") for field in fields(make))
    assert len(PRUNERS[name].summary) > 20


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", PRUNERS)
def test_a_mask_is_of_bools_in_the_shapes_and_on_the_device_of_parameters(name, device):
    net = net_of().to(device)
    parameters = dict(net.named_parameters())
    mask = prune(name, net, 0.5)
    for parameter, kept in mask.items():
        assert kept.dtype == torch.bool and kept.shape == parameters[parameter].shape
        assert kept.device == parameters[parameter].device
    if name in STRUCTURED:
        small = remove(net, mask, (2, 6, 6))
        assert {value.device.type for value in small.state_dict().values()} == {device}


@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("training", [True, False])
def test_the_net_is_never_changed(name, training):
    net = net_of().train(training)
    net[0].eval()
    net[0].weight.requires_grad_(False)
    net[9].weight.grad = torch.ones_like(net[9].weight)
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    chance = torch.get_rng_state()
    prune(name, net, 0.5)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert [module.training for module in net.modules()] == modes
    assert not net[0].weight.requires_grad and net[4].weight.requires_grad
    grads = {key for key, value in net.named_parameters() if value.grad is not None}
    assert grads == {"9.weight"} and (net[9].weight.grad == 1).all()
    assert torch.equal(torch.get_rng_state(), chance)  # nobody draws from the global generator


@pytest.mark.parametrize("name", PRUNERS)
def test_it_is_deterministic_for_a_seed(name):
    one, other = (prune(name, net_of(), 0.5, seed=3) for _ in range(2))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", PRUNERS)
def test_sparsity_zero_keeps_everything(name):
    assert all(mask.all() for mask in prune(name, net_of(), 0.0).values())


@pytest.mark.parametrize("name", PRUNERS)
@pytest.mark.parametrize("sparsity", [-0.1, 1.0, float("nan")])
def test_sparsity_outside_its_range_is_wrong_input(name, sparsity):
    with pytest.raises(WrongInput, match="sparsity: "):
        prune(name, net_of(), sparsity)


@pytest.mark.filterwarnings("ignore:pruning would have emptied")
@pytest.mark.parametrize("scope", ["layer", "global"])
@pytest.mark.parametrize("name", [name for name in SCOPED if name not in STRUCTURED])
@settings(max_examples=15, deadline=None)
@given(sparsity=st.floats(0, 0.98), first=st.integers(1, 6), second=st.integers(1, 6))
def test_weights_go_in_exactly_the_number_asked_for(name, scope, sparsity, first, second):
    net = net_of(first, second)
    total = 18 * first + 9 * first * second + 3 * second
    assume(scope == "layer" or int(sparsity * total) <= total - 3)  # beyond that it refuses, as tested elsewhere
    fast = {"rounds": 5} if name == "synflow" else {}
    mask = prune(name, net, sparsity, scope=scope, **fast)
    sizes = {key: mask[key].numel() for key in ("0.weight", "4.weight", "9.weight")}
    gone = {key: int((~mask[key]).sum()) for key in sizes}
    assert set(mask) == set(sizes)
    if scope == "layer":
        assert gone == {key: int(sparsity * size) for key, size in sizes.items()}
    else:
        assert sum(gone.values()) == int(sparsity * total)
    assert all(value.any() for value in mask.values())


@pytest.mark.filterwarnings("ignore:pruning would have emptied")
@pytest.mark.parametrize("groups", ["per-conv", "coupled"])
@pytest.mark.parametrize("name", STRUCTURED)
@settings(max_examples=15, deadline=None)
@given(sparsity=st.floats(0, 0.85), first=st.integers(2, 9), second=st.integers(2, 9))
def test_filters_go_in_exactly_the_number_asked_for(name, groups, sparsity, first, second):
    total = first + second
    assume(name != "slimming" or int(sparsity * total) <= total - 2)  # beyond that it refuses, as tested elsewhere
    mask = prune(name, net_of(first, second), sparsity, groups=groups)
    gone = [int((~mask[key].flatten(1).any(1)).sum()) if key in mask else 0 for key in ("0.weight", "4.weight")]
    if name == "slimming":
        assert sum(gone) == int(sparsity * total)
    else:
        assert gone == [int(sparsity * first), int(sparsity * second)]
    assert gone[0] < first and gone[1] < second


@pytest.mark.parametrize("name", ["snip", "grasp"])
def test_scores_of_gradients_depend_on_the_batch(name):
    net = net_of()
    pruner = PRUNERS[name]()
    other = rows_of((2, 6, 6), count=12, seed=9)
    one, two = (pruner(net, batch, 0.5, torch.Generator()) for batch in (BATCH, other))
    assert any(not torch.equal(one[key], two[key]) for key in one)
