import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from secateur.defenses.ppb import PairBasedPosteriorBalancing as Ppb
from secateur.errors import WrongInput


def test_equation_6_by_hand_on_one_pair():
    # posteriors (.8, .2) and (.4, .6): ranked they are (.8, .2) and (.6, .4)
    logits = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log()
    labels = torch.tensor([0, 1])
    divergence = 0.6 * math.log(0.6 / 0.8) + 0.4 * math.log(0.4 / 0.2)
    prediction = -(math.log(0.8) + math.log(0.6)) / 2
    assert float(Ppb(strength=3.0)(logits, labels)) == pytest.approx(prediction + 3 * divergence, rel=1e-6)


def test_the_odd_example_has_no_pair_and_a_batch_of_one_has_none():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2])
    paired = Ppb(1.0)(logits[:2], labels[:2]) - cross_entropy(logits[:2], labels[:2])
    assert torch.allclose(Ppb(1.0)(logits, labels) - cross_entropy(logits, labels), paired, atol=1e-6)
    assert Ppb(1.0)(logits[:1], labels[:1]) == cross_entropy(logits[:1], labels[:1])


def test_the_gradient_flows_through_both_of_a_pair():
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 1])
    assert torch.autograd.gradcheck(lambda x: Ppb(2.0)(x, labels), logits)
    (balancing,) = torch.autograd.grad(Ppb(2.0)(logits, labels) - cross_entropy(logits, labels), logits)
    assert (balancing.abs().sum(1) > 0).all()


@pytest.mark.parametrize("strength", [-1.0, math.nan, math.inf])
def test_a_strength_must_be_finite_and_not_negative(strength):
    with pytest.raises(WrongInput, match=f"strength: {strength} is not allowed; must be at least 0"):
        Ppb(strength)
