"""A client's optimiser: the update rule, the learning rate and the examples of every local step.

The simulated client and its attacker take the same steps. A step is `params - rate * direction`, and the direction is a
function of gradients that has gradients itself. So an attacker can train on trial pictures, and compare the updates.
The rules are those of torch.optim, in float64 too. The state is zero at the begin of every turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from secateur.errors import WrongInput, check_number, check_numbers, check_whole, unknown

Kind = Literal["sgd", "adam", "adamw"]
RateSchedule = Literal["constant", "step", "cosine"]
KINDS, SCHEDULES = ("sgd", "adam", "adamw"), ("constant", "step", "cosine")
COMMON = ("weight_decay", "schedule", "step_size", "gamma")
SETTINGS = {  # that a kind has
    "sgd": ("momentum", "nesterov", *COMMON),
    "adam": ("betas", "eps", *COMMON),
    "adamw": ("betas", "eps", *COMMON),
}


class Moments(NamedTuple):
    """State between two steps, by parameter name: the momentum or mean, and Adam's mean square; empty at first."""

    first: dict[str, Tensor]
    second: dict[str, Tensor]
    steps: int = 0  # so far


@dataclass(frozen=True)
class Optimiser:
    """Optimiser of a client's local steps; the default is plain gradient descent. As text: `sgd:momentum=0.9`.

    Example:
        >>> Optimiser.parse("adam:betas=0.9/0.95:schedule=cosine")
        Optimiser(kind='adam', momentum=0.0, nesterov=False, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-08, \
schedule='cosine', step_size=1, gamma=0.1)
        >>> str(Optimiser("sgd", momentum=0.9)), str(Optimiser("adamw", weight_decay=0.01))
        ('sgd:momentum=0.9', 'adamw:weight_decay=0.01')
    """

    kind: Kind = "sgd"
    momentum: float = 0.0  # of sgd
    nesterov: bool = False  # of sgd
    weight_decay: float = 0.0  # added to the gradient; adamw: to the direction
    betas: tuple[float, float] = (0.9, 0.999)  # of adam and adamw
    eps: float = 1e-8  # of adam and adamw
    schedule: RateSchedule | tuple[float, ...] = "constant"  # of the turn's steps; numbers: the rate of every step
    step_size: int = 1  # schedule step: steps between two decays
    gamma: float = 0.1  # schedule step: the factor of a decay

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("optimiser", str(self.kind), KINDS)
        check_numbers(self, "[0, 1)", "momentum")
        check_numbers(self, "[0, inf)", "weight_decay", "eps")
        check_numbers(self, "(0, inf)", "gamma")
        check_whole("step_size", self.step_size)
        if len(self.betas) != 2:
            raise WrongInput("betas", f"has {len(self.betas)} numbers; write two, such as 0.9/0.999")
        for beta in self.betas:
            check_number("betas", beta, "[0, 1)")
        if isinstance(self.schedule, str) and self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, (*SCHEDULES, "numbers such as 0.1/0.05"))
        for rate in () if isinstance(self.schedule, str) else self.schedule:
            check_number("schedule", rate, "(0, inf)")
        if self.nesterov and not self.momentum:
            raise WrongInput("nesterov", "needs momentum above 0; add momentum=0.9, or leave it out")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the optimiser of a text `kind:setting=value:...`; lists of numbers are written with slashes."""
        kind, *parts = text.split(":")
        if kind not in KINDS:
            raise unknown("optimiser", kind, KINDS)
        settings: dict[str, object] = {}
        for part in parts:
            name, _, value = part.partition("=")
            if name not in SETTINGS[kind]:
                raise unknown(f"optimiser {kind}", name, SETTINGS[kind])
            settings[name] = _read_setting(name, value)
        return cls(kind, **settings)  # type: ignore[arg-type]  # checked by __post_init__

    def __str__(self) -> str:
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        changed = {part.name: values[part.name] for part in fields(self) if values[part.name] != part.default}
        parts = [f"{name}={_write_setting(value)}" for name, value in changed.items() if name != "kind"]
        return ":".join([self.kind, *parts])

    @property
    def is_plain(self) -> bool:
        """True if a direction is the gradient itself."""
        return self.kind == "sgd" and self.momentum == 0 and self.weight_decay == 0

    @property
    def is_adaptive(self) -> bool:
        """True if a direction is divided by the size of gradients, so that one step shows little but signs."""
        return self.kind != "sgd"

    def rates(self, learning_rate: float, steps: int) -> tuple[float, ...]:
        """Return the learning rate of every step of a turn; the cosine ends near 0 after the last step.

        Example:
            >>> Optimiser(schedule="step", step_size=2, gamma=0.5).rates(0.1, 4), Optimiser().rates(0.1, 2)
            ((0.1, 0.1, 0.05, 0.05), (0.1, 0.1))
        """
        if self.schedule == "cosine":
            return tuple(learning_rate * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps))
        if self.schedule == "step":
            return tuple(learning_rate * self.gamma ** (step // self.step_size) for step in range(steps))
        if self.schedule == "constant":
            return (learning_rate,) * steps
        if len(self.schedule) != steps:
            many = f"has {len(self.schedule)} rates, and the client takes {steps} steps"
            raise WrongInput("schedule", f"{many}; write one rate a step")
        return tuple(self.schedule)  # type: ignore[arg-type]  # a name of SCHEDULES was handled above

    def start(self) -> Moments:
        """Return the state before the first step."""
        return Moments({}, {})

    def direct(
        self,
        params: Mapping[str, Tensor],
        grads: Mapping[str, Tensor],
        moments: Moments,
        softness: float = 0.0,
    ) -> tuple[dict[str, Tensor], Moments]:
        """Return the direction of the next step, and the state after it; the step is `params - rate * direction`.

        Args:
            params: the weights before the step.
            grads: their gradient.
            moments: the state before the step.
            softness: added to Adam's eps, as a share of the tensor's mean |g|. Adam's first step is nearly a sign,
                whose slope is 0. An attacker who searches by slopes softens it; a client has 0.
        """
        if self.weight_decay and self.kind != "adamw":
            grads = {name: grad + self.weight_decay * params[name] for name, grad in grads.items()}
        if self.kind == "sgd":
            return self._direct_by_momentum(grads, moments)
        direction, moments = self._direct_by_adam(grads, moments, softness)
        if self.weight_decay and self.kind == "adamw":
            direction = {name: value + self.weight_decay * params[name] for name, value in direction.items()}
        return direction, moments

    def _direct_by_momentum(self, grads: Mapping[str, Tensor], moments: Moments) -> tuple[dict[str, Tensor], Moments]:
        if not self.momentum:
            return dict(grads), moments
        first = moments.first
        buffer = {name: self.momentum * first[name] + grad if first else grad for name, grad in grads.items()}
        after = Moments(buffer, {}, moments.steps + 1)
        if not self.nesterov:
            return buffer, after
        return {name: grad + self.momentum * buffer[name] for name, grad in grads.items()}, after

    def _direct_by_adam(
        self, grads: Mapping[str, Tensor], moments: Moments, softness: float
    ) -> tuple[dict[str, Tensor], Moments]:
        one, two = self.betas
        step, begun = moments.steps + 1, bool(moments.first)
        first, second, direction = {}, {}, {}
        for name, grad in grads.items():
            first[name] = (1 - one) * grad + (one * moments.first[name] if begun else 0)
            second[name] = (1 - two) * grad.square() + (two * moments.second[name] if begun else 0)
            # the root of 0 has no slope; a gradient whose square is below this number moves no weight visibly
            root = (second[name] / (1 - two**step)).clamp_min(torch.finfo(grad.dtype).tiny).sqrt()
            eps = self.eps + softness * grad.detach().abs().mean() if softness else self.eps
            direction[name] = first[name] / (1 - one**step) / (root + eps)
        return direction, Moments(first, second, step)


PLAIN_SGD = Optimiser()


def list_batches(size: int, batch: int | None, steps: int = 1, epochs: int | None = None) -> list[list[int]]:
    """Return the examples of every local step, as indices below `size`.

    Steps take the next `batch` examples, cyclically, or all. Epochs take every example once, in order; their last batch
    may be smaller. A client's true order is unknown. In its first epoch any order is right, as an attacker's pictures
    are in no order; further epochs repeat it.

    Example:
        >>> list_batches(5, 2, epochs=1), list_batches(3, 2, steps=2), list_batches(2, None, steps=2)
        ([[0, 1], [2, 3], [4]], [[0, 1], [2, 0]], [[0, 1], [0, 1]])
    """
    width = size if batch is None else batch
    if epochs is None:
        return [[row % size for row in range(step * width, (step + 1) * width)] for step in range(steps)]
    return [list(range(first, min(first + width, size))) for first in range(0, size, width)] * epochs


def _read_setting(name: str, text: str) -> object:
    """Return a setting's value from its text."""
    if name == "nesterov":
        if text.lower() not in ("true", "false", ""):
            raise WrongInput("nesterov", f"{text!r} is not allowed; use true or false")
        return text.lower() != "false"
    if name == "schedule" and text[:1].isalpha():
        return text
    try:
        if name == "step_size":
            return int(text)
        numbers = tuple(float(part) for part in text.split("/"))
    except ValueError:
        raise WrongInput(name, f"{text!r} is no number; write for example {name}=0.9") from None
    if name in ("betas", "schedule"):
        return numbers
    if len(numbers) > 1:
        raise WrongInput(name, f"{text!r} is no number; write for example {name}=0.9")
    return numbers[0]


def _write_setting(value: object) -> str:
    """Return a setting's text."""
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(f"{part:g}" for part in value) if isinstance(value, tuple) else str(value)
