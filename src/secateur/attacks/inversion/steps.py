"""How trials move: Adam with the sign option, learning-rate schedules, the box of valid pictures, Langevin noise.

Everything works in place on the tensors of a `state` and asks nothing of the host, so a CUDA graph can hold a step.
A trial has its own clock: one that began again has all its iterations before it, one that is done stands still.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.attacks.inversion.problem import Evaluated, Variables
from secateur.interfaces import Params

Schedule = Literal["steps", "warmup-cosine", "constant"]
BETAS, EPS = (0.9, 0.999), 1e-8
WARM_UP = 50


def learning_rates(schedule: Schedule, iterations: int, base: float) -> Tensor:
    """(iterations + 1,): the rate of every iteration, and 0 for whoever is done.

    steps: x0.1 at 3/8, 5/8 and 7/8 (IG). warmup-cosine: 50 rising steps, then half a cosine to 0 (GI).
    """
    done = torch.arange(iterations, dtype=torch.float64)
    if schedule == "steps":
        passed = sum((done >= int(iterations * part / 8)).double() for part in (3, 5, 7))
        rates = base * 0.1 ** torch.as_tensor(passed)
    elif schedule == "warmup-cosine":
        warm = min(WARM_UP, iterations // 2)
        fall = (1 + torch.cos(math.pi * (done - warm) / max(1, iterations - warm))) / 2
        rates = base * torch.where(done < warm, (done + 1) / max(1, warm), fall)
    else:
        rates = torch.full_like(done, base)
    return torch.cat([rates, rates.new_zeros(1)])


@dataclass(frozen=True, eq=False)
class Adam:
    """Adam on N trials; `sign` puts the sign of the gradient in its place before Adam sees it (IG)."""

    rates: Tensor  # (iterations + 1,), on the trials' device and of their type
    sign: bool = False
    noise: float = 0.0  # of the pixels, times the rate

    def begin(self, variables: Variables) -> Params:
        """The tensors it keeps: first and second moments."""
        kept = {f"{moment}.{name}": value for moment in ("first", "second") for name, value in variables.items()}
        return {name: torch.zeros_like(value) for name, value in kept.items()}

    def __call__(self, state: Params, names: Sequence[str], evaluate: Callable[[], Evaluated]) -> Tensor:
        """One step of the variables `names`; returns the matching loss (N,) where they were before it."""
        evaluated = evaluate()
        rate, count = self.rates[state["clock"]], state["clock"] + 1
        for name in names:
            value, first, second = (state[key] for key in (name, f"first.{name}", f"second.{name}"))
            gradient = evaluated.gradient[name]
            gradient = gradient.sign() if self.sign else gradient
            first.lerp_(gradient, 1 - BETAS[0])
            second.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            slow, fast = (along(1 - beta ** count.to(value.dtype), value) for beta in BETAS)
            step = along(rate, value) * (first / slow) / ((second / fast).sqrt() + EPS)
            value.sub_(step)
        if self.noise:
            state["inputs"].addcmul_(along(rate * self.noise, state["inputs"]), state["noise"])
        return evaluated.matching


def along(values: Tensor, like: Tensor) -> Tensor:
    """(N,) as (N, 1, 1, ...), so that it meets `like` trial by trial."""
    return values.view(-1, *[1] * (like.ndim - 1))


def into_box(inputs: Tensor, box: tuple[Tensor, Tensor]) -> None:
    """Project to valid pictures, in place."""
    inputs.copy_(torch.minimum(torch.maximum(inputs, box[0]), box[1]))
