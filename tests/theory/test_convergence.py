"""Lemma 1, Theorem 2 and Corollary 1 by hand, and on real runs whose every constant is known."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator, nn

from dgp_theorems import corollary_1, corollary_1_rate, count_rounds
from secateur.attacks.inversion.updates import gradient_update
from secateur.data.load import load
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.top_k import TopK
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput
from secateur.federated.collaborative.plan import Plan, schedule_of
from secateur.federated.collaborative.training import CollaborativeTraining
from secateur.models.create import create
from secateur.theory.convergence import (
    Constants,
    check_lemma_1,
    check_theorem_2,
    constants,
    estimate_smoothness,
    full_gradient,
    lemma_1,
    lemma_1_tight,
    theorem_2,
    theorem_2_tight,
)
from secateur.theory.gradient_distance import norm
from secateur.tree import state_of

GIVEN = Constants(gamma=0.5, gradient_square=4.0, variance=1.0, smoothness=2.0, gap=3.0)
GAMMAS = st.floats(0, 0.999)
ROUNDS, RATE = 60, 0.02


def test_lemma_1_by_hand():
    assert lemma_1(0.5, 4.0) == pytest.approx(3 * 0.5 * 2.5 / (2 * 0.25) * 4) == pytest.approx(30)
    assert lemma_1(0.0, 4.0) == 0 and lemma_1(1.0, 4.0) == lemma_1_tight(1.0, 4.0) == math.inf


@given(GAMMAS, st.floats(0, 50))
def test_lemma_1_is_where_its_recursion_ends_and_the_tight_form_lies_below(gamma, begin):
    """Eq. (e): r' = gamma ((1 + 1/a) G^2 + (1 + a) r) with 1 + a = (2 + gamma) / (3 gamma)."""
    if gamma > 1e-6:
        a = (2 + gamma) / (3 * gamma) - 1
        end = lemma_1(gamma, 1.0)
        assert gamma * ((1 + 1 / a) + (1 + a) * end) == pytest.approx(end)
    norm = math.sqrt(lemma_1_tight(gamma, 1.0))
    assert math.sqrt(gamma) * (norm + 1) == pytest.approx(norm)
    assert lemma_1_tight(gamma, 1.0) <= lemma_1(gamma, 1.0) * (1 + 1e-9)


def test_theorem_2_by_hand():
    assert theorem_2(GIVEN, 0.1, 10) == pytest.approx(4 * 3 / 1 + 2 * 2 * 0.1 * 5 + 4 * 0.01 * 4 * 30)
    tight = 0.5 / (1 - math.sqrt(0.5)) ** 2 * 4
    assert theorem_2_tight(GIVEN, 0.1, 10) == pytest.approx(2 * 3 / 1 + 2 * 0.1 * 5 + 0.01 * 4 * tight)


def test_corollary_1_is_theorem_2_at_its_rate():
    rate = corollary_1_rate(GIVEN, 10)
    assert rate == pytest.approx(math.sqrt(3 / (2 * 10 * 5)))
    leading, hidden = corollary_1(GIVEN, 10)
    assert leading == pytest.approx(6 * math.sqrt(2 * 3 * 5 / 10))
    assert leading + hidden == pytest.approx(theorem_2(GIVEN, rate, 10))


def test_at_the_rate_as_corollary_1_prints_it_nothing_converges():
    for rounds in (10, 10**6):
        printed = GIVEN.gap / (GIVEN.smoothness * rounds * (GIVEN.gradient_square + GIVEN.variance))
        assert theorem_2(GIVEN, printed, rounds) > 4 * GIVEN.smoothness * 5
    assert sum(corollary_1(GIVEN, 10**6)) < 0.04


def test_the_rounds_that_are_needed_make_corollary_1_say_g_squared():
    rounds = count_rounds(GIVEN)
    assert sum(corollary_1(GIVEN, rounds)) == pytest.approx(GIVEN.gradient_square)
    assert count_rounds(replace(GIVEN, gamma=1.0)) == math.inf


def test_constants_are_the_largest_over_the_rows_and_lemma_1_is_checked_with_those_met_so_far():
    rows = [
        {"gamma_1_whole": 0.5, "gradient_square": 1.0, "gradient_variance": 0.5, "error_norm": 1.0},
        {"gamma_1_whole": 0.2, "gradient_square": 4.0, "gradient_variance": 0.1, "error_norm": 9.0},
    ]
    assert constants(rows, 2.0, 3.0) == Constants(0.5, 4.0, 0.5, 2.0, 3.0)
    first, second = check_lemma_1(rows, rounds=2)
    assert first == pytest.approx((1.0, 7.5, lemma_1_tight(0.5, 1.0), 4.0)) and first.holds and first.vacuous
    assert second == pytest.approx((81.0, 30.0, lemma_1_tight(0.5, 4.0), 64.0))
    assert not second.holds and not second.vacuous


