"""Proposition 1 where it is a theorem, where it is broken, and on real reconstructions."""

import pytest
import torch
from torch import nn

from dgp_theorems import cosine_on_support, gamma_1
from secateur.attacks.inversion.ig import IG
from secateur.attacks.inversion.updates import gradient_update
from secateur.data.embedded import digits
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView
from secateur.models.create import create
from secateur.theory.gradient_distance import cosine_distance, distance, gradient_map, reconstruction_bound
from secateur.tree import state_of
from silent_watch import Silent


def squared(outputs, labels):
    return outputs.square().sum() / 2


class Scale(nn.Module):
    """x -> w x: with a loss of (w x)^2 / 2 the gradient by w is w x^2, which anyone can differentiate."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))

    def forward(self, x):
        return x * self.w


def test_by_hand_and_broken_by_hand():
    """phi(x) = 2 x^2: at x = 1 its slope is 4, so from 1 to 3 it says |x - x'| >= 16 / 4 = 4, and it is 2."""
    net, label = Scale(), torch.tensor([0])
    truth = Batch(torch.tensor([[1.0]], dtype=torch.float64), label)
    found = reconstruction_bound(
        net, state_of(net), truth, torch.tensor([[3.0]], dtype=torch.float64), torch.Generator(), loss=squared
    )
    assert (found.error, found.gradients, found.norm) == pytest.approx((2, 16, 4))
    assert found.bound == pytest.approx(4) and found.violated
    assert found.bound_by_sent is None and found.violated_by_sent is None
    held = reconstruction_bound(net, state_of(net), truth, truth.inputs + 2, torch.Generator(), points=2, loss=squared)
    assert held.norm == pytest.approx(12) and not held.violated


def test_phi_is_the_gradient_that_a_client_sends(rng):
    net = create("digits-cnn", (1, 8, 8), 10, rng)
    batch = Batch(torch.randn(3, 1, 8, 8, generator=rng), torch.tensor([1, 2, 3]))
    flat = torch.cat([v.flatten() for v in gradient_update(net, state_of(net), batch).values.values()])
    assert torch.allclose(gradient_map(net, state_of(net), batch.labels)(batch.inputs), flat, atol=1e-5)


def test_what_the_defense_is_said_to_allow_is_its_own_distance(rng):
    net = create("lenet-zhu", (1, 8, 8), 10, rng).double()
    truth = Batch(torch.rand(1, 1, 8, 8, generator=rng, dtype=torch.float64), torch.tensor([4]))
    gradient = gradient_update(net, state_of(net), truth).values
    sent = DualGradientPruning().compress(gradient)
    found = reconstruction_bound(net, state_of(net), truth, truth.inputs, rng, sent)
    assert found.error == found.gradients == 0 and not found.violated
    assert found.sent == pytest.approx(distance(gradient, sent))
    assert found.violated_by_sent  # the true picture itself: nothing keeps an attacker from it


def test_near_the_truth_it_holds_where_phi_is_smooth(rng):
    net = create("lenet-zhu", (1, 8, 8), 10, rng).double()
    truth = Batch(torch.rand(1, 1, 8, 8, generator=rng, dtype=torch.float64), torch.tensor([4]))
    moves = [1e-4 * torch.randn(1, 1, 8, 8, generator=rng, dtype=torch.float64) for _ in range(5)]
    found = [reconstruction_bound(net, state_of(net), truth, truth.inputs + move, rng) for move in moves]
    assert not any(bound.violated for bound in found)


@pytest.mark.parametrize("upload", [TopK(), DualGradientPruning()], ids=["top-k", "dgp"])
def test_a_real_attack_finds_a_gradient_nearer_to_the_true_one_than_what_was_sent(upload, rng):
    """So ||grad W - g|| limits nothing: what comes back has not the gradient that was sent, but one of a picture."""
    net = create("lenet-zhu", (1, 8, 8), 10, rng).eval()
    state, middle = state_of(net), torch.full((1, 1, 1), 0.5)
    data = digits()
    truths = [Batch(data.inputs[i : i + 1] * 0.376 / 0.5 - 0.39, data.labels[i : i + 1]) for i in range(2)]
    known = Knowledge(net, (1, 8, 8), 10, middle, middle, labels=data.labels[:2, None])
    gradients = [gradient_update(net, state, truth).values for truth in truths]
    sent = [upload.compress(gradient) for gradient in gradients]
    views = [[ServerView(state, Gradient(each))] for each in sent]
    found = dict(IG(iterations=150, tv=1e-3).reconstruct(views, known, [rng] * len(views), Silent()))
    bounds = []
    for i, (truth, gradient) in enumerate(zip(truths, gradients, strict=True)):
        guess = found[i].batch.inputs
        reached = cosine_distance(gradient_update(net, state, Batch(guess, truth.labels)).values, gradient)
        assert reached < cosine_on_support(0.0, gamma_1(gradient, sent[i]).whole) / 2
        bounds.append(reconstruction_bound(net, state, truth, guess, rng, sent[i]))
    assert not any(bound.violated for bound in bounds)  # Eq. 2 itself held
    assert all(bound.gradients < bound.sent for bound in bounds)


def test_with_relu_the_gradient_jumps_and_no_norm_bounds_it(rng):
    """phi of relu(w x + b): on the dead side 0, on the other (x, 1), however near they are."""
    net = nn.Sequential(nn.Linear(1, 1), nn.ReLU()).double()
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    truth = Batch(torch.tensor([[1e-3]], dtype=torch.float64), torch.tensor([0]))
    found = reconstruction_bound(
        net, state_of(net), truth, -truth.inputs, rng, points=2, loss=lambda outputs, labels: outputs.sum()
    )
    assert found.norm == pytest.approx(1) and found.gradients > 1 > 100 * found.error and found.violated


def test_pictures_that_were_not_matched_are_refused(rng):
    net = create("lenet-zhu", (1, 8, 8), 10, rng)
    with pytest.raises(WrongInput, match="guess"):
        reconstruction_bound(
            net, state_of(net), Batch(torch.zeros(2, 1, 8, 8), torch.tensor([0, 1])), torch.zeros(1, 1, 8, 8), rng
        )
