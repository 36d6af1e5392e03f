"""Adam, schedules, box and noise: by hand and against torch.optim."""

import pytest
import torch

from secateur.attacks.inversion.optimisation import AdamRule, clamp_to_box, learning_rates
from secateur.attacks.inversion.problem import Evaluated, natural_basis


def test_the_steps_schedule_falls_at_three_five_and_seven_eighths():
    rates = learning_rates("steps", 16, 0.1)
    assert rates.tolist() == pytest.approx([0.1] * 6 + [0.01] * 4 + [0.001] * 4 + [0.0001] * 2 + [0])


def test_warm_up_and_cosine():
    rates = learning_rates("warmup-cosine", 1050, 0.1)
    assert rates[0] == pytest.approx(0.1 / 50) and rates[49] == pytest.approx(0.1) and rates[50] == pytest.approx(0.1)
    assert rates[550] == pytest.approx(0.05) and rates[1049] < 1e-6 and rates[1050] == 0 and len(rates) == 1051
    assert learning_rates("constant", 2, 0.3).tolist() == pytest.approx([0.3, 0.3, 0])


def walk(rule, values, steps, clock=0):
    """Minimise sum (x - 1)^4 from `values` (N, D)."""
    state = {"inputs": values.clone(), "clock": torch.full((len(values),), clock), "noise": torch.ones_like(values)}
    state |= rule.begin({"inputs": values})

    def evaluate():
        gap = state["inputs"] - 1
        return Evaluated(gap.pow(4).sum(1), gap.pow(4).sum(1), {"inputs": 4 * gap.pow(3)})

    for _ in range(steps):
        matching = rule(state, ["inputs"], evaluate)
        state["clock"] += 1
    return state, matching


def test_adam_is_torchs_adam():
    values = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    rates = learning_rates("steps", 20, 0.1)
    state, _ = walk(AdamRule(rates), values, 20)
    for i in range(3):
        leaf = values[i].clone().requires_grad_()
        optimiser = torch.optim.Adam([leaf], 0.1)
        for rate in rates[:-1]:
            optimiser.param_groups[0]["lr"] = float(rate)
            optimiser.zero_grad()
            (leaf - 1).pow(4).sum().backward()
            optimiser.step()
        torch.testing.assert_close(state["inputs"][i], leaf.detach(), rtol=1e-10, atol=1e-10)


def test_the_first_signed_step_is_the_rate():
    values = torch.tensor([[3.0, -5.0, 1.0]])
    state, matching = walk(AdamRule(torch.tensor([0.1, 0.0]), sign=True), values, 1)
    torch.testing.assert_close(state["inputs"], torch.tensor([[2.9, -4.9, 1.0]]))
    assert matching.tolist() == [16 + 1296], "the loss of where it was"


def test_a_step_in_natural_coordinates():
    half = torch.full((1, 1, 1), 0.5, dtype=torch.float64)
    basis = natural_basis((1, 2, 2), half, half)
    inputs = torch.tensor([[[[[1.0, 0.5], [-0.5, 0.2]]]]], dtype=torch.float64)
    state = {"inputs": inputs.clone(), "clock": torch.zeros(1, dtype=torch.int64)}
    rule = AdamRule(torch.tensor([0.1, 0.0]), sign=True, basis=basis)
    state |= rule.begin({"inputs": inputs})
    rule(state, ["inputs"], lambda: Evaluated(inputs.sum(), inputs.sum(), {"inputs": inputs}))  # 1.2, .2, 1.4, -.2
    moved = (basis.coordinates(state["inputs"]) - basis.coordinates(inputs)).flatten().tolist()
    assert moved == pytest.approx([-0.1, 0.1, -0.1, -0.1])


def test_signed_steps_do_not_know_how_large_a_gradient_is():
    values, rates = torch.tensor([[9.0, 2.0]]), torch.tensor([0.1, 0.1, 0.1, 0.0])
    signed, plain = (walk(AdamRule(rates, sign=sign), values, 3)[0]["inputs"] for sign in (True, False))
    assert signed[0].tolist() == pytest.approx([8.7, 1.7], abs=1e-5) and float(plain[0, 1]) > 1.701


def test_noise_is_scaled_by_the_rate():
    state, _ = walk(AdamRule(torch.tensor([0.1, 0.0]), sign=True, noise=0.2), torch.tensor([[1.0]]), 1)
    assert state["inputs"].item() == pytest.approx(1.02)


def test_whoever_is_done_stands_still():
    values = torch.tensor([[3.0]])
    state, _ = walk(AdamRule(torch.tensor([0.1, 0.0]), noise=0.2), values, 1, clock=1)
    assert torch.equal(state["inputs"], values)


def test_box_by_hand():
    inputs = torch.tensor([[-3.0, 0.5, 3.0]]).view(1, 1, 1, 1, 3)
    clamp_to_box(inputs, (torch.full((1, 1, 1), -1.0), torch.full((1, 1, 1), 2.0)))
    assert inputs.flatten().tolist() == [-1, 0.5, 2]