def test_theorem_2_says_nothing_above_g_squared():
    found = check_theorem_2([1.0, 3.0], GIVEN, 0.1, rounds=10)
    assert found.measured == 2 and found.bound == theorem_2(GIVEN, 0.1, 10) and found.trivial == 4
    assert found.holds and found.vacuous
    assert not check_theorem_2([1.0], replace(GIVEN, gamma=0.0), 1e-3, rounds=10**6).vacuous


def test_smoothness_observed_on_a_parabola_is_its_curvature():
    points = [{"w": torch.tensor([x])} for x in (0.0, 1.0, 1.0, 4.0)]
    assert estimate_smoothness(points, [{"w": 3 * point["w"]} for point in points]) == pytest.approx(3)
    with pytest.raises(WrongInput, match="models"):
        estimate_smoothness(points[1:3], points[1:3])


def test_the_full_gradient_is_the_mean_over_parts(rng):
    net = create("lenet-zhu", (1, 8, 8), 10, rng).double()
    batch = load("digits").limit_rows(50, rng).batch
    batch = batch._replace(inputs=batch.inputs.double())
    whole, parts = (full_gradient(net, state_of(net), batch, rows) for rows in (50, 7))
    assert all(torch.allclose(whole[name], parts[name], atol=1e-12) for name in whole)
    exact = gradient_update(net, state_of(net), batch).values
    assert all(torch.allclose(whole[name], exact[name], atol=1e-12) for name in whole)


UPLOADS = {
    "all": SendAll(),
    "top-k": ErrorFeedback(TopK()),
    "dgp": ErrorFeedback(DualGradientPruning()),
    "release": ErrorFeedback(DualGradientPruning(release=5)),
}


@pytest.fixture(scope="module")
def regression():
    """Softmax regression on digits, two users with 100 examples each, a step a row: all assumptions can be checked.

    K is known, not estimated: half the largest eigenvalue of X^T X / n bounds the Hessian everywhere.
    """
    data = replace(load("digits").limit_rows(200, Generator().manual_seed(0)), train_size=200)
    with_bias = torch.cat([data.inputs.flatten(1), torch.ones(200, 1)], 1).double()
    smoothness = float(torch.linalg.matrix_norm(with_bias, 2)) ** 2 / 200 / 2
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    nn.init.normal_(net[1].weight, std=0.05, generator=Generator().manual_seed(1))
    nn.init.zeros_(net[1].bias)
    found = {"data": data, "net": net, "smoothness": smoothness}
    for name, upload in UPLOADS.items():
        plan = Plan(2, upload, schedule_of([RATE] * ROUNDS), batch_size=100, momentum=0.0, weight_decay=0.0)
        training = CollaborativeTraining(net, data, plan, Generator().manual_seed(0))
        models, rows = [training.model()], []
        for epoch in training.epochs():
            rows.append(epoch.row)
            models.append(training.model())
        found[name] = rows, models[:-1]
    return found


def judged(regression, name):
    rows, models = regression[name]
    batch = regression["data"].batch
    gradients = [full_gradient(regression["net"], model, batch) for model in models]
    start = float(nn.functional.cross_entropy(regression["net"](batch.inputs), batch.labels).detach())
    met = constants(rows, regression["smoothness"], start)
    seen = estimate_smoothness(models, gradients)
    return met, seen, check_theorem_2([norm(each) ** 2 for each in gradients], met, RATE)


@pytest.mark.parametrize("name", UPLOADS)
def test_on_a_real_run_lemma_1_and_theorem_2_hold(regression, name):
    rows = regression[name][0]
    lemma = check_lemma_1(rows, rounds=1)
    assert all(each.holds and each.measured <= each.tight * (1 + 1e-6) for each in lemma)
    met, seen, theorem = judged(regression, name)
    assert 0 < seen <= met.smoothness
    assert theorem.holds and theorem.measured <= theorem.tight <= theorem.bound


def test_lemma_1_says_something_of_top_k_and_nothing_of_dgp(regression):
    top, dual = (check_lemma_1(regression[name][0], rounds=1)[-1] for name in ("top-k", "dgp"))
    assert not top.vacuous and top.bound < top.trivial / 100
    assert dual.vacuous and dual.bound > 100 * dual.trivial
    assert dual.measured > 100 * top.measured


def test_theorem_2_is_vacuous_in_so_few_rounds_and_dgp_puts_it_out_of_reach(regression):
    needed = {}
    for name in UPLOADS:
        met, _, theorem = judged(regression, name)
        assert theorem.vacuous
        needed[name] = count_rounds(met)
    assert ROUNDS < needed["all"] < needed["top-k"] < needed["release"] < needed["dgp"]
    assert needed["dgp"] > 1e6 > needed["release"]
