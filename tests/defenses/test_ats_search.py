"""The search for ATS's policies: both scores by hand, and a tiny search."""

import math
from itertools import pairwise

import pytest
import torch
from torch import nn

from secateur import tree
from secateur.defenses.ats import (
    LEAST,
    AutomaticTransformationSearch,
    accuracy_score,
    eigenvalue_score,
    privacy_scores,
    search,
    write_policies,
)
from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.models.small import lenet_zhu


def score(*values):
    return -sum(math.log(v + LEAST) + 1 / (v + LEAST) for v in values)


def summed(outputs, labels):
    """A loss whose gradient by a linear layer's weight is the input, and by its bias 1."""
    return outputs.sum()


def test_the_privacy_score_by_hand():
    picture, noise = torch.tensor([[1.0, 0.0]]).double(), torch.tensor([[0.0, 1.0]]).double()
    curve = [i / math.hypot(i, 20 - i) for i in range(21)]  # the cosine of (i, 20 - i) and (1, 0)
    area = sum((a + b) / 2 / 20 for a, b in pairwise(curve))
    batch = Batch(picture, torch.tensor([0]))
    for bias, expected in ((False, area), (True, (area + 1) / 2)):  # the bias's cosine is always 1
        net = nn.Linear(2, 1, bias=bias).double()
        found = privacy_scores(net, tree.state_of(net), batch, noise, summed)
        assert found.tolist() == pytest.approx([expected])


def test_every_example_has_a_privacy_score_of_its_own(rng):
    net = nn.Sequential(nn.Linear(3, 4), nn.Sigmoid(), nn.Linear(4, 2)).double()
    state, inputs = tree.state_of(net), torch.randn(2, 3, generator=rng, dtype=torch.double)
    noise, labels = torch.randn(2, 3, generator=rng, dtype=torch.double), torch.tensor([1, 0])
    both = privacy_scores(net, state, Batch(inputs, labels), noise)
    alone = [privacy_scores(net, state, Batch(inputs[i : i + 1], labels[i : i + 1]), noise[i : i + 1]) for i in (0, 1)]
    assert torch.allclose(both, torch.cat(alone)) and bool((both < 1).all())
    same = privacy_scores(net, state, Batch(inputs, labels), inputs)  # nothing to blend: all of it shows at once
    assert same.tolist() == pytest.approx([1, 1])


def test_the_eigenvalue_score_by_hand():
    assert eigenvalue_score(torch.eye(3).double()) == pytest.approx(score(1, 1, 1))
    assert eigenvalue_score(torch.tensor([[1, 0.6], [0.6, 1]]).double()) == pytest.approx(score(1.6, 0.4))
    assert eigenvalue_score(torch.tensor([[math.nan, math.nan], [math.nan, 1]]).double()) == pytest.approx(score(0, 1))


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()).double())

    def forward(self, x):
        return self.weight * x.square()


def test_the_accuracy_score_by_hand():
    inputs = torch.tensor([[1.0, 2.0, 3.0], [1.0, 3.0, 2.0]]).double()  # slopes 2x; their correlation is 1/2
    net = Square()
    assert accuracy_score(net, tree.state_of(net), inputs) == pytest.approx(score(1.5, 0.5))
    linear = nn.Linear(3, 2).double()  # treats all examples alike: one eigenvalue has it all
    assert accuracy_score(linear, tree.state_of(linear), inputs) == pytest.approx(score(2, 0), rel=1e-3)


def test_a_search_gives_policies_that_the_defense_takes(rng):
    net = lenet_zhu((1, 8, 8), 4)
    state = tree.state_of(net)
    batch = Batch(torch.rand(4, 1, 8, 8, generator=rng), torch.arange(4))
    unit = torch.zeros(1, 1, 1), torch.ones(1, 1, 1)

    def found(threshold):
        given = (net, state, state, batch, *unit, torch.Generator().manual_seed(1))
        return search(*given, candidates=5, threshold=threshold)

    every = found(-1e9)
    assert len(every) == 5 and [each.privacy for each in every] == sorted(each.privacy for each in every)
    assert all(-1 <= each.privacy <= 1 and each.accuracy <= -4 + 1e-3 for each in every)
    assert every == found(-1e9)
    middle = sorted(each.accuracy for each in every)[2]
    assert found(middle) == [each for each in every if each.accuracy >= middle]
    AutomaticTransformationSearch(write_policies(tuple(each.policy for each in every[:2])))
    with pytest.raises(WrongInput, match=r"-3 cannot be reached with 4 examples; must be at most -4"):
        found(-3)
