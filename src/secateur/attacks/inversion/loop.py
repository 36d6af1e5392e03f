"""The loop of gradient matching: the trials of all targets move together; those that diverge begin again.

All that changes is in `state`, a dictionary of tensors that a step works on in place. Saved and loaded, it goes on
bit for bit. Chance has no state: starts and noise come from the target's seed, the trial, the attempt and the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Generator, Tensor

from secateur.attacks.inversion import priors
from secateur.attacks.inversion.engines.graph import captured
from secateur.attacks.inversion.problem import Evaluate, Evaluated, Variables
from secateur.attacks.inversion.steps import into_box
from secateur.chance import derive
from secateur.interfaces import Params

CHUNK = 25  # steps between two looks at the losses, which make the host wait for the device
SAVE_SECONDS = 2.0  # between two calls of Watch.save
POINTS = 200  # of a curve
EXPLODED = 1e4  # times the loss that a trial began with


class StepRule(Protocol):
    """Moves all trials by one step."""

    def begin(self, variables: Variables) -> Params:
        """The tensors it keeps between steps, N first."""
        ...

    def __call__(self, state: Params, names: Sequence[str], evaluate: Callable[[], Evaluated]) -> Tensor:
        """Move in place; returns the matching loss (N,) of where the trials were."""
        ...


@dataclass(frozen=True, eq=False)
class Trials:
    """Restarts x targets on one axis, the restarts of a target side by side."""

    evaluate: Sequence[Evaluate]  # one a round; their objectives are added
    fixed: Sequence[Params]  # what does not change, one a round
    labels: Tensor | None  # (N, B); None: optimised
    seeds: Sequence[int]  # one a target
    restarts: int
    shape: tuple[int, ...]  # (B, C, H, W)
    classes: int
    like: Tensor  # its device and type
    iterations: int
    rule: StepRule
    box: tuple[Tensor, Tensor] | None
    noise: bool
    group: bool  # the consensus of the restarts is wanted
    retries: int

    @property
    def names(self) -> list[str]:
        """What is optimised."""
        return ["inputs"] if self.labels is not None else ["inputs", "labels"]

    @property
    def size(self) -> int:
        """N."""
        return len(self.seeds) * self.restarts

    @property
    def every(self) -> int:
        """Iterations between two points of the curve."""
        return max(1, self.iterations // POINTS)

    def start(self, trial: int, attempt: int) -> Variables:
        """Where one trial begins: N(0, 1), pictures and the logits of labels."""
        rng = derive(self.seeds[trial // self.restarts], "start", trial % self.restarts, attempt)
        inputs = torch.randn(self.shape, generator=rng)
        labels = torch.randn(self.shape[0], self.classes, generator=rng)
        begun = {"inputs": inputs, "labels": labels}
        return {name: begun[name].to(self.like) for name in self.names}

    def begin(self) -> Params:
        """The state before the first step."""
        starts = [self.start(trial, 0) for trial in range(self.size)]
        variables = {name: torch.stack([start[name] for start in starts]) for name in self.names}
        points = (self.iterations + self.every - 1) // self.every
        zeros = torch.zeros(self.size, dtype=torch.int64, device=self.like.device)
        state = {**variables, **self.rule.begin(variables), "clock": zeros, "attempt": zeros.clone()}
        state["step"] = zeros.new_zeros(())
        state["matching"] = self.like.new_full((self.size,), torch.inf)
        state["curve"] = self.like.new_full((points, self.size), torch.nan)
        if self.noise:
            state["noise"] = torch.zeros_like(variables["inputs"])
        return state

    def rows(self, state: Params, targets: Tensor) -> Params:
        """The state of some targets that lie side by side, as views: what they do is done to the whole."""
        rows = slice(int(targets[0]) * self.restarts, (int(targets[-1]) + 1) * self.restarts)
        views = {name: value[rows] for name, value in state.items() if value.ndim and name != "curve"}
        return {**views, "curve": state["curve"][:, rows], "step": state["step"].clone()}

    def look(self, state: Params) -> Evaluated:
        """The objective summed over the rounds, where the trials are."""
        variables = {name: state[name] for name in self.names}
        common = {"consensus": priors.consensus(state["inputs"], self.restarts)} if self.group else {}
        found = [
            evaluate(variables, self.labels, {**fixed, **common})
            for evaluate, fixed in zip(self.evaluate, self.fixed, strict=True)
        ]
        if len(found) == 1:
            return found[0]
        gradient = {name: sum_of([part.gradient[name] for part in found]) for name in self.names}
        return Evaluated(sum_of([f.total for f in found]), sum_of([f.matching for f in found]), gradient)

    def step(self, state: Params) -> None:
        """One step of all trials, in place and without a word to the host."""
        clock, running = state["clock"], state["clock"] < self.iterations
        matching = self.rule(state, self.names, lambda: self.look(state))
        if self.box is not None:
            into_box(state["inputs"], self.box)
        state["matching"].copy_(torch.where(running, matching, state["matching"]))
        rows = torch.arange(self.size, device=clock.device)
        point = (clock // self.every).clamp_max(state["curve"].shape[0] - 1)
        now = running & (clock % self.every == 0)
        state["curve"][point, rows] = torch.where(now, matching, state["curve"][point, rows])
        clock.add_(running)

    def draw(self, state: Params, step: int) -> None:
        """The noise of one step, from the target's seed and the step alone."""
        rng = Generator(self.like.device)
        each = state["noise"].view(-1, self.restarts, *self.shape)
        for target, seed in enumerate(self.seeds):
            each[target].normal_(generator=rng.manual_seed((seed + step) % 2**63))

    def begin_again(self, state: Params) -> None:
        """Give a new start to every trial whose loss is no number or has exploded, or let it rest."""
        matching, first = state["matching"], state["curve"][0]
        broken = ~matching.isfinite() | (matching > EXPLODED * first)
        rows = broken.nonzero().flatten()
        for trial, attempt in zip(rows.tolist(), state["attempt"][rows].tolist(), strict=True):
            if attempt == self.retries:
                state["clock"][trial] = self.iterations
                continue
            start = {name: value[None] for name, value in self.start(trial, attempt + 1).items()}
            for name, value in {**start, **self.rule.begin(start)}.items():
                state[name][trial] = value[0]
            state["clock"][trial], state["attempt"][trial] = 0, attempt + 1
            state["matching"][trial], state["curve"][:, trial] = torch.inf, torch.nan

    def run(self, state: Params, advance: Callable[[int], None], save: Callable[[], None]) -> None:
        """Go on from `state` until every trial is done; its losses are then those of where it is."""
        step, saved = captured(lambda: self.step(state), state), time.monotonic()
        while remaining := self.iterations - int(state["clock"].min()):
            done, count = int(state["step"]), min(CHUNK, remaining)
            for number in range(done, done + count):
                if self.noise:
                    self.draw(state, number)
                step()
            state["step"].fill_(done + count)
            if count == remaining:
                state["matching"].copy_(self.look(state).matching)
            self.begin_again(state)
            advance(count)
            if time.monotonic() - saved >= SAVE_SECONDS:
                save()
                saved = time.monotonic()


def sum_of(values: Sequence[Tensor]) -> Tensor:
    """Their sum."""
    return torch.stack(list(values)).sum(0)
