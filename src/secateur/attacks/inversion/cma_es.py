"""CMA-ES: finds the least of N functions at once by samples alone (Hansen's tutorial, arXiv 1604.00772).

The (mu/mu_w, lambda) strategy with its standard constants and positive weights. The N problems are one leading axis,
so a round is a few batched operations, and chance is an argument: the caller draws the noise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """What N problems of n dimensions remember between rounds."""

    mean: Tensor  # (N, n)
    sigma: Tensor  # (N,) the step size
    covariance: Tensor  # (N, n, n) C
    path: Tensor  # (N, n) p_c, the evolution path of C
    step_path: Tensor  # (N, n) p_sigma, of the step size
    basis: Tensor  # (N, n, n) B, the eigenvectors of C as columns
    scales: Tensor  # (N, n) D, the roots of its eigenvalues
    round: Tensor  # () int64, how many are done


@dataclass(frozen=True)
class CMAES:
    """The strategy for `dimension` numbers and `population` samples a round; the names are the tutorial's."""

    dimension: int
    population: int

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """w_i of the mu best, best first: ln((lambda + 1) / 2) - ln i, divided by their sum (eq. 49, positive part)."""
        raw = [math.log((self.population + 1) / 2) - math.log(i + 1) for i in range(self.population // 2)]
        return tuple(value / sum(raw) for value in raw)

    @cached_property
    def mu_eff(self) -> float:
        """How many samples the weighted mean is worth."""
        return 1 / sum(value**2 for value in self.weights)

    @cached_property
    def c_sigma(self) -> float:
        """The rate of the step size's path (eq. 55)."""
        return (self.mu_eff + 2) / (self.dimension + self.mu_eff + 5)

    @cached_property
    def d_sigma(self) -> float:
        """The damping of the step size (eq. 55)."""
        return 1 + 2 * max(0.0, math.sqrt((self.mu_eff - 1) / (self.dimension + 1)) - 1) + self.c_sigma

    @cached_property
    def c_c(self) -> float:
        """The rate of the covariance's path (eq. 56)."""
        n = self.dimension
        return (4 + self.mu_eff / n) / (n + 4 + 2 * self.mu_eff / n)

    @cached_property
    def c_1(self) -> float:
        """The rate of the rank-one update (eq. 57)."""
        return 2 / ((self.dimension + 1.3) ** 2 + self.mu_eff)

    @cached_property
    def c_mu(self) -> float:
        """The rate of the rank-mu update (eq. 58)."""
        n, mu = self.dimension, self.mu_eff
        return min(1 - self.c_1, 2 * (1 / 4 + mu + 1 / mu - 2) / ((n + 2) ** 2 + mu))

    @cached_property
    def chi(self) -> float:
        """The expected length of a standard normal vector."""
        n = self.dimension
        return math.sqrt(n) * (1 - 1 / (4 * n) + 1 / (21 * n**2))

    def start(self, mean: Tensor, sigma: float) -> State:
        """Begin at `mean` (N, n) with an isotropic step size."""
        eye = torch.eye(self.dimension, dtype=mean.dtype, device=mean.device).expand(len(mean), -1, -1)
        zero, one = torch.zeros_like(mean), torch.ones_like(mean)
        done = torch.zeros((), dtype=torch.int64, device=mean.device)
        return State(mean, mean.new_full((len(mean),), sigma), eye, zero, zero, eye, one, done)

    def ask(self, state: State, noise: Tensor) -> Tensor:
        """(N, population, n) candidates x = m + sigma B D noise, of standard normal noise of the same shape."""
        steps = (noise * state.scales[:, None]) @ state.basis.mT
        return state.mean[:, None] + state.sigma[:, None, None] * steps

    def tell(self, state: State, candidates: Tensor, values: Tensor) -> State:
        """The next round's state by the candidates' values (N, population); NaN counts as the worst."""
        weights = torch.tensor(self.weights, dtype=state.mean.dtype, device=state.mean.device)
        order = values.nan_to_num(nan=math.inf, posinf=math.inf).argsort(dim=1, stable=True)[:, : len(weights)]
        best = candidates.gather(1, order[..., None].expand(-1, -1, self.dimension))
        steps = (best - state.mean[:, None]) / state.sigma[:, None, None]  # (N, mu, n) y_i
        step = weights @ steps  # (N, n) y_w
        mean = state.mean + state.sigma[:, None] * step

        white = self._whitened(state, step)  # C^(-1/2) y_w
        kept = math.sqrt(self.c_sigma * (2 - self.c_sigma) * self.mu_eff)
        step_path = (1 - self.c_sigma) * state.step_path + kept * white
        length = torch.linalg.vector_norm(step_path, dim=1)
        sigma = state.sigma * torch.exp(self.c_sigma / self.d_sigma * (length / self.chi - 1))

        begun = 1 - (1 - self.c_sigma) ** (2 * (state.round + 1)).to(length)
        calm = (length / begun.sqrt() < (1.4 + 2 / (self.dimension + 1)) * self.chi).to(length)  # h_sigma
        kept = math.sqrt(self.c_c * (2 - self.c_c) * self.mu_eff)
        path = (1 - self.c_c) * state.path + kept * calm[:, None] * step
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
        """B D^-1 B^T step."""
        turned = (state.basis.mT @ step[..., None])[..., 0]
        return (state.basis @ (turned / state.scales)[..., None])[..., 0]
