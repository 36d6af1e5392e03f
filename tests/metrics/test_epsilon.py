import math

import pytest
import torch
from scipy.stats import beta, binom

from secateur.metrics.epsilon import Counts, bound_of, epsilon_bound, one_run_bound, one_run_p_value
from secateur.seeding import derive


def randomised_response(epsilon, rows, seed=0):
    """Scores that say the truth with the chance e^epsilon / (1 + e^epsilon): exactly epsilon-private."""
    rng = derive(seed, "response")
    member = torch.rand(rows, generator=rng) < 0.5
    honest = torch.rand(rows, generator=rng) < math.exp(epsilon) / (1 + math.exp(epsilon))
    return (member == honest).double(), member


def test_randomised_response_is_bounded_by_its_epsilon():
    bound = epsilon_bound(*randomised_response(2.0, 100_000), derive(0, "half"))
    assert 1.8 < bound.value < 2.0 and bound.rows == 50_000
    assert bound.refutes(1.0) and not bound.refutes(2.0)


def test_the_bound_holds_at_its_level():
    above = sum(
        epsilon_bound(*randomised_response(0.5, 400, seed), derive(seed, "half")).value > 0.5 for seed in range(200)
    )
    assert above <= 10  # 2.5 % on each of two rates: at most 5 % together


def test_by_hand_on_a_perfect_attack():
    member = torch.arange(200) < 100
    bound = epsilon_bound(member.double(), member, derive(3, "half"))
    inside = round(bound.rows * 0.5)  # near fifty members and fifty others are tested
    low, high = beta.ppf(0.025, inside, 1), beta.ppf(0.975, 1, inside)
    assert bound.value == pytest.approx(math.log(low / high), abs=0.3) and (bound.tpr, bound.fpr) == (1.0, 0.0)


def test_non_members_can_be_the_accused_side():
    rng = derive(1, "scores")
    member = torch.arange(20_000) < 10_000
    scores = torch.rand(20_000, generator=rng).double()
    scores[~member & (torch.rand(20_000, generator=rng) < 0.3)] = -1.0  # only non-members are given away
    assert epsilon_bound(scores, member, derive(1, "half")).value > 3


def test_delta_and_level_enter_the_bound():
    # 60 of 100 and 10 of 100: the ends of Clopper and Pearson at .025 are .4972 and .1762
    counts = Counts(60, 100, 10, 100)
    assert bound_of(counts) == pytest.approx(math.log(0.4972 / 0.1762), abs=1e-3)
    assert bound_of(counts, delta=0.1) == pytest.approx(math.log(0.3972 / 0.1762), abs=1e-3)
    assert bound_of(counts, delta=0.4) == 0.0
    low, high = beta.ppf(0.0025, 60, 41), beta.ppf(0.9975, 11, 90)
    assert bound_of(counts, level=0.005) == pytest.approx(math.log(low / high))
    scores, member = randomised_response(2.0, 20_000)
    bounds = [epsilon_bound(scores, member, derive(0, "half"), delta) for delta in (0.0, 0.1)]
    assert bounds[1].value == bound_of(bounds[1].counts, 0.1) < bounds[0].value == bound_of(bounds[0].counts)


def test_chance_shows_nothing():
    rng = derive(2, "scores")
    scores, member = torch.rand(1000, generator=rng), torch.rand(1000, generator=rng) < 0.5
    assert epsilon_bound(scores, member, derive(2, "half")).value == 0.0


def test_one_run_by_hand():
    # 8 of 10 guesses right under epsilon = 0: P[B(10, .5) >= 8] = (45 + 10 + 1) / 1024
    assert one_run_p_value(10, 10, 8, 0.0, 0.0) == pytest.approx(56 / 1024)
    # with delta: the largest of P[8 > B >= 8 - i] / i is at i = 3: (120 + 210 + 252) / 1024 / 3
    wanted = 56 / 1024 + 2 * 10 * 1e-3 * max(120 / 1024, 330 / 2048, 582 / 3072, 792 / 4096)
    assert one_run_p_value(10, 10, 8, 0.0, 1e-3) == pytest.approx(wanted)


def test_one_run_bound_is_where_its_p_value_meets_the_level():
    bound = one_run_bound(1000, 200, 180, 1e-5)
    assert one_run_p_value(1000, 200, 180, bound, 1e-5) == pytest.approx(0.05, abs=1e-6)
    right = 1 / (1 + math.exp(-one_run_bound(1000, 200, 180)))
    assert binom.sf(179, 200, right) == pytest.approx(0.05, abs=1e-6)
    assert one_run_bound(1000, 200, 105) == 0.0
    assert one_run_bound(1000, 200, 200) > bound
