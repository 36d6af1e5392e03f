"""The trials of a search without gradients: CMA-ES over the latents of all targets and restarts at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from secateur import tree
from secateur.attacks.inversion.cma import CMAES, State
from secateur.attacks.inversion.engines.memory import ran_out
from secateur.attacks.inversion.engines.stacked import client_gradient
from secateur.attacks.inversion.latents import Latents
from secateur.attacks.inversion.loop import SAVE_SECONDS
from secateur.attacks.inversion.objective import Matching
from secateur.attacks.inversion.problem import Problem, compared
from secateur.attacks.inversion.steps import along
from secateur.chance import derive
from secateur.interfaces import Mask, Params

Losses = Callable[[Tensor], Tensor]  # latents (N, population, *shape) -> (N, population)
ENTRIES = {"cpu": 2**26, "cuda": 2**30}  # of the candidates' gradients that are built at once
MOST = 4096  # candidates at once, however small the network


@dataclass(frozen=True, eq=False)
class Evolution(Latents):
    """Trials whose state is a CMA-ES each, with the best latent so far as their `inputs`."""

    losses: Losses
    population: int
    sigma: float

    @property
    def strategy(self) -> CMAES:
        """Of one trial's latents, laid flat."""
        return CMAES(torch.Size(self.shape).numel(), self.population)

    def begin(self) -> Params:
        """The state before the first round: the search begins at the prior's mean."""
        state = super().begin()
        state["inputs"].zero_()
        mean = self.like.new_zeros(self.size, self.strategy.dimension)
        return state | tree.clone(_named(self.strategy.start(mean, self.sigma)))

    def step(self, state: Params) -> None:
        """One round of all trials, in place."""
        done = int(state["step"])
        now = State(*(state[f"cma.{name}"] for name in State._fields))
        candidates = self.strategy.ask(now, self.population_noise(done))
        latents = candidates.reshape(*candidates.shape[:2], *self.shape)
        values = self.losses(latents).nan_to_num(torch.inf, torch.inf)
        for name, value in _named(self.strategy.tell(now, candidates, values)).items():
            state[name].copy_(value)
        least, place = values.min(1)
        rows = torch.arange(self.size, device=place.device)
        better = least < state["matching"]
        state["inputs"].copy_(torch.where(along(better, state["inputs"]), latents[rows, place], state["inputs"]))
        state["matching"].copy_(torch.where(better, least, state["matching"]))
        if done % self.every == 0 and done // self.every < len(state["curve"]):
            state["curve"][done // self.every] = state["matching"]
        state["clock"].add_(1)
        state["step"].add_(1)

    def population_noise(self, done: int) -> Tensor:
        """(N, population, n) standard normal numbers, from the target's seed, the restart and the round alone."""
        size = (self.population, self.strategy.dimension)
        drawn = [
            torch.randn(size, generator=derive(seed, "population", restart, done))
            for seed in self.seeds
            for restart in range(self.restarts)
        ]
        return torch.stack(drawn).to(self.like)

    def run(self, state: Params, advance: Callable[[int], None], save: Callable[[], None]) -> None:
        """Go on from `state` until all rounds are done."""
        saved = time.monotonic()
        while int(state["step"]) < self.iterations:
            self.step(state)
            advance(1)
            if time.monotonic() - saved >= SAVE_SECONDS:
                save()
                saved = time.monotonic()


def _named(state: State) -> Params:
    return {f"cma.{name}": value for name, value in state._asdict().items()}


def candidate_losses(problem: Problem, objective: Matching, labels: Tensor, fixed: Params) -> Losses:
    """The objective of many candidates of each trial, without its gradient: pictures (N, P, B, ...) -> (N, P)."""

    def one(inputs: Tensor, label: Tensor, fixed: Params, sent: Params, observed: Params, mask: Mask | None) -> Tensor:
        gradient, statistics = client_gradient(problem, sent, inputs, label, objective.needs_statistics)
        result = compared(problem, gradient, observed, mask, objective.needs_gap)._replace(statistics=statistics)
        return objective(result, {"inputs": inputs}, fixed)[0]

    sent = {name: value.detach() for name, value in problem.sent.items()}
    own, masked = 0 if problem.own_weights else None, None if problem.mask is None else 0
    device = next(iter(problem.observed.values())).device.type
    parameters = sum(value.numel() for value in problem.net.parameters())
    room = max(1, min(MOST, ENTRIES.get(device, ENTRIES["cpu"]) // parameters))

    def at_once(room: int, pictures: Tensor) -> Tensor:
        population = pictures.shape[1]
        candidates = vmap(one, (0, *[None] * 5), chunk_size=min(population, room))
        trials = vmap(candidates, (0, 0, 0, own, 0, masked), chunk_size=max(1, room // population))
        found: Tensor = trials(pictures, labels, fixed, sent, problem.observed, problem.mask)
        return found

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
