"""A stacked convolution against one network after the other: by torch's operations, and by interpreted kernels."""

import os

import pytest
import torch
from torch import nn, vmap
from torch.func import functional_call, grad, grad_and_value
from torch.nn import functional as F

from tiny_rules import Half, Moving, federation, run

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from secateur.config import defense
from secateur.defenses.uploads import protection_of
from secateur.federated.client_training import LocalTraining
from secateur.gpu import stacked_layers
from secateur.gpu.precision import tf32
from secateur.gpu.stacked_layers import Products
from secateur.gpu.triton_loader import load_kernels
from secateur.models.small import conv_2, conv_4

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LANES = 3


def _numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _taken(monkeypatch, kernels, dtype):
    """Every convolution that is known, by kernels of this name or by operations of torch; how often."""
    calls = []

    def takes(x, weight, bias=None, stride=1, padding=0, dilation=1, groups=1):
        same = tuple(size // 2 for size in weight.shape[2:])
        calls.append(fits := padding == same and stride == (1, 1))
        return fits

    monkeypatch.setattr(stacked_layers, "takes", takes)
    monkeypatch.setattr(stacked_layers, "kernels_for", lambda x, name: kernels if x.dtype == dtype else None)
    return calls


def _compared(net, inputs, labels, bound):
    def loss(params, inputs, labels):
        return F.cross_entropy(functional_call(net, params, (inputs,)), labels)

    stacked = {
        name: _numbers(LANES, *value.shape, seed=i).to(value.dtype) * 0.1
        for i, (name, value) in enumerate(net.named_parameters())
    }
    with Products(), tf32(False):
        inside, losses = vmap(grad_and_value(loss))(stacked, inputs, labels)
        leaves = {name: value.clone().requires_grad_() for name, value in stacked.items()}
        total = vmap(loss)(leaves, inputs, labels).sum()
        outside = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    for lane in range(LANES):
        one = {name: value[lane].double() for name, value in stacked.items()}
        given = inputs[lane].double(), labels[lane]
        exact = grad(lambda params, *rest: F.cross_entropy(functional_call(net, params, rest[:1]), rest[1]))(
            one, *given
        )
        assert float(losses[lane]) == pytest.approx(float(loss(one, *given)), rel=bound)
        for name, value in exact.items():
            for found in (inside, outside):
                assert float((found[name][lane] - value).norm()) <= bound * float(value.norm()), name
    assert all(value.is_contiguous() for found in (inside, outside) for value in found.values())


@pytest.mark.parametrize("network", [conv_2, conv_4])  # of conv-4 two convolutions make pictures larger: not known
def test_gradients_are_those_of_each_network(network, monkeypatch):
    calls = _taken(monkeypatch, None, torch.float32)
    net = network((1, 8, 8), 5).double().to(DEVICE)
    inputs, labels = _numbers(LANES, 4, 1, 8, 8).double(), torch.arange(LANES * 4, device=DEVICE).view(LANES, 4) % 5
    _compared(net, inputs, labels, 1e-9)
    assert any(calls) and (network is conv_2) == all(calls)


@pytest.mark.system
def test_kernels_give_the_same(monkeypatch):
    pytest.importorskip("triton", reason="left out: Triton is not installed")
    from secateur.gpu import stacked_layers_kernels

    calls = _taken(monkeypatch, stacked_layers_kernels, torch.float32)
    net = nn.Sequential(nn.Conv2d(4, 6, 5, padding=2), nn.ReLU(), nn.Conv2d(6, 7, (3, 1), padding=(1, 0), bias=False))
    net = nn.Sequential(*net, nn.Flatten(), nn.Linear(7 * 24, 5)).to(DEVICE)
    inputs, labels = _numbers(LANES, 3, 4, 4, 6), torch.arange(LANES * 3, device=DEVICE).view(LANES, 3) % 5
    _compared(net, inputs, labels, 1e-4)
    assert calls and all(calls)


@pytest.mark.system
def test_kernels_are_found_and_taken_at_any_depth(monkeypatch):
    """The first question for them may come from inside of vmap and grad, where new tensors have no memory."""
    pytest.importorskip("triton", reason="left out: Triton is not installed")
    monkeypatch.setattr(stacked_layers, "DEVICE", DEVICE)
    monkeypatch.setattr(stacked_layers, "takes", lambda *given: True)
    found = []

    def kernels_for(x, name):
        found.append(load_kernels(name, stacked_layers._probe_convolution, "tests"))
        return found[-1]

    monkeypatch.setattr(stacked_layers, "kernels_for", kernels_for)
    x, weight = _numbers(2, LANES, 4, 5, 3, 3), _numbers(2, LANES, 6, 5, 3, 3)

    def loss(weight, x):
        kernels_for(x, stacked_layers.CONVOLUTION)
        return stacked_layers.convolution(x, weight).square().sum()

    load_kernels.cache_clear()
    with tf32(False):
        many = vmap(grad(loss))(weight[0], x[0])
        nested = vmap(vmap(grad(loss)))(weight, x)  # as dp inside of a federation has it
    assert found and all(found)
    for lane in range(LANES):
        exact = grad(lambda weight, x: F.conv2d(x, weight, padding=1).square().sum())(weight[0, lane], x[0, lane])
        for one in (many[lane], nested[0, lane]):
            torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-4 * float(exact.abs().max()))


