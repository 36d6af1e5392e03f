"""Outpost by hand: pruning, risk, Fisher information, and how often it is applied."""

import pytest
import torch

from secateur.defenses.outpost import CHANCE, Outpost, risk
from secateur.errors import WrongInput
from secateur.interfaces import UploadContext


def turning(weights, number=0, seed=0):
    return UploadContext(None, weights, None, number, torch.Generator().manual_seed(seed))


GRADS = {"w": torch.tensor([[1.0, 4.0, 0.5], [-3.0, 2.0, 0.5]]), "b": torch.tensor([0.1, 0.3])}
WEIGHTS = {"w": torch.tensor([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]]), "b": torch.tensor([-5.0, 5.0])}


def test_risk_is_the_variance_up_to_one():
    assert float(risk(WEIGHTS["w"])) == pytest.approx(0.25) and float(risk(WEIGHTS["b"])) == 1
    assert float(risk(torch.tensor([3.0]))) == 0


def test_fisher_information_is_ranked_over_all_tensors():
    # means of g^2 over the first axis: w (5, 10, .25), b .05: of these four, half are two
    assert {name: mask.tolist() for name, mask in Outpost(phi=0.5).mask_informative(GRADS).items()} == {
        "w": [[True, True, False]] * 2,
        "b": [False, False],
    }
    everything = Outpost(phi=1.0).mask_informative(GRADS)
    assert all(bool(mask.all()) for mask in everything.values())
    assert not any(bool(mask.any()) for mask in Outpost(phi=0).mask_informative(GRADS).values())


def test_prune_then_noise_by_hand():
    drawn = {name: torch.ones_like(value) for name, value in GRADS.items()} | {CHANCE: torch.tensor(0.5)}
    sent, state = Outpost(phi=0.5, rho=0.5)(GRADS, {}, turning(WEIGHTS), noise=drawn)
    # kept: 4, -3 and 2; noise .8 * .25 = .2 in the first two columns, pruned entries too
    assert torch.allclose(sent["w"], torch.tensor([[0.2, 4.2, 0.0], [-2.8, 2.2, 0.0]]))
    assert torch.allclose(sent["b"], torch.tensor([0.0, 0.3])) and state == {}


def test_it_is_applied_with_a_probability_that_falls_by_round():
    def applied(number):
        draws = [Outpost()(GRADS, {}, turning(WEIGHTS, number, seed))[0]["b"][0] for seed in range(400)]
        return sum(bool(value != GRADS["b"][0]) for value in draws) / 400

    assert applied(0) == 1
    assert applied(10) == pytest.approx(0.5, abs=0.08)
    assert applied(90) == pytest.approx(0.1, abs=0.05)


def test_a_round_without_it_sends_the_gradient_as_it_is():
    drawn = {name: torch.ones_like(value) for name, value in GRADS.items()} | {CHANCE: torch.tensor(0.51)}
    sent, _ = Outpost()(GRADS, {}, turning(WEIGHTS, 10), noise=drawn)
    assert all(torch.equal(sent[name], value) for name, value in GRADS.items())


def test_the_noise_fills_pruned_entries(rng):
    grads = {"w": torch.randn(50, 100, generator=rng), "v": 1e-3 * torch.randn(50, 100, generator=rng)}
    weights = {name: torch.randn(50, 100, generator=rng) for name in grads}
    sent, _ = Outpost()(grads, {}, turning(weights))
    shares = {name: float((value != 0).double().mean()) for name, value in sent.items()}
    assert shares["v"] == pytest.approx(0.2) and shares["w"] == pytest.approx(0.8 + 0.2 * 0.2, abs=0.02)


@pytest.mark.parametrize("given", [{"rho": 1.0}, {"phi": 1.1}, {"strength": -1.0}, {"beta": -0.1}])
def test_wrong_settings_are_refused(given):
    with pytest.raises(WrongInput, match=f"^{next(iter(given))}: "):
        Outpost(**given)
