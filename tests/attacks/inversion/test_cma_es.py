"""CMA-ES: the tutorial's constants and equations, known optima, and many problems that do not touch each other."""

import math

import numpy as np
import pytest
import torch

from secateur.attacks.inversion.generator_search import CMAES


def minimise(function, start, sigma, rounds, population, rng):
    strategy = CMAES(start.shape[1], population)
    state = strategy.start(start, sigma)
    for _ in range(rounds):
        noise = torch.randn(len(start), population, start.shape[1], generator=rng, dtype=start.dtype)
        candidates = strategy.ask(state, noise)
        state = strategy.tell(state, candidates, function(candidates))
    return state


def sphere(x):
    return x.square().sum(-1)


def ellipsoid(x):
    return (10.0 ** torch.linspace(0, 6, x.shape[-1], dtype=x.dtype) * x.square()).sum(-1)


def rosenbrock(x):
    return (100 * (x[..., 1:] - x[..., :-1].square()).square() + (1 - x[..., :-1]).square()).sum(-1)


def test_the_constants_are_the_tutorials_for_ten_dimensions_and_ten_samples():
    strategy = CMAES(10, 10)
    raw = [math.log(5.5 / i) for i in range(1, 6)]  # 1.7047, 1.0116, .6061, .3185, .0953: together 3.7362
    assert strategy.weights == pytest.approx([value / 3.73625 for value in raw], rel=1e-4)
    assert strategy.weights == pytest.approx([0.45627, 0.27075, 0.16223, 0.08523, 0.02551], abs=1e-5)
    assert strategy.mu_eff == pytest.approx(3.16730, abs=1e-4)
    assert strategy.c_sigma == pytest.approx(5.1673 / 18.1673, rel=1e-4)
    assert strategy.d_sigma == pytest.approx(1 + 5.1673 / 18.1673, rel=1e-4)  # sqrt(2.167 / 11) is below 1
    assert strategy.c_c == pytest.approx(4.31673 / 14.63346, rel=1e-4)
    assert strategy.c_1 == pytest.approx(2 / (127.69 + 3.1673), rel=1e-4)
    assert strategy.c_mu == pytest.approx(2 * (0.25 + 3.1673 + 1 / 3.1673 - 2) / (144 + 3.1673), rel=1e-4)
    assert strategy.chi == pytest.approx(math.sqrt(10) * (1 - 1 / 40 + 1 / 2100))


def test_a_large_population_is_damped_more():
    strategy = CMAES(2, 100)
    assert strategy.d_sigma == pytest.approx(
        1 + 2 * (math.sqrt((strategy.mu_eff - 1) / 3) - 1) + strategy.c_sigma, rel=1e-12
    )


def test_rounds_are_the_tutorials_equations_written_out(rng):
    strategy, n, population = CMAES(3, 6), 3, 6
    state = strategy.start(torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64), 0.7)
    mean, sigma, c = np.array([1.0, -2.0, 0.5]), 0.7, np.eye(n)
    path, step_path = np.zeros(n), np.zeros(n)
    weights, mu = np.array(strategy.weights), strategy.mu_eff
    for generation in range(1, 6):
        noise = torch.randn(1, population, n, generator=rng, dtype=torch.float64)
        candidates = strategy.ask(state, noise)
        values = ellipsoid(candidates)
        x = candidates[0].numpy()
        y = (x[np.argsort(values[0].numpy())[:3]] - mean) / sigma
        step = weights @ y
        squares, basis = np.linalg.eigh(c)
        mean = mean + sigma * step
        cs, cc, c1, cmu = strategy.c_sigma, strategy.c_c, strategy.c_1, strategy.c_mu
        step_path = (1 - cs) * step_path + math.sqrt(cs * (2 - cs) * mu) * (basis / np.sqrt(squares) @ basis.T @ step)
        length = np.linalg.norm(step_path)
        calm = length / math.sqrt(1 - (1 - cs) ** (2 * generation)) < (1.4 + 2 / (n + 1)) * strategy.chi
        path = (1 - cc) * path + calm * math.sqrt(cc * (2 - cc) * mu) * step
        kept = 1 - c1 - cmu + c1 * (1 - calm) * cc * (2 - cc)
        c = (
            kept * c
            + c1 * np.outer(path, path)
            + cmu * sum(w * np.outer(v, v) for w, v in zip(weights, y, strict=True))
        )
        sigma = sigma * math.exp(cs / strategy.d_sigma * (length / strategy.chi - 1))
        state = strategy.tell(state, candidates, values)
        np.testing.assert_allclose(state.mean[0], mean, rtol=1e-9)
        np.testing.assert_allclose(state.covariance[0], c, rtol=1e-9)
        np.testing.assert_allclose(state.sigma[0], sigma, rtol=1e-9)
    assert int(state.round) == 5


@pytest.mark.parametrize(
    ("function", "optimum", "rounds"), [(sphere, 0.0, 250), (ellipsoid, 0.0, 600), (rosenbrock, 1.0, 700)]
)
def test_known_optima_are_found(function, optimum, rounds, rng):
    start = torch.full((2, 6), 0.3, dtype=torch.float64)
    state = minimise(function, start, 0.5, rounds, 12, rng)
    assert torch.allclose(state.mean, torch.full_like(state.mean, optimum), atol=1e-6)


def test_the_covariance_learns_the_inverse_of_the_curvature(rng):
    state = minimise(ellipsoid, torch.ones(1, 4, dtype=torch.float64), 0.5, 200, 10, rng)
    variances = state.covariance[0].diagonal()
    assert torch.allclose((variances[:-1] / variances[1:]).log10(), torch.full((3,), 2.0).double(), atol=0.7)


def test_problems_do_not_touch_each_other(rng):
    noise = torch.randn(20, 2, 8, 3, generator=rng, dtype=torch.float64)
    starts = torch.tensor([[1.0, 2, 3], [-1, 0, 5]], dtype=torch.float64)

    def course(rows):
        strategy = CMAES(3, 8)
        state = strategy.start(starts[rows], 1.0)
        for drawn in noise[:, rows]:
            candidates = strategy.ask(state, drawn)
            state = strategy.tell(state, candidates, ellipsoid(candidates))
        return state.mean

    both = course([0, 1])
    assert torch.allclose(both, torch.cat([course([0]), course([1])]), rtol=1e-9)


def test_what_is_no_number_is_the_worst(rng):
    strategy = CMAES(2, 4)
    state = strategy.start(torch.zeros(1, 2, dtype=torch.float64), 1.0)
    candidates = torch.tensor([[[9.0, 9], [1, 0], [9, 9], [3, 0]]], dtype=torch.float64)
    found = strategy.tell(state, candidates, torch.tensor([[math.nan, 1.0, math.inf, 2.0]]))
    expected = strategy.weights[0] * 1 + strategy.weights[1] * 3
    assert found.mean[0].tolist() == pytest.approx([expected, 0])