def test_what_is_recorded_outside_is_not_left_out(monkeypatch):
    monkeypatch.setattr(stacked_layers, "kernels_for", lambda x, name: pytest.fail("kernels would leave it out"))
    x, g = _numbers(4, 3, 4, 4).requires_grad_(), _numbers(4, 2, 4, 4)
    assert stacked_layers.by_filters(g, x, 2, (3, 3)).requires_grad


def test_weights_that_all_share_and_inputs_that_all_share():
    x, weight, bias = _numbers(2, 3, 4, 4).double(), _numbers(5, 3, 3, 3).double(), _numbers(LANES, 5).double()
    found = vmap(stacked_layers.convolution, (None, None, 0))(x, weight, bias)
    for lane in range(LANES):
        torch.testing.assert_close(found[lane], F.conv2d(x, weight, bias[lane], padding=1))
    many = _numbers(2, LANES, 3, 4, 4).double()
    found = vmap(stacked_layers.convolution, (1, None, None))(many, weight, None)
    for lane in range(LANES):
        torch.testing.assert_close(found[lane], F.conv2d(many[:, lane], weight, padding=1))


@pytest.mark.parametrize("taps", [(3, 3), (1, 1), (5, 3)])
@pytest.mark.parametrize("back", [False, True])
def test_every_derivative_of_both_ways(taps, back):
    """Of one network and of many: those of F.conv2d, with turned filters on the way back."""
    x, weight = _numbers(LANES, 2, 5 if back else 3, 4, 4).double(), _numbers(LANES, 5, 3, *taps).double()
    bias = _numbers(LANES, 3 if back else 5, seed=1).double()

    def plain(x, weight, bias):
        padding = [size // 2 for size in taps]
        return F.conv2d(x, stacked_layers.transpose_filters(weight) if back else weight, bias, padding=padding)

    def own(x, weight, bias):
        return stacked_layers.convolution(x, weight, bias, back)

    def first(function):
        return grad(lambda *given: function(*given).pow(3).sum(), (0, 1, 2))

    def second(function):
        return grad(lambda *given: sum(each.pow(2).sum() for each in first(function)(*given)), (0, 1, 2))

    for way in (first, second):
        found = vmap(way(own))(x, weight, bias)
        for lane in range(LANES):
            exact = way(plain)(x[lane], weight[lane], bias[lane])
            torch.testing.assert_close(way(own)(x[lane], weight[lane], bias[lane]), exact)
            torch.testing.assert_close(tuple(each[lane] for each in found), exact)


@pytest.mark.parametrize(
    "given, known",
    [
        ({}, True),
        ({"stride": (2, 2)}, False),
        ({"padding": (0, 0)}, False),
        ({"padding": "same"}, False),
        ({"dilation": (2, 2)}, False),
        ({"groups": 2}, False),
    ],
)
def test_what_is_known(given, known, monkeypatch):
    monkeypatch.setattr(stacked_layers, "kernels_for", lambda x, name: torch)
    usual = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1), "groups": 1} | given
    assert stacked_layers.takes(_numbers(2, 4, 5, 5), _numbers(6, 4, 3, 3), None, *usual.values()) is known
    assert not stacked_layers.takes(_numbers(2, 4, 5, 5), _numbers(6, 4, 2, 2), None, *usual.values())


def test_without_kernels_nothing_is_taken():
    if DEVICE == "cpu":
        assert not stacked_layers.takes(_numbers(2, 4, 5, 5), _numbers(6, 4, 3, 3), None, (1, 1), (1, 1), (1, 1), 1)


CASES = {
    "plain": {},
    "moving": {"base": Moving()},
    "pseudo-mix": protection_of(defense("pseudo-mix")) | {"base": Half()},
    "priprune": protection_of(defense("priprune:sharing=0.02")) | {"base": Half()},
    "private": protection_of(defense("priprune:sharing=0.02+dp")) | {"local": LocalTraining(1, None, 4, 0.1)},
}


@pytest.mark.parametrize("case", CASES)
def test_rounds_are_those_of_one_client_after_the_other(case, monkeypatch):
    calls = _taken(monkeypatch, None, torch.float32)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        parts = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 3, padding=1), nn.MaxPool2d(2), nn.Flatten()]
        net = nn.Sequential(*parts, nn.Linear(27, 3)).double()
    one, many = (federation(net, execution=execution, **CASES[case]) for execution in ("sequential", "stacked"))
    wanted, found = run(one), run(many)
    assert any(calls)
    assert [(row.metric, row.value) for row in found] == [(row.metric, pytest.approx(row.value)) for row in wanted]
    for name, value in one.model().items():
        torch.testing.assert_close(many.model()[name], value, rtol=0, atol=1e-9)
