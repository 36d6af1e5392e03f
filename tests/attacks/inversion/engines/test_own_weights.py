"""Trials with weights of their own: the layers that a GPU takes by kernels, against the plain loop."""

import os

import pytest
import torch
from test_engines import OBJECTIVES, agree, made, soft
from torch import nn

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from secateur.attacks.inversion.engines import autograd as engine
from secateur.attacks.inversion.problem import Problem
from secateur.gpu import stacked_layers
from secateur.gpu.precision import tf32
from secateur.gpu.stacked_layers import Products
from secateur.training.optimisers import LocalSteps


def net():
    """Convolutions that kernels take, one that products take and one that nothing takes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [nn.Conv2d(3, 5, 3, padding=1), nn.Softplus(), nn.Conv2d(5, 6, (3, 1), padding=(1, 0)), nn.MaxPool2d(2)]
        parts += [nn.Softplus(), nn.Conv2d(6, 4, 3, padding=1, bias=False), nn.Tanh(), nn.Conv2d(4, 4, 2, stride=2)]
        return nn.Sequential(*parts, nn.Flatten(), nn.Linear(16, 4))


def own(dtype, trials=3, **options):
    problem, variables, labels = made(net(), batch=2, trials=trials, dtype=dtype)
    shift = torch.linspace(0.8, 1.2, problem.trials, dtype=dtype)
    sent = {name: torch.stack([value * f for f in shift]) for name, value in problem.sent.items()}
    return Problem(problem.net, sent, problem.observed, own_weights=True, **options), variables, labels


@pytest.fixture
def taken(monkeypatch):
    """All layers as on a GPU; which convolutions were asked about, and whether they were taken."""
    asked = []

    def takes(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        asked.append(stride == (1, 1) and padding == tuple(size // 2 for size in weight.shape[2:]))
        return asked[-1]

    monkeypatch.setattr(engine, "layers", lambda problem: Products())
    monkeypatch.setattr(stacked_layers, "takes", takes)
    return asked


@OBJECTIVES
@pytest.mark.parametrize("steps", [1, 2])
def test_a_double_backward_through_stacked_convolutions(objective, steps, taken):
    problem, variables, labels = own(torch.float64, turn=LocalSteps(((),) * steps, (0.05,) * steps))
    agree(engine.evaluate_stacked, problem, variables, labels, objective)
    agree(engine.evaluate_stacked, problem, soft(problem, variables), None, objective)
    assert {True, False} == set(taken)


@pytest.mark.system
@pytest.mark.skipif(torch.cuda.is_available(), reason="left out: nothing to interpret")
@OBJECTIVES
def test_and_through_their_kernels(objective, taken, monkeypatch):
    pytest.importorskip("triton", reason="left out: Triton is not installed")
    from secateur.gpu import stacked_layers_kernels

    called = []

    def kernels_for(x, name):
        called.append(name)
        return stacked_layers_kernels if x.dtype == torch.float32 else None

    monkeypatch.setattr(stacked_layers, "kernels_for", kernels_for)
    agree(engine.evaluate_stacked, *own(torch.float32, trials=2), objective)
    assert called


def test_a_cpu_has_no_such_layers():
    problem, *_ = own(torch.float64)
    assert not isinstance(engine.layers(problem), Products)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
@OBJECTIVES
def test_a_gpu_agrees_with_the_plain_loop(objective):
    problem, variables, labels = own(torch.float32)
    sent, observed = ({name: value.cuda() for name, value in each.items()} for each in (problem.sent, problem.observed))
    moved = Problem(problem.net.cuda(), sent, observed, own_weights=True)
    assert isinstance(engine.layers(moved), Products)
    with tf32(False):
        agree(
            engine.evaluate_stacked,
            moved,
            {name: value.cuda() for name, value in variables.items()},
            labels.cuda(),
            objective,
        )
