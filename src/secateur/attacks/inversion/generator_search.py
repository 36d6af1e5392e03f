"""Gradient matching over the latents of a generator, by gradients or by CMA-ES.

The variables are latents; the generator's pictures are compared. With gradients the chain rule goes through the
generator. Without them CMA-ES searches the latents of all targets and restarts at once.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap

from secateur import tree
from secateur.attacks.inversion.engines.autograd import client_gradient
from secateur.attacks.inversion.generator import LATENT
from secateur.attacks.inversion.optimisation import SAVE_SECONDS, Trials
from secateur.attacks.inversion.problem import (
    Evaluate,
    Evaluated,
    Matching,
    Problem,
    Variables,
    compare,
    expand_as,
)
from secateur.errors import WrongInput
from secateur.gpu.memory import ran_out
from secateur.interfaces import Mask, Params
from secateur.seeding import derive

Pictures = Callable[[Tensor, Tensor], Tensor]  # latents (..., 128) and labels (...) -> pictures (..., C, H, W)
Losses = Callable[[Tensor], Tensor]  # latents (N, population, *shape) -> (N, population)

AT_ONCE = 512  # pictures that a generator makes together
ENTRIES = {"cpu": 2**26, "cuda": 2**30}  # of the candidates' gradients that are built at once
MOST = 4096  # candidates at once, however small the network


@dataclass(frozen=True, eq=False)
class Latents(Trials):
    """Trials whose `inputs` are latents (N, B, 128)."""

    pictures: Pictures


def through_generator(evaluate: Evaluate, pictures: Pictures, kl: float) -> Evaluate:
    """Return the evaluation of latents: that of their pictures plus kl * KL(z), with the gradient by the latents."""

    def latent(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        assert labels is not None, "a generator needs labels"
        with torch.enable_grad():
            z = variables["inputs"].detach().requires_grad_()
            inputs, penalty = pictures(z, labels), kl * divergence(z)
        evaluated = evaluate({"inputs": inputs.detach()}, labels, fixed)
        slopes = [evaluated.gradient["inputs"], torch.ones_like(penalty)]
        (gradient,) = torch.autograd.grad([inputs, penalty], z, slopes)
        total = evaluated.total + penalty.detach()
        return Evaluated(total, total, {"inputs": gradient})

    return latent


def divergence(latents: Tensor) -> Tensor:
    """Return KL(z) of latents (..., B, 128), summed over B.

    KL of N(m, s^2) against N(0, 1) is (m^2 + s^2 - 1 - ln s^2) / 2. Here m and s^2 are the mean and the variance of one
    latent's entries, and only these two are held near those of N(0, 1).
    """
    mean, variance = latents.mean(-1), latents.var(-1, correction=0)
    logarithm = variance.clamp_min(torch.finfo(latents.dtype).tiny).log()
    return ((mean.square() + variance - 1 - logarithm) / 2).sum(-1)


class SearchState(NamedTuple):
    """State of N searches in n dimensions between rounds."""

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
    """CMA-ES for `dimension` variables with `population` samples a round (Hansen's tutorial, arXiv 1604.00772).

    This is the (mu/mu_w, lambda) strategy with its standard constants and positive weights. The names are those of the
    tutorial. The N problems are one leading axis, so a round is a few batched operations. The caller draws the noise.
    """

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

    def start(self, mean: Tensor, sigma: float) -> SearchState:
        """Return the initial state: mean `mean` (N, n), step size `sigma`, identity covariance."""
        eye = torch.eye(self.dimension, dtype=mean.dtype, device=mean.device).expand(len(mean), -1, -1)
        zeros, ones = torch.zeros_like(mean), torch.ones_like(mean)
        rounds = torch.zeros((), dtype=torch.int64, device=mean.device)
        return SearchState(mean, mean.new_full((len(mean),), sigma), eye, zeros, zeros, eye, ones, rounds)

    def ask(self, state: SearchState, noise: Tensor) -> Tensor:
        """Return candidates x = m + sigma B D noise, (N, population, n); `noise` is standard normal of that shape."""
        steps = (noise * state.scales[:, None]) @ state.basis.mT
        return state.mean[:, None] + state.sigma[:, None, None] * steps

    def tell(self, state: SearchState, candidates: Tensor, values: Tensor) -> SearchState:
        """Return the state of the next round from the candidates' values (N, population); NaN counts as the worst."""
        weights = torch.tensor(self.weights, dtype=state.mean.dtype, device=state.mean.device)
        order = values.nan_to_num(nan=math.inf, posinf=math.inf).argsort(dim=1, stable=True)[:, : len(weights)]
        best = candidates.gather(1, order[..., None].expand(-1, -1, self.dimension))
        steps = (best - state.mean[:, None]) / state.sigma[:, None, None]  # (N, mu, n) y_i
        step = weights @ steps  # (N, n) y_w
        mean = state.mean + state.sigma[:, None] * step

        white = self._whiten(state, step)  # C^(-1/2) y_w
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
        return SearchState(
            mean, sigma, covariance, path, step_path, basis, squares.maximum(least).sqrt(), state.round + 1
        )

    @staticmethod
    def _whiten(state: SearchState, step: Tensor) -> Tensor:
        """Return B D^-1 B^T step."""
        rotated = (state.basis.mT @ step[..., None])[..., 0]
        return (state.basis @ (rotated / state.scales)[..., None])[..., 0]


@dataclass(frozen=True, eq=False)
class Evolution(Latents):
    """Trials with a CMA-ES each as their state, and the best latent so far as their `inputs`."""

    losses: Losses
    population: int
    sigma: float

    @property
    def strategy(self) -> CMAES:
        """The CMA-ES of one trial's latents, laid flat."""
        return CMAES(torch.Size(self.shape).numel(), self.population)

    def begin(self) -> Params:
        """Return the state before the first round: the search begins at the prior's mean."""
        state = super().begin()
        state["inputs"].zero_()
        mean = self.like.new_zeros(self.size, self.strategy.dimension)
        return state | tree.clone(_name_tensors(self.strategy.start(mean, self.sigma)))

    def step(self, state: Params) -> None:
        """Run one round of all trials, in place."""
        done = int(state["step"])
        now = SearchState(*(state[f"cma.{name}"] for name in SearchState._fields))
        candidates = self.strategy.ask(now, self.population_noise(done))
        latents = candidates.reshape(*candidates.shape[:2], *self.shape)
        values = self.losses(latents).nan_to_num(torch.inf, torch.inf)
        for name, value in _name_tensors(self.strategy.tell(now, candidates, values)).items():
            state[name].copy_(value)
        least, candidate = values.min(1)
        rows = torch.arange(self.size, device=candidate.device)
        better = least < state["matching"]
        state["inputs"].copy_(
            torch.where(expand_as(better, state["inputs"]), latents[rows, candidate], state["inputs"])
        )
        state["matching"].copy_(torch.where(better, least, state["matching"]))
        if done % self.every == 0 and done // self.every < len(state["curve"]):
            state["curve"][done // self.every] = state["matching"]
        state["clock"].add_(1)
        state["step"].add_(1)

    def population_noise(self, done: int) -> Tensor:
        """Return standard normal numbers (N, population, n) by the target's seed, restart and round alone."""
        size = (self.population, self.strategy.dimension)
        drawn = [
            torch.randn(size, generator=derive(seed, "population", restart, done))
            for seed in self.seeds
            for restart in range(self.restarts)
        ]
        return torch.stack(drawn).to(self.like)

    def run(self, state: Params, advance: Callable[[int], None], save: Callable[[], None]) -> None:
        """Continue from `state` until all rounds are done."""
        saved = time.monotonic()
        while int(state["step"]) < self.iterations:
            self.step(state)
            advance(1)
            if time.monotonic() - saved >= SAVE_SECONDS:
                save()
                saved = time.monotonic()


def _name_tensors(state: SearchState) -> Params:
    """Return the tensors of a CMA-ES by their names in the trials' state."""
    return {f"cma.{name}": value for name, value in state._asdict().items()}


def candidate_losses(problem: Problem, objective: Matching, labels: Tensor, fixed: Params) -> Losses:
    """Return the objective of many candidates a trial, without its gradient: pictures (N, P, B, ...) -> (N, P)."""

    def one(
        inputs: Tensor,
        label: Tensor,
        fixed: Params,
        sent: Params,
        observed: Params,
        mask: Mask | None,
        low: Params | None,
        high: Params | None,
    ) -> Tensor:
        gradient, statistics = client_gradient(problem, sent, inputs, label, objective.needs_statistics)
        result = compare(problem, gradient, observed, mask, objective.needs_gap, None, low, high)
        return objective(result._replace(statistics=statistics), {"inputs": inputs}, fixed)[0]

    sent = {name: value.detach() for name, value in problem.sent.items()}
    sent_axis = 0 if problem.own_weights else None
    bounds = problem.bounds or (None, None)
    parts = [None if part is None else 0 for part in (problem.mask, *bounds)]
    device = next(iter(problem.observed.values())).device.type
    parameters = sum(value.numel() for value in problem.net.parameters())
    room = max(1, min(MOST, ENTRIES.get(device, ENTRIES["cpu"]) // parameters))

    def at_once(room: int, pictures: Tensor) -> Tensor:
        population = pictures.shape[1]
        candidates = vmap(one, (0, *[None] * 7), chunk_size=min(population, room))
        trials = vmap(candidates, (0, 0, 0, sent_axis, 0, *parts), chunk_size=max(1, room // population))
        values: Tensor = trials(pictures, labels, fixed, sent, problem.observed, problem.mask, *bounds)
        return values

    @torch.no_grad()
    def losses(pictures: Tensor) -> Tensor:
        nonlocal room
        while True:
            try:
                return at_once(room, pictures)
            except Exception as error:
                if room == 1 or not ran_out(error):
                    raise
            room //= 2

    return losses


def pictures_by(generator: Pictures, like: Tensor) -> Pictures:
    """Return a generator for latents with any leading axes, in the type and on the device of `like`."""
    if isinstance(generator, nn.Module):
        generator = copy.deepcopy(generator).to(like.device).eval().requires_grad_(False)

    def pictures(latents: Tensor, labels: Tensor) -> Tensor:
        parts = (torch.split(x, AT_ONCE) for x in (latents.reshape(-1, LATENT), labels.reshape(-1)))
        rows = torch.cat([generator(z, y) for z, y in zip(*parts, strict=True)])
        return rows.to(like).reshape(*labels.shape, *rows.shape[1:])

    return pictures


def check_generator(pictures: Pictures, input_shape: tuple[int, ...], like: Tensor, differentiable: bool) -> None:
    """Refuse a generator without finite pictures of the right shape, or that cannot be differentiated."""
    latents = torch.linspace(-1, 1, 2 * LATENT).to(like).view(2, LATENT).requires_grad_(differentiable)
    try:
        outputs = pictures(latents, torch.zeros(2, dtype=torch.int64, device=like.device))
    except Exception as error:  # whatever the user's own code raises
        reason = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise WrongInput("generator", f"it must take noise (N, {LATENT}) and labels (N,), and {reason}") from error
    if tuple(outputs.shape) != (2, *input_shape):
        wanted = f"two rows of noise must become pictures {(2, *input_shape)}"
        raise WrongInput("generator", f"{wanted}, and became {tuple(outputs.shape)}")
    if not bool(torch.isfinite(outputs).all()):
        raise WrongInput("generator", "it must return finite numbers, and returned NaN or infinity")
    if differentiable and not outputs.requires_grad:
        raise WrongInput("generator", "its pictures cannot be differentiated by the noise; search with cma instead")
