"""Stacked L-BFGS equals torch.optim.LBFGS, trial by trial."""

import pytest
import torch

from secateur.attacks.inversion.optimisation import LBFGS
from secateur.attacks.inversion.problem import Evaluated

ITERATIONS = 3


def rosenbrock(x):
    """A valley that bends, of any even number of entries, by trial."""
    a, b = x[..., ::2], x[..., 1::2]
    return ((1 - a).square() + 10 * (b - a.square()).square()).sum(-1)


def bowl(x):
    """Flat soon: meets the tolerances."""
    return (x - 3).square().sum(-1) * 0.5


def wave(x):
    """Of both curvatures, so that some pairs are not stored."""
    return (2 * x).cos().sum(-1) + x.square().sum(-1)


def torchs(loss, start, history, rate):
    leaf = start.clone().requires_grad_()
    optimiser = torch.optim.LBFGS([leaf], lr=rate, max_iter=20, history_size=history)
    path = []
    for _ in range(ITERATIONS):

        def closure():
            optimiser.zero_grad()
            value = loss(leaf)
            value.backward()
            return value

        optimiser.step(closure)
        path.append(leaf.detach().clone())
    return torch.stack(path)


@pytest.mark.parametrize("history", [3, 100])
@pytest.mark.parametrize(("loss", "rate"), [(rosenbrock, 0.05), (bowl, 1.0), (wave, 0.1)])
def test_equal_trial_by_trial(loss, rate, history):
    start = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rule = LBFGS(ITERATIONS, learning_rate=rate, history=history)
    variables = {"inputs": start[:, :4].view(5, 2, 2), "labels": start[:, 4:]}
    state = {name: value.clone() for name, value in variables.items()} | rule.begin(variables)
    state["clock"] = torch.zeros(5, dtype=torch.int64)

    def evaluate():
        leaf = torch.cat([state["inputs"].flatten(1), state["labels"]], 1).requires_grad_()
        value = loss(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        found = {"inputs": gradient[:, :4].view(5, 2, 2), "labels": gradient[:, 4:]}
        return Evaluated(value.detach(), value.detach(), found)

    wanted = torch.stack([torchs(loss, one, history, rate) for one in start], 1)
    for step in range(ITERATIONS):
        rule(state, ["inputs", "labels"], evaluate)
        state["clock"] += 1
        found = torch.cat([state["inputs"].flatten(1), state["labels"]], 1)
        torch.testing.assert_close(found, wanted[step], rtol=1e-6, atol=1e-6)
    before = state["inputs"].clone()
    rule(state, ["inputs", "labels"], evaluate)
    assert torch.equal(before, state["inputs"]), "the clocks have run out"
