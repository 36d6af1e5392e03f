"""Every base pruning keeps the promises of federated.base.BasePruning."""

import json

import pytest
import torch
from torch import nn
from torch.func import vmap

from secateur import catalogue, tree
from secateur.cli import main
from secateur.errors import WrongInput
from secateur.federated.base_pruning import BasePruning, count_removed, total_of
from secateur.interfaces import Batch
from secateur.pruning.masks import weights_of

NAMES = list(catalogue.methods("base-pruning"))
PRUNING = [name for name in NAMES if name != "none"]
SHORT = {"prunefl": {"every": 2, "iterations": 6}, "feddst": {"every": 2, "alpha": 0.2}, "random": {"every": 2}}
ITERATIVE = list(SHORT)


def federation(dtype=torch.float64):
    """A network with BatchNorm, its state and one client's examples, all new."""
    made = torch.Generator().manual_seed(7)
    with torch.no_grad(), torch.random.fork_rng():
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 6)).to(dtype)
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=made))
    batch = Batch(torch.randn(12, 1, 6, 6, generator=made).to(dtype), torch.arange(12) % 6)
    return net, tree.state_of(net), batch


def made(name, **fields):
    return catalogue.find("base-pruning", name)(**(SHORT.get(name, {}) | fields))


def begun(name, seed=0, **fields):
    """The rule, the weights, its first mask and a gradient of everything."""
    net, state, batch = federation()
    rule = made(name, **fields).bound(net, (1, 6, 6))
    mask = rule.start(net, state, batch, torch.Generator().manual_seed(seed))
    chance = torch.Generator().manual_seed(3)
    weights = {key: value.clone() for key, value in state.items() if key in dict(net.named_parameters())}
    gradient = {key: torch.randn(v.shape, generator=chance, dtype=v.dtype) for key, v in weights.items()}
    return rule, weights, mask, gradient


def test_those_of_the_paper_are_there_and_can_be_listed(capsys):
    assert set(NAMES) == {"none", "random", "snip", "synflow", "grasp", "feddst", "prunefl"}
    assert main(["list", "base-prunings", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    at_client = {name for name, row in rows.items() if row["at_client"]}
    assert at_client == {"random", "feddst", "prunefl"}  # Table 1
    assert {name for name, row in rows.items() if row["cycles"] == "one shot"} == {"snip", "synflow", "grasp"}
    assert all(isinstance(catalogue.find("base-pruning", name)(), BasePruning) for name in NAMES)


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.55])
@pytest.mark.parametrize("name", PRUNING)
def test_the_rate_is_exact_over_all_weights_and_biases_and_batchnorm_are_left_alone(name, rate):
    net, _, _ = federation()
    _, _, mask, _ = begun(name, rate=rate)
    assert list(mask) == list(weights_of(net)) == ["0.weight", "4.weight"]
    assert all(keep.dtype == torch.bool and keep.shape == weights_of(net)[key].shape for key, keep in mask.items())
    assert sum(int((~keep).sum()) for keep in mask.values()) == count_removed(rate, total_of(mask))
    assert all(bool(keep.any()) for keep in mask.values())


def test_none_keeps_all_and_has_no_rate():
    _, _, mask, _ = begun("none")
    assert all(bool(keep.all()) for keep in mask.values())
    with pytest.raises(WrongInput, match="none removes nothing"):
        made("none", rate=0.3)


@pytest.mark.parametrize("name", PRUNING)
@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_that_is_none_is_refused(name, rate):
    with pytest.raises(WrongInput, match="rate"):
        made(name, rate=rate)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_that_is_given_changes(name):
    net, state, batch = federation()
    before, examples, training = tree.clone(state), tree.clone(batch._asdict()), net.training
    rule, weights, mask, gradient = begun(name)
    rule.start(net, state, batch, torch.Generator().manual_seed(0))
    assert all(torch.equal(state[key], value) for key, value in before.items())
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(torch.equal(value, examples[key]) for key, value in batch._asdict().items())
    assert net.training == training
    given = [weights, mask, gradient]
    copies = [tree.clone(each) for each in given]
    rule.adjust(weights, mask, gradient, 2, torch.Generator())
    rule.local(weights, gradient, mask, 2, torch.Generator())
    for one, copy in zip(given, copies, strict=True):
        assert all(torch.equal(one[key], value) for key, value in copy.items())


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_decides_everything_and_the_global_generator_nothing(name):
    torch.manual_seed(1)
    first = begun(name)
    torch.manual_seed(2)
    global_state = torch.get_rng_state()
    again = begun(name)
    assert all(torch.equal(keep, again[2][key]) for key, keep in first[2].items())
    adjusted = [
        rule.adjust(weights, mask, tree.clone(gradient), 2, torch.Generator().manual_seed(5))[1]
        for rule, weights, mask, gradient in (first, again)
    ]
    assert all(torch.equal(keep, adjusted[1][key]) for key, keep in adjusted[0].items())
    assert torch.equal(global_state, torch.get_rng_state())


@pytest.mark.parametrize("name", NAMES)
def test_a_round_without_adjustment_changes_nothing(name):
    rule, weights, mask, gradient = begun(name)
    rounds = [number for number in range(1, 9) if rule.adjusts(number)]
    assert rounds == ([2, 4, 6, 8] if name in ITERATIVE else [])
    after, kept = rule.adjust(weights, mask, gradient, 3, torch.Generator())
    assert after is weights and kept is mask and rule.local(weights, gradient, mask, 3, torch.Generator()) is mask


@pytest.mark.parametrize("name", ITERATIVE)
def test_an_adjustment_changes_the_mask_and_holds_the_rate(name):
    rule, weights, mask, gradient = begun(name)
    squares = {key: value.square() for key, value in gradient.items()}
    after, kept = rule.adjust(weights, mask, squares, 2, torch.Generator().manual_seed(1))
    assert any(not torch.equal(keep, mask[key]) for key, keep in kept.items())
    assert sum(int((~keep).sum()) for keep in kept.values()) == count_removed(0.3, total_of(mask))
    biases = [key for key in weights if key not in mask]
    assert biases and all(torch.equal(after[key], weights[key]) for key in biases)
    if rule.keeps_dropped:
        assert all(torch.equal(after[key], weights[key]) for key in mask)
    else:
        assert all(bool((after[key][~kept[key]] == 0).all()) for key in mask)


@pytest.mark.parametrize("name", NAMES)
def test_what_clients_do_is_the_same_in_vmap(name):
    rule, weights, mask, gradient = begun(name)
    many = [
        {key: torch.stack([value, -0.5 * value.flip(0)]) for key, value in each.items()} for each in (weights, gradient)
    ]
    found = vmap(lambda w, g: rule.local(w, g, mask, 2))(*many) if rule.adjusts(2) and name == "feddst" else None
    for lane in range(2):
        one = rule.local({k: v[lane] for k, v in many[0].items()}, {k: v[lane] for k, v in many[1].items()}, mask, 2)
        assert sum(int(keep.sum()) for keep in one.values()) == sum(int(keep.sum()) for keep in mask.values())
        if found is None:
            assert one is mask
        else:
            assert all(torch.equal(keep, found[key][lane]) for key, keep in one.items())


def test_only_prunefl_asks_for_squares_and_says_so_where_they_are_missing():
    assert [name for name in NAMES if made(name).wants_squares] == ["prunefl"]
    rule, weights, mask, _ = begun("prunefl")
    with pytest.raises(WrongInput, match="squares: are missing"):
        rule.adjust(weights, mask, None, 2, torch.Generator())
