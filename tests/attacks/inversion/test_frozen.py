"""Frozen parameters (requires_grad=False) are no part of an update, and nobody treats them as if they were."""

import dataclasses

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import secateur
from secateur import tree
from secateur.attacks.inversion.engines.autograd import evaluate_singly, evaluate_stacked
from secateur.attacks.inversion.engines.layerwise import layerwise
from secateur.attacks.inversion.problem import Matching, Problem, structure
from secateur.attacks.inversion.r_gap import RGap
from secateur.attacks.inversion.updates import gradient_update, read_gradient, weights_update
from secateur.errors import WrongInput
from secateur.evaluation.update_files import read_update
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView, Weights
from secateur.training.optimisers import LocalSteps

FROZEN = ("0.weight", "0.bias")


@pytest.fixture
def net():
    """A convolution that stays as it was sent, BatchNorm and a classifier that are trained."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(64, 3))
    made[0].requires_grad_(False)
    return made.double().eval()


@pytest.fixture
def batch(rng):
    return Batch(torch.rand(2, 1, 8, 8, generator=rng, dtype=torch.double), torch.tensor([0, 2]))


def knowledge_of(net, **more):
    zero = torch.zeros(1, 1, 1)
    return Knowledge(net, (1, 8, 8), 3, zero, zero + 1, batch_size=2, **more)


def test_a_client_sends_nothing_of_them(net, batch):
    state = tree.state_of(net)
    gradient = gradient_update(net, state, batch).values
    trained = [name for name, _ in net.named_parameters() if name not in FROZEN]
    assert list(gradient) == trained
    net.requires_grad_(True)
    whole = gradient_update(net, state, batch).values
    assert all(torch.equal(whole[name], gradient[name]) for name in trained)


def test_local_steps_leave_them_as_they_were_sent(net, batch):
    state = tree.state_of(net)
    update = weights_update(net, state, batch, steps=2, learning_rate=0.5)
    assert not set(FROZEN) & set(update.values)
    by_hand = {name: value.clone() for name, value in state.items()}
    for _ in range(2):
        for name, value in gradient_update(net, by_hand, batch).values.items():
            by_hand[name] = by_hand[name] - 0.5 * value
    assert all(torch.allclose(update.values[name], by_hand[name]) for name in update.values)


@pytest.mark.parametrize("steps", [1, 2])
def test_the_engines_leave_them_out(net, batch, steps):
    """At the truth the gap is zero, local steps included; and all engines agree elsewhere."""
    state = tree.state_of(net)
    observed = gradient_update(net, state, batch).values
    if steps == 2:
        knowledge = knowledge_of(net, local_steps=2, learning_rate=0.5)
        update = weights_update(net, state, batch, steps=2, learning_rate=0.5)
        observed = read_gradient(ServerView(state, update), knowledge)
    every = {name: value[None] for name, value in observed.items()}
    problem = Problem(structure(net, "eval"), state, every, turn=LocalSteps(((),) * steps, (0.5,) * steps))
    objective = Matching(distance="euclidean")
    for engine in (evaluate_singly, evaluate_stacked, *([layerwise] if steps == 1 else [])):
        at_truth = engine(problem, objective)({"inputs": batch.inputs[None]}, batch.labels[None], {})
        assert float(at_truth.matching) < 1e-20
        beside = engine(problem, objective)({"inputs": 0.5 * batch.inputs[None]}, batch.labels[None], {})
        reference = evaluate_singly(problem, objective)({"inputs": 0.5 * batch.inputs[None]}, batch.labels[None], {})
        assert torch.allclose(beside.gradient["inputs"], reference.gradient["inputs"])


def test_what_an_update_holds_of_them_is_left_out(net, batch, tmp_path):
    state = tree.state_of(net)
    update = weights_update(net, state, batch, learning_rate=0.5).values
    whole = {name: update.get(name, state[name]) for name, _ in net.named_parameters()}
    view = ServerView(state, Weights(whole))
    assert not set(FROZEN) & set(read_gradient(view, knowledge_of(net, learning_rate=0.5)))
    save_file(whole, tmp_path / "update.safetensors", {"kind": "weights"})
    assert list(read_update(tmp_path / "update.safetensors", net, True).values) == list(update)


@pytest.mark.parametrize("defense", ["none", "dgp+error-feedback", "dp", "soteria"])
def test_from_python(net, batch, defense):
    report = secateur.invert(net, batch, "ig:iterations=2", defense=defense, labels="oracle")
    assert report.rows and all(not value.requires_grad for value in net[0].parameters())


def test_a_frozen_last_layer_tells_no_labels(net, batch):
    net[-1].requires_grad_(False)
    net[0].requires_grad_(True)
    with pytest.raises(WrongInput, match=r"labels: 4.weight is frozen.*joint"):
        secateur.invert(net, batch, "ig:iterations=2")
    with pytest.raises(WrongInput, match=r"layer: 4.weight is frozen"):
        secateur.invert(net, batch, "ig:iterations=2", defense="soteria", labels="oracle")


def test_a_model_that_is_frozen_whole_sends_nothing(net, batch):
    with pytest.raises(WrongInput, match="all its parameters are frozen"):
        secateur.invert(net.requires_grad_(False), batch, "ig:iterations=2")


def test_r_gap_solves_a_frozen_layer_by_its_weights_alone(rng):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 12, 3, 1, 1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(432, 3)).double()
    net[0].requires_grad_(False)
    state, x = tree.state_of(net), torch.randn(1, 1, 6, 6, generator=rng, dtype=torch.double)
    view = ServerView(state, gradient_update(net, state, Batch(x, torch.tensor([1]))))
    zero = torch.zeros(1, 1, 1)
    knowledge = Knowledge(net, (1, 6, 6), 3, zero, zero + 1)

    class Silent:
        def advance(self, iterations):
            pass

    RGap().check(knowledge, view)
    ((_, found),) = RGap().reconstruct([[view]], knowledge, [rng], Silent())
    assert torch.allclose(found.batch.inputs, x)
    net[3].requires_grad_(False)
    net[0].requires_grad_(True)
    other = dataclasses.replace(view, update=Gradient(gradient_update(net, state, Batch(x, torch.tensor([1]))).values))
    with pytest.raises(WrongInput, match=r"begins at the gradient of 3.weight, which is frozen"):
        RGap().check(knowledge, other)
