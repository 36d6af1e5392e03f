"""What a client sends, by hand and against autograd; the sent model never changes."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.attacks.inversion.updates import (
    batchnorm_order,
    gradient_update,
    read_gradient,
    read_statistics,
    statistics_of,
    weights_update,
)
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView, Weights
from secateur.models.create import create
from secateur.seeding import derive


@pytest.fixture
def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 4)]
    made = nn.Sequential(*layers).double()
    made(torch.randn(8, 1, 4, 4).double() * 2 + 1)  # running statistics that are not the initial ones
    return made.eval()


@pytest.fixture
def batch(rng):
    return Batch(torch.randn(3, 1, 4, 4, generator=rng).double(), torch.tensor([0, 3, 3]))


def knowledge(net, **known):
    return Knowledge(net, (1, 4, 4), 4, torch.zeros(1, 1, 1), torch.ones(1, 1, 1), **known)


def test_a_linear_gradient_by_hand():
    """W = 0, two classes: dL/dz = (.5, .5) - (1, 0), and dL/dW is its product with the input."""
    net = nn.Linear(2, 2).double()
    state = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    batch = Batch(torch.tensor([[2.0, 4.0]]).double(), torch.tensor([0]))
    found = gradient_update(net, state, batch).values
    assert found["weight"].tolist() == [[-1, -2], [1, 2]] and found["bias"].tolist() == [-0.5, 0.5]
    moved = weights_update(net, state, batch, learning_rate=0.1).values
    assert moved["weight"].tolist() == [[0.1, 0.2], [-0.1, -0.2]]


@pytest.mark.parametrize("mode", ["eval", "batch"])
def test_the_mean_gradient_equals_autograd_and_changes_nothing(net, batch, mode):
    state = tree.state_of(net)
    before = tree.clone(state)
    found = gradient_update(net, state, batch, mode).values
    assert all(torch.equal(state[name], before[name]) for name in state)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net.training
    net.train(mode == "batch")
    cross_entropy(net(batch.inputs), batch.labels).backward()
    for name, value in net.named_parameters():
        torch.testing.assert_close(found[name], value.grad)


def test_weights_after_steps_equal_sgd_on_the_next_examples(net, batch):
    state = tree.state_of(net)
    found = weights_update(net, state, batch, "eval", steps=3, learning_rate=0.2, step_batch=2)
    optimiser = torch.optim.SGD(net.parameters(), 0.2)
    for rows in ([0, 1], [2, 0], [1, 2]):
        optimiser.zero_grad()
        cross_entropy(net(batch.inputs[rows]), batch.labels[rows]).backward()
        optimiser.step()
    for name, value in net.named_parameters():
        torch.testing.assert_close(found.values[name], value.detach())


def test_weights_of_one_step_become_the_gradient(net, batch):
    state = tree.state_of(net)
    known = knowledge(net, learning_rate=0.3)
    sent = weights_update(net, state, batch, learning_rate=0.3)
    found = read_gradient(ServerView(state, sent), known)
    wanted = gradient_update(net, state, batch).values
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert read_gradient(ServerView(state, Gradient(wanted)), known).keys() == wanted.keys()


def test_exact_statistics_by_hand(net, batch):
    found = statistics_of(net, tree.state_of(net), batch)
    seen = net[0](batch.inputs)
    torch.testing.assert_close(found["1.mean"], seen.mean((0, 2, 3)).detach())
    torch.testing.assert_close(found["1.var"], seen.var((0, 2, 3), unbiased=False).detach())
    assert batchnorm_order(net, tree.state_of(net), (1, 4, 4)) == ["1"]


def test_updates_that_do_not_fit_are_refused(net, batch):
    state = tree.state_of(net)
    whole = gradient_update(net, state, batch).values

    def refused(update, match, **known):
        with pytest.raises(WrongInput, match=match):
            read_gradient(ServerView(state, update), knowledge(net, **known))

    refused(Gradient({k: v for k, v in whole.items() if k != "4.bias"}), "4.bias is missing")
    refused(Gradient({**whole, "4.bias": torch.zeros(5)}), r"4.bias has shape \(5,\); the model needs shape \(4,\)")
    refused(Gradient({**whole, "5.bias": torch.zeros(5)}), "5.bias, which is no parameter")
    refused(Gradient({**whole, "4.bias": torch.full((4,), torch.nan)}), "4.bias holds NaN")
    refused(Weights(whole), "learning_rate")
    with pytest.raises(WrongInput, match="empty"):
        gradient_update(net, state, batch.take(torch.zeros(3, dtype=torch.bool)))


def test_a_parameter_that_is_not_used_has_a_gradient_of_zero_and_others_none_is_refused(rng):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.spare, self.last = nn.Linear(2, 2), nn.Linear(4, 3)

        def forward(self, x):
            return self.last(x.flatten(1))

    net, batch = Odd(), Batch(torch.randn(2, 1, 2, 2, generator=rng), torch.tensor([0, 2]))
    values = gradient_update(net, tree.state_of(net), batch).values
    assert not values["spare.weight"].any() and values["last.weight"].any()
    net.forward = lambda x: torch.zeros(len(x), 3)
    with pytest.raises(WrongInput, match="model: its answers do not depend"):
        gradient_update(net, tree.state_of(net), batch)


def test_running_statistics_of_one_step_show_those_of_the_batch():
    net = create("digits-cnn", (1, 8, 8), 10, derive(1, "initialise")).double()
    state = tree.clone(tree.state_of(net))
    batch = Batch(torch.rand(6, 1, 8, 8, generator=derive(0, "x")).double(), torch.arange(6))
    net.train()(batch.inputs)
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    one = torch.ones(1, 1, 1)
    known = Knowledge(net, (1, 8, 8), 10, one, one, 6, batchnorm="batch", learning_rate=0.1)
    view = ServerView(state, Weights(dict(net.named_parameters()), buffers))
    wanted = statistics_of(net, state, batch, "batch")
    shown = read_statistics(view, known)
    assert shown is not None and shown.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(shown[name], value, rtol=1e-9, atol=1e-9)
    assert read_statistics(view, replace(known, local_steps=2)) is None
    assert read_statistics(ServerView(state, Weights(view.update.values)), known) is None
