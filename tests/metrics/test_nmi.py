import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from secateur.errors import WrongInput
from secateur.metrics.pictures import nmi


def by_scikit_learn(truth, guess, levels):
    quantised = [
        np.minimum(np.floor(stack.double().flatten(1).numpy() * levels), levels - 1) for stack in (truth, guess)
    ]
    pairs = list(zip(*quantised, strict=True))
    return (
        [normalized_mutual_info_score(*pair) for pair in pairs],
        [adjusted_mutual_info_score(*pair) for pair in pairs],
    )


@pytest.mark.parametrize("levels", [2, 16, 100, 256])
@pytest.mark.parametrize("shape", [(4, 1, 28, 28), (3, 3, 32, 32), (3, 1, 8, 8)])
def test_as_scikit_learn(rng, levels, shape):
    truth = torch.rand(shape, generator=rng) ** 2
    truth[0, :, ::2] = 0  # one level that many pixels share, as a digit's background
    guess = (truth + 0.2 * torch.randn(shape, generator=rng)).clamp(0, 1)
    found = nmi(truth, guess, levels)
    expected_nmi, expected_ami = by_scikit_learn(truth, guess, levels)
    assert found.nmi.tolist() == pytest.approx(expected_nmi, abs=1e-10)
    assert found.ami.tolist() == pytest.approx(expected_ami, abs=1e-8)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), levels=st.integers(2, 6), side=st.integers(2, 6))
def test_as_scikit_learn_on_few_pixels(seed, levels, side):
    rng = torch.Generator().manual_seed(seed)
    truth, guess = (torch.rand(2, 1, side, side, generator=rng) for _ in range(2))
    found = nmi(truth, guess, levels)
    expected_nmi, expected_ami = by_scikit_learn(truth, guess, levels)
    assert found.nmi.tolist() == pytest.approx(expected_nmi, abs=1e-10)
    assert found.ami.tolist() == pytest.approx(expected_ami, abs=1e-8)


def test_constant_pictures():
    flat, other = torch.zeros(1, 1, 4, 4), torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    assert [value.item() for value in nmi(flat, flat)] == [1, 1, 1]
    assert [value.item() for value in nmi(flat, flat + 0.5)] == [1, 1, 1]
    assert [value.item() for value in nmi(flat, other)] == [0, 0, 0]
    assert [value.item() for value in nmi(other, flat)] == [0, 0, 0]


def test_the_chance_level_is_the_mean_over_permutations(rng):
    truth = torch.rand(1, 1, 12, 12, generator=rng) ** 2
    guess = torch.rand(1, 1, 12, 12, generator=rng)
    orders = torch.stack([torch.randperm(144, generator=rng) for _ in range(2000)])
    permuted = guess.flatten()[orders].view(-1, 1, 12, 12)
    scores = nmi(truth.expand_as(permuted), permuted, 16)
    assert scores.chance.unique().numel() == 1
    assert float(scores.nmi.mean()) == pytest.approx(
        float(scores.chance[0]), abs=4 * float(scores.nmi.std()) / 2000**0.5
    )
    assert float(scores.ami.mean()) == pytest.approx(0, abs=0.01)


def test_more_levels_raise_the_chance_level_and_a_negative_is_no_defense(rng):
    truth, noise = (torch.rand(1, 3, 32, 32, generator=rng) for _ in range(2))
    chances = [nmi(truth, noise, levels).chance.item() for levels in (16, 64, 100, 256)]
    assert chances == sorted(chances) and chances[0] < 0.02 and chances[-1] > 0.3
    exact = torch.randint(256, (1, 1, 16, 16), generator=rng) / 255
    assert nmi(exact, 1 - exact).nmi.item() == pytest.approx(1)


def test_levels_are_checked():
    with pytest.raises(WrongInput, match="levels: 1 is not allowed"):
        nmi(torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), 1)
