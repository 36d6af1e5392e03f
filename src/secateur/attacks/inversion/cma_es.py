"""CMA-ES: derivative-free minimisation of N functions at once (Hansen's tutorial, arXiv 1604.00772).

This is the (mu/mu_w, lambda) strategy with its standard constants and positive weights. The N problems are one leading
axis, so a round is a few batched operations. The caller draws the noise and passes it as an argument.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """State of N problems of n dimensions between rounds."""

    mean: Tensor  # (N, n)
    sigma: Tensor  # (N,) the step size
    covariance: Tensor  # (N, n, n) C
    path: Tensor  # (N, n) p_c, the evolution path of C
    step_path: Tensor  # (N, n) p_sigma, the evolution path of the step size
    basis: Tensor  # (N, n, n) B, the eigenvectors of C as columns
    scales: Tensor  # (N, n) D, the square roots of the eigenvalues of C
    round: Tensor  # () int64, the number of completed rounds


@dataclass(frozen=True)
class CMAES:
    """Strategy for `dimension` variables with `population` samples a round; the names are those of the tutorial."""

    dimension: int
    population: int

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Weights w_i of the mu best samples, best first: ln((lambda + 1) / 2) - ln i, normalised (eq. 49)."""
        raw = [math.log((self.population + 1) / 2) - math.log(i + 1) for i in range(self.population // 2)]
        return tuple(value / sum(raw) for value in raw)

    @cached_property
    def mu_eff(self) -> float:
        """Effective number of samples in the weighted mean, mu_eff."""
        return 1 / sum(value**2 for value in self.weights)

    @cached_property
    def c_sigma(self) -> float:
        """Learning rate of the evolution path of the step size, c_sigma (eq. 55)."""
        return (self.mu_eff + 2) / (self.dimension + self.mu_eff + 5)

    @cached_property
    def d_sigma(self) -> float:
        """Damping of the step size, d_sigma (eq. 55)."""
        return 1 + 2 * max(0.0, math.sqrt((self.mu_eff - 1) / (self.dimension + 1)) - 1) + self.c_sigma

    @cached_property
    def c_c(self) -> float:
        """Learning rate of the evolution path of the covariance, c_c (eq. 56)."""
        n = self.dimension
        return (4 + self.mu_eff / n) / (n + 4 + 2 * self.mu_eff / n)

    @cached_property
    def c_1(self) -> float:
        """Learning rate of the rank-one update, c_1 (eq. 57)."""
        return 2 / ((self.dimension + 1.3) ** 2 + self.mu_eff)

    @cached_property
    def c_mu(self) -> float:
        """Learning rate of the rank-mu update, c_mu (eq. 58)."""
        n, mu = self.dimension, self.mu_eff
        return min(1 - self.c_1, 2 * (1 / 4 + mu + 1 / mu - 2) / ((n + 2) ** 2 + mu))

    @cached_property
    def chi(self) -> float:
        """Expected norm of a standard normal vector."""
        n = self.dimension
        return math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))

    def start(self, mean: Tensor, sigma: float) -> State:
        """Return the initial state: mean `mean` (N, n), step size `sigma`, identity covariance."""
        eye = torch.eye(self.dimension, dtype=mean.dtype, device=mean.device).expand(len(mean), -1, -1)
        zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
        rounds = torch.zeros((), dtype=torch.int64, device=mean.device)
        return State(mean, mean.new_full((len(mean),), sigma), eye, zeros, zeros, eye, ones, rounds)

    def ask(self, state: State, noise: Tensor) -> Tensor:
        """Return candidates x = m + sigma B D noise, (N, population, n); `noise` is standard normal of that shape."""
        steps = (noise * state.scales[:, None]) @ state.basis.mT
        return state.mean[:, None] + state.sigma[:, None, None] * steps

    def tell(self, state: State, candidates: Tensor, values: Tensor) -> State:
        """Return the state of the next round from the candidates' values (N, population); NaN counts as the worst."""
        weights = torch.tensor(self.weights, dtype=state.mean.dtype, device=state.mean.device)
        order = values.nan_to_num(nan=math.inf, posinf=math.inf).argsort(dim=1, stable=True)[:, : len(weights)]
        best = candidates.gather(1, order[..., None].expand(-1, -1, self.dimension))
        steps = (best - state.mean[:, None]) / state.sigma[:, None, None]  # (N, mu, n) y_i
        step = weights @ steps  # (N, n) y_w
        mean = state.mean + state.sigma[:, None] * step

        white = self._whitened(state, step)  # C^(-1/2) y_w
        gain = math.sqrt(self.c_sigma * (2 - self.c_sigma) * self.mu_eff)
        step_path = (1 - self.c_sigma) * state.step_path + gain * white
        length = torch.linalg.vector_norm(step_path, dim=1)
        sigma = state.sigma * torch.exp(self.c_sigma / self.d_sigma * (length / self.chi - 1))

        warmup = 1 - (1 - self.c_sigma) ** (2 * (state.round + 1)).to(length)
        calm = (length / warmup.sqrt() < (1.4 + 2 / (self.dimension + 1)) * self.chi).to(length)  # h_sigma
        gain = math.sqrt(self.c_c * (2 - self.c_c) * self.mu_eff)
        path = (1 - self.c_c) * state.path + gain * calm[:, None] * step
        rank_one = path[:, :, None] * path[:, None, :]
        rank_mu = (steps * weights[:, None]).mT @ steps
        lost = self.c_1 * (1 - calm) * self.c_c * (2 - self.c_c)
        kept_share = (1 - self.c_1 - self.c_mu + lost)[:, None, None]
        covariance = kept_share * state.covariance + self.c_1 * rank_one + self.c_mu * rank_mu
        squares, basis = torch.linalg.eigh(covariance)
        least = torch.finfo(squares.dtype).eps * squares[:, -1:]  # rounding must not make a variance zero or less
        return State(mean, sigma, covariance, path, step_path, basis, squares.maximum(least).sqrt(), state.round + 1)

    @staticmethod
    def _whitened(state: State, step: Tensor) -> Tensor:
        """Return B D^-1 B^T step."""
        rotated = (state.basis.mT @ step[..., None])[..., 0]
        return (state.basis @ (rotated / state.scales)[..., None])[..., 0]
