"""Estimates of a client's optimiser: the right kind and rate, or no kind."""

import pytest
import torch

from secateur import tree
from secateur.attacks.inversion.optimiser_estimate import estimate_optimiser
from secateur.attacks.inversion.updates import weights_update
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.interfaces import Gradient, Knowledge, ServerView, Weights
from secateur.models.create import create
from secateur.seeding import derive
from secateur.training.optimisers import LocalSteps, list_batches, parse_optimiser


@pytest.fixture(scope="module")
def scene():
    data, net = load("digits"), create("mlp", (1, 8, 8), 10, derive(9, "sent"))
    return net, tree.state_of(net), data.batch


def estimate(scene, text, rate, batch=8, steps=1, rounds=2):
    net, state, examples = scene
    size, views = batch * steps, []
    turn = LocalSteps(list_batches(size, batch, steps), (rate,) * steps, parse_optimiser(text))
    for number in range(rounds):
        rows = torch.randperm(1000, generator=derive(number, "rows"))[:size]
        views.append(ServerView(state, weights_update(net, state, examples.take(rows), turn=turn)))
    one = torch.ones(1, 1, 1)
    return estimate_optimiser(
        views, Knowledge(net, (1, 8, 8), 10, one, one, size, local_steps=steps, local_batch=batch)
    )


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize(
    ("text", "rate"), [("adam", 1e-3), ("adam:weight_decay=0.01", 3e-3), ("adamw:weight_decay=0.1", 1e-3)]
)
def test_adam_and_its_rate_are_recognised(scene, text, rate, steps):
    result = estimate(scene, text, rate, steps=steps)
    assert result.optimiser.kind == text.split(":")[0] and result.certainty > 0.5
    assert result.learning_rate == pytest.approx(rate, rel=0.02 if steps == 1 else 0.1)
    if "adamw" in text:
        assert result.weight_decay == pytest.approx(0.1, rel=0.1)


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("text", ["sgd", "sgd:momentum=0.9", "sgd:momentum=0.9:weight_decay=0.001"])
def test_of_gradient_descent_neither_rate_nor_momentum_is_claimed(scene, text, steps):
    result = estimate(scene, text, 0.05, steps=steps)
    assert result.kind == "sgd" and result.learning_rate is None and "momentum not shown" in str(result)


def test_between_the_kinds_it_is_undetermined(scene):
    """Changes of one size in half of the weights, and of a tenth of it in the others, fit neither kind."""
    net, state, _ = scene
    rng, received = derive(0, "changes"), {}
    for name, value in net.named_parameters():
        small = torch.rand(value.shape, generator=rng) < 0.6
        received[name] = value.detach() - torch.where(small, 1e-4, 1.5e-3)
    one = torch.ones(1, 1, 1)
    known = Knowledge(net, (1, 8, 8), 10, one, one, 8, local_steps=4, local_batch=2)
    result = estimate_optimiser([ServerView(state, Weights(received))], known)
    assert result.kind is None and str(result).startswith("undetermined")
    with pytest.raises(WrongInput, match="cannot be told"):
        _ = result.optimiser


def test_a_gradient_shows_no_optimiser(scene):
    net, state, _ = scene
    one = torch.ones(1, 1, 1)
    with pytest.raises(WrongInput, match="this update is a gradient"):
        estimate_optimiser([ServerView(state, Gradient(state))], Knowledge(net, (1, 8, 8), 10, one, one))
