"""Definition 1 from trials, and Theorem 1 with the counter-examples that show what it is worth."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgp_theorems import cosine_on_support, gamma_1, theorem_1_euclidean
from secateur.defenses.dgp import DualGradientPruning
from secateur.errors import WrongInput
from secateur.theory.gradient_distance import cosine_distance, distance, epsilon, norm, theorem_1_cosine

SHARES = st.floats(0, 1)


def drawn(seed: int, size: int = 40) -> dict[str, torch.Tensor]:
    return {"w": torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)}


def test_epsilon_is_the_least_that_the_wanted_share_of_trials_stays_below():
    distances = torch.tensor([0.5, 0.1, 0.4, 0.2, 0.3])
    assert [epsilon(distances, delta).value for delta in (0.0, 0.2, 0.4, 0.99)] == pytest.approx([0.5, 0.4, 0.3, 0.1])


def test_its_interval_covers_the_true_quantile_as_often_as_it_says():
    rng, covered = torch.Generator().manual_seed(0), 0
    for _ in range(300):
        found = epsilon(torch.rand(60, generator=rng), delta=0.2)
        covered += found.low <= 0.8 <= found.high
    assert covered / 300 >= 0.95


def test_too_few_trials_bound_nothing_and_say_so():
    found = epsilon(torch.arange(20.0), delta=0.1)
    assert found.high == math.inf and "20 trials" in found.note
    assert epsilon(torch.arange(20.0), delta=0.17).high == 19
    assert epsilon(torch.arange(3.0), delta=0.9).low == 0


@pytest.mark.parametrize(
    ("distances", "delta", "field"),
    [([1.0], 1.0, "delta"), ([1.0], -0.1, "delta"), ([], 0.1, "distances"), ([1.0, math.nan], 0.1, "distances")],
)
def test_epsilon_refuses(distances, delta, field):
    with pytest.raises(WrongInput) as error:
        epsilon(torch.tensor(distances), delta)
    assert error.value.field == field


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.floats(0, 3))
def test_theorem_1_as_its_proof_gives_it_bounds_every_attacker_from_above(seed, away):
    gradient = drawn(seed)
    sent = DualGradientPruning().compress(gradient)
    fitted = {"w": sent["w"] + away * drawn(seed + 1)["w"]}
    gamma, true = gamma_1(gradient, sent).whole, distance(fitted, gradient)
    found = theorem_1_euclidean(distance(fitted, sent), gamma, norm(gradient))
    assert found.low - 1e-9 <= true <= found.high + 1e-9
    angles = theorem_1_cosine(cosine_distance(fitted, sent), gamma)
    assert angles.low - 1e-9 <= cosine_distance(fitted, gradient) <= angles.high + 1e-9


def test_theorem_1_guarantees_nothing_the_true_gradient_is_at_distance_0():
    gradient = {"w": torch.tensor([3.0, 4.0])}
    sent = {"w": torch.tensor([3.0, 0.0])}  # gamma_1 = 16/25
    gamma = gamma_1(gradient, sent).whole
    assert distance(gradient, gradient) == 0
    assert theorem_1_euclidean(distance(gradient, sent), gamma, norm(gradient))[:2] == pytest.approx((8.0, 0.0))
    assert cosine_distance(gradient, gradient) == pytest.approx(0)
    cosine = theorem_1_cosine(cosine_distance(gradient, sent), gamma)  # eps = 1 - 3/5
    assert cosine.printed == pytest.approx(0.4 + 0.6 * 0.8) and cosine.low == pytest.approx(0)


def test_the_printed_cosine_bound_is_broken_by_a_gradient_that_is_not_0_where_dgp_pruned():
    gradient, sent = {"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 0.0])}
    trial = {"w": torch.tensor([1.0, -1.0])}  # step (c) takes its second entry for 0
    found = theorem_1_cosine(cosine_distance(trial, sent), gamma_1(gradient, sent).whole)
    assert cosine_distance(trial, gradient) == pytest.approx(1)
    assert found.printed == pytest.approx(0.7929, abs=1e-4) and found.high == pytest.approx(1)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.floats(0, 1))
def test_on_the_support_the_distance_is_exact_and_below_the_printed_bound(seed, away):
    gradient = drawn(seed)
    sent = DualGradientPruning().compress(gradient)
    trial = {"w": torch.where(sent["w"] != 0, sent["w"] + away * drawn(seed + 1)["w"], 0)}
    eps, gamma = cosine_distance(trial, sent), gamma_1(gradient, sent).whole
    assert cosine_distance(trial, gradient) == pytest.approx(cosine_on_support(eps, gamma), abs=1e-9)
    if eps <= 1:
        assert cosine_on_support(eps, gamma) <= theorem_1_cosine(eps, gamma).printed + 1e-12


@given(SHARES)
def test_a_perfect_fit_of_what_was_sent_is_as_far_as_the_pruning(gamma):
    low, high = theorem_1_cosine(0.0, gamma)[1:]
    assert low == pytest.approx(high) == pytest.approx(cosine_on_support(0.0, gamma), abs=1e-9)


@pytest.mark.parametrize("gamma", [-0.1, 1.1])
def test_a_gamma_of_noise_is_refused(gamma):
    with pytest.raises(WrongInput, match="gamma"):
        theorem_1_cosine(0.1, gamma)
