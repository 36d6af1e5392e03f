"""The scores of unstructured pruning against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from secateur.interfaces import Batch
from secateur.pruning import masks
from secateur.pruning import scores as pruning_scores
from secateur.pruning.scores import Grasp, L1Unstructured, Random, Snip, SynFlow, balance


def linear(*rows: list[float]) -> nn.Linear:
    layer = nn.Linear(len(rows[0]), len(rows), bias=False).double()
    layer.weight.data.copy_(torch.tensor(rows))
    return layer


def ones(rows: int, features: int, label: int = 0) -> Batch:
    return Batch(torch.ones(rows, features, dtype=torch.float64), torch.full((rows,), label))


def test_l1_drops_the_smallest_magnitudes_of_each_layer_first_and_last_included(rng):
    net = nn.Sequential(linear([1, -2], [3, 0.5]), nn.ReLU(), linear([-10, 20], [30, -40]))
    mask = L1Unstructured()(net, ones(1, 2), 0.5, rng)
    assert mask["0.weight"].tolist() == [[False, True], [True, False]]
    assert mask["2.weight"].tolist() == [[False, False], [True, True]]
    everywhere = L1Unstructured(scope="global")(net, ones(1, 2), 0.25, rng)
    assert everywhere["2.weight"].all() and everywhere["0.weight"].tolist() == [[False, True], [True, False]]


def test_l1_global_takes_over_all_layers_and_states_its_floor(rng):
    net = nn.Sequential(linear([1, -2], [3, 0.5]), nn.ReLU(), linear([-10, 20], [30, -40]))
    with pytest.warns(UserWarning, match=r"would have emptied 0\.weight"):
        mask = L1Unstructured(scope="global")(net, ones(1, 2), 0.5, rng)
    assert mask["0.weight"].tolist() == [[False, False], [True, False]]
    assert mask["2.weight"].tolist() == [[False, True], [True, True]]


def test_random_is_one_uniform_draw_over_the_network():
    net = nn.Sequential(linear([1, 2], [3, 4]), linear([5, 6]))
    mask = Random()(net, ones(1, 2), 0.5, torch.Generator().manual_seed(7))
    draws = torch.rand(6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    kept = torch.cat([mask["0.weight"].flatten(), mask["1.weight"].flatten()])
    assert torch.equal(kept, draws > draws.sort().values[2])


def test_snip_is_the_weight_times_its_gradient(rng):
    # logits (0, 2.5): dL/dw = (p - y) x, and |p - y| is sigmoid(2.5) in both rows
    net = linear([1, -1], [2, 0.5])
    share = 1 / (1 + math.exp(-2.5))
    wanted = share * torch.tensor([[1, 1], [2, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(Snip().scores(net, ones(1, 2), rng)["weight"], wanted)
    assert Snip()(net, ones(1, 2), 0.25, rng)["weight"].tolist() == [[True, True], [True, False]]


def test_grasp_by_hand(rng):
    # one input of 1, weights (a, b), label 0: g = p1/T (-1, 1), H = p0 p1/T^2 [[1, -1], [-1, 1]]
    a, b, temperature = 2.0, 1.0, 200.0
    p0 = 1 / (1 + math.exp(-(a - b) / temperature))
    size = 2 * p0 * (1 - p0) ** 2 / temperature**3
    wanted = torch.tensor([[-a * size], [b * size]], dtype=torch.float64)
    net = linear([a], [b])
    torch.testing.assert_close(Grasp().scores(net, ones(3, 1), rng)["weight"], wanted, rtol=1e-9, atol=0)
    # the paper's score -w * Hg is largest for the first weight, which goes
    assert Grasp()(net, ones(3, 1), 0.5, rng)["weight"].tolist() == [[False], [True]]


def test_grasp_equals_the_explicit_hessian(rng):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    batch = Batch(torch.randn(9, 3, dtype=torch.float64), torch.arange(9) % 3)
    names, shapes = ["0.weight", "2.weight"], [(4, 3), (3, 4)]
    flat = torch.cat([net.get_parameter(name).detach().flatten() for name in names])

    def loss(vector):
        parts = [part.view(shape) for part, shape in zip(vector.split([12, 12]), shapes, strict=True)]
        logits = functional_call(net, dict(zip(names, parts, strict=True)), batch.inputs)
        return F.cross_entropy(logits / 200, batch.labels)

    gradient = torch.autograd.functional.jacobian(loss, flat)
    hessian = torch.autograd.functional.hessian(loss, flat)
    scores = Grasp().scores(net, batch, rng)
    got = torch.cat([scores[name].flatten() for name in names])
    torch.testing.assert_close(got, flat * (hessian @ gradient), rtol=1e-8, atol=1e-18)


def test_grasp_takes_ten_of_each_class_where_the_batch_has_them():
    labels = torch.tensor([0] * 15 + [1] * 3 + [2] * 10 + [0])
    batch = balance(Batch(torch.arange(29.0), labels), 10)
    assert batch.labels.bincount().tolist() == [10, 3, 10]
    assert batch.inputs[:10].tolist() == list(range(10))


def synflow_net() -> nn.Module:
    return nn.Sequential(linear([1, -2], [0.5, 1]), nn.ReLU(), linear([3, -1]))


def test_synflow_by_hand():
    twin, weights = pruning_scores.linearise(synflow_net().float())
    scores = pruning_scores.flow(twin, weights, torch.ones(1, 2, dtype=torch.float64))
    assert scores["0.weight"].tolist() == [[3, 6], [0.5, 1]]
    assert scores["2.weight"].tolist() == [[9, 1.5]]
    assert all(score.sum() == 10.5 for score in scores.values())  # Theorem 1: the flow is the same in every layer


def test_synflow_drops_a_whole_path_and_looks_at_no_data(rng):
    masks = [SynFlow()(synflow_net(), Batch(torch.randn(4, 2), torch.zeros(4)), 0.5, rng) for _ in range(2)]
    for mask in masks:
        assert mask["0.weight"].tolist() == [[True, True], [False, False]]
        assert mask["2.weight"].tolist() == [[True, False]]


def test_synflow_takes_a_hundred_rounds_of_exponential_density(rng, monkeypatch):
    targets = []
    select = masks.select
    monkeypatch.setattr(pruning_scores, "select", lambda *args: targets.append(args[1]) or select(*args))
    SynFlow()(nn.Linear(20, 20), ones(1, 20), 0.9, rng)
    assert len(targets) == 100 and targets[-1] == 0.9
    assert targets[49] == pytest.approx(1 - 0.1**0.5)


def test_synflow_scores_again_after_each_round(rng):
    # flows: 1 and 1.3 into two hidden units, .5, .65, .5, .65 out of them; in many rounds the severed unit goes whole
    net = nn.Sequential(linear([1.0], [1.0]), linear([0.5, 0.65], [0.5, 0.65]))
    once = SynFlow(rounds=1)(net, ones(1, 1), 0.5, rng)
    assert once["0.weight"].all() and once["1.weight"].tolist() == [[False, False], [False, True]]
    many = SynFlow(rounds=100)(net, ones(1, 1), 0.5, rng)
    assert many["0.weight"].tolist() == [[False], [True]]
    assert many["1.weight"].tolist() == [[False, True], [False, True]]
