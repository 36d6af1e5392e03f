"""A client's optimiser: the update rule, the learning rate and the examples of every local step.

The simulated client and its attacker take the same steps. A step is `params - rate * direction`, and the direction is a
function of gradients that has slopes itself. So an attacker can train on trial pictures, and compare the updates
(`LocalSteps.unroll`). The rules are those of torch.optim. `parse_optimiser` reads the text `sgd:momentum=0.9`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput, check_number, check_numbers, check_whole, unknown
from secateur.interfaces import PLAIN_SGD, Knowledge, Optimiser, Params

Batches = tuple[tuple[int, ...], ...]  # the indices of every step among the examples of a turn; () stands for all
ROUNDED = 8  # units in the last place by which a step of Adam may be rounded
NOISY = 0.9  # share of a tensor's entries whose noise is taken as that of all
KINDS, SCHEDULES = ("sgd", "adam", "adamw"), ("constant", "step", "cosine")
COMMON = ("weight_decay", "schedule", "step_size", "gamma")
SETTINGS = {  # that a kind has
    "sgd": ("momentum", "nesterov", *COMMON),
    "adam": ("betas", "eps", *COMMON),
    "adamw": ("betas", "eps", *COMMON),
}


class Moments(NamedTuple):
    """State between two steps, by parameter name: the momentum or mean, and Adam's mean square; empty at first."""

    first: Params
    second: Params
    steps: int = 0  # so far


START = Moments({}, {})


def take_step(
    optimiser: Optimiser, params: Params, grads: Params, moments: Moments, softness: float = 0.0
) -> tuple[Params, Moments]:
    """Return the direction of the next step, and the state after it; the step is `params - rate * direction`.

    Args:
        optimiser: the rule.
        params: the weights before the step.
        grads: their gradient.
        moments: the state before the step; `START` before the first.
        softness: added to Adam's eps, as a share of the tensor's mean |g|. Adam's first step is nearly a sign, whose
            slope is 0. An attacker who searches by slopes softens it; a client has 0.
    """
    decay = optimiser.weight_decay
    if decay and optimiser.kind != "adamw":
        grads = {name: grad + decay * params[name] for name, grad in grads.items()}
    if optimiser.kind == "sgd":
        return _take_momentum(optimiser, grads, moments)
    direction, moments = _take_adam(optimiser, grads, moments, softness)
    if decay and optimiser.kind == "adamw":
        direction = {name: value + decay * params[name] for name, value in direction.items()}
    return direction, moments


def _take_momentum(optimiser: Optimiser, grads: Params, moments: Moments) -> tuple[Params, Moments]:
    share, first = optimiser.momentum, moments.first
    if not share:
        return grads, moments
    buffer = {name: share * first[name] + grad if first else grad for name, grad in grads.items()}
    after = Moments(buffer, {}, moments.steps + 1)
    if not optimiser.nesterov:
        return buffer, after
    return {name: grad + share * buffer[name] for name, grad in grads.items()}, after


def _take_adam(optimiser: Optimiser, grads: Params, moments: Moments, softness: float) -> tuple[Params, Moments]:
    one, two = optimiser.betas
    step, begun = moments.steps + 1, bool(moments.first)
    first, second, direction = {}, {}, {}
    for name, grad in grads.items():
        first[name] = (1 - one) * grad + (one * moments.first[name] if begun else 0)
        second[name] = (1 - two) * grad.square() + (two * moments.second[name] if begun else 0)
        # the root of 0 has no slope; a gradient whose square is below this number moves no weight visibly
        root = (second[name] / (1 - two**step)).clamp_min(torch.finfo(grad.dtype).tiny).sqrt()
        eps = optimiser.eps + softness * grad.detach().abs().mean() if softness else optimiser.eps
        direction[name] = first[name] / (1 - one**step) / (root + eps)
    return direction, Moments(first, second, step)


@dataclass(frozen=True)
class LocalSteps:
    """The local steps of a client's turn: the examples and the learning rate of every step, and the rule."""

    batches: Batches
    rates: tuple[float, ...]
    optimiser: Optimiser = PLAIN_SGD
    softness: float = 0.0  # of the rule, see `take_step`

    @property
    def is_gradient(self) -> bool:
        """True if the turn shows one gradient of all examples."""
        return len(self.batches) == 1 and self.optimiser.is_plain

    def unroll(
        self, params: Params, differentiate: Callable[[Params, Sequence[int], int], Params]
    ) -> tuple[Params, Params]:
        """Return the turn's change of the weights, divided by minus its first rate, and the weights after it.

        For plain gradient descent at a constant rate the first is the sum of the gradients.

        Args:
            params: the weights before the first step.
            differentiate: weights, the examples and the number of a step -> the gradient of its loss.
        """
        total: Params = {}
        moments = START
        for number, (rows, rate) in enumerate(zip(self.batches, self.rates, strict=True)):
            grads = differentiate(params, rows, number)
            direction, moments = take_step(self.optimiser, params, grads, moments, self.softness)
            share = rate / self.rates[0]
            total = {name: total[name] + share * value if total else value for name, value in direction.items()}
            params = {name: params[name] - rate * value for name, value in direction.items()}
        return total, params


def undo_first_step(optimiser: Optimiser, change: Params, params: Params) -> Params:
    """Return the gradient that the first step of SGD shows by its direction `change` from the weights `params`."""
    share = 1 + optimiser.momentum if optimiser.nesterov else 1.0
    if not optimiser.weight_decay and share == 1:
        return change
    return {name: value / share - optimiser.weight_decay * params[name] for name, value in change.items()}


def bound_gradient(optimiser: Optimiser, rate: float, sent: Params, received: Params) -> tuple[Params, Params]:
    """Return the lowest and the highest gradient by which the first step of Adam leads from one model to the other.

    The step is rate * u with u = g / (|g| + eps), so |g| = eps |u| / (1 - |u|). Weights are rounded: |u| is known to
    about half a unit in the last place of the weight, divided by the rate. So small gradients are known well. Of large
    ones the sign is known, and a size that they exceed. |u| never exceeds 1. A larger one shows noise beside rounding.
    """
    lows, highs = {}, {}
    for name, after in received.items():
        before, type_info = sent[name], torch.finfo(after.dtype)
        direction = (before.double() - after.double()) / rate
        if optimiser.kind == "adamw":
            direction = direction - optimiser.weight_decay * before
        rounds = 3 if optimiser.kind == "adamw" else 1  # it decays the weights first
        unit = rounding_error(torch.maximum(before.abs(), after.abs())) * rounds
        slack = unit / rate + ROUNDED * type_info.eps
        excess = (direction.abs() - 1).clamp_min(0)
        if excess.numel():  # a few entries may be withheld, and say nothing of the others
            common = excess.flatten().kthvalue(math.ceil(NOISY * excess.numel())).values
            slack = torch.maximum(slack, torch.maximum(excess, common))
        eps = max(optimiser.eps, type_info.tiny)
        sure = eps / slack  # a larger gradient cannot be told from an infinite one
        bounds = [_undo_adam(direction + shift, eps, sure) for shift in (-slack, slack)]
        bounds = [torch.minimum(bounds[0], sure), torch.maximum(bounds[1], -sure)]
        if optimiser.kind == "adam" and optimiser.weight_decay:
            bounds = [bound - optimiser.weight_decay * before for bound in bounds]
        lows[name], highs[name] = (bound.to(after.dtype) for bound in bounds)
    return lows, highs


def rounding_error(values: Tensor) -> Tensor:
    """Return the largest error of rounding to these values, in float64: half a unit in their last place.

    Example:
        >>> (rounding_error(torch.tensor([1.0, 1.5, 0.75])) * 2**24).tolist()
        [1.0, 1.0, 0.5]
    """
    type_info = torch.finfo(values.dtype)
    _, exponent = torch.frexp(values)  # |value| is in [1/2, 1) times two to this power
    return torch.ldexp(torch.full_like(values, type_info.eps / 4, dtype=torch.float64), exponent)


def _undo_adam(direction: Tensor, eps: float, sure: Tensor) -> Tensor:
    """Return the gradient of a direction of Adam's first step; infinite if it exceeds `sure`."""
    size = eps * direction.abs() / (1 - direction.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where((direction.abs() >= 1) | (size > sure), torch.inf, size).copysign(direction)


ONE_GRADIENT = LocalSteps(((),), (1.0,))  # of all examples


def read_steps(knowledge: Knowledge) -> LocalSteps:
    """Return the local steps of a client that sends weights, as its attacker knows them."""
    schedule, rate = knowledge.optimiser.schedule, knowledge.learning_rate
    if not rate and isinstance(schedule, str):
        raise WrongInput("learning_rate", "is needed to turn weights into gradients; use the client's, above 0")
    local = (knowledge.local_batch, knowledge.local_steps, knowledge.local_epochs)
    batches = list_batches(knowledge.batch_size, *local)
    return LocalSteps(batches, list_rates(knowledge.optimiser, rate or 0.0, len(batches)), knowledge.optimiser)


def list_rates(optimiser: Optimiser, learning_rate: float, steps: int) -> tuple[float, ...]:
    """Return the learning rate of every step of a turn; a cosine falls over the turn.

    Example:
        >>> list_rates(Optimiser(schedule="step", step_size=2, gamma=0.5), 0.1, 4), list_rates(Optimiser(), 0.1, 2)
        ((0.1, 0.1, 0.05, 0.05), (0.1, 0.1))
    """
    schedule = optimiser.schedule
    if not isinstance(schedule, str):
        if len(schedule) != steps:
            many = f"has {len(schedule)} rates, and the client takes {steps} steps"
            raise WrongInput("schedule", f"{many}; write one rate a step")
        return tuple(schedule)
    if schedule == "cosine":
        return tuple(learning_rate * (1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps))
    gamma = optimiser.gamma if schedule == "step" else 1.0
    return tuple(learning_rate * gamma ** (step // optimiser.step_size) for step in range(steps))


def list_batches(size: int, batch: int | None, steps: int = 1, epochs: int | None = None) -> Batches:
    """Return the examples of every local step, as indices below `size`.

    Steps take the next `batch` examples, cyclically, or all. Epochs take every example once, in order; their last batch
    may be smaller. A client's true order is unknown. In its first epoch any order is right, as an attacker's pictures
    are in no order; further epochs repeat it.

    Example:
        >>> list_batches(5, 2, epochs=1), list_batches(3, 2, steps=2), list_batches(2, None, steps=2)
        (((0, 1), (2, 3), (4,)), ((0, 1), (2, 0)), ((0, 1), (0, 1)))
    """
    width = size if batch is None else batch
    if epochs is None:
        return tuple(tuple(row % size for row in range(step * width, (step + 1) * width)) for step in range(steps))
    return tuple(tuple(range(first, min(first + width, size))) for first in range(0, size, width)) * epochs


def shuffle_epochs(turn: LocalSteps, epochs: int, rng: Generator) -> LocalSteps:
    """Return the turn of a client that draws a new order for every epoch but the first, whose order it may choose.

    Example:
        >>> turn = LocalSteps(list_batches(4, 3, epochs=2), (0.1,) * 4)
        >>> shuffle_epochs(turn, 2, Generator().manual_seed(0)).batches
        ((0, 1, 2), (3,), (0, 1, 3), (2,))
    """
    count = len(turn.batches) // epochs
    first = turn.batches[:count]
    rows, batches = [row for batch in first for row in batch], list(first)
    for _ in range(1, epochs):
        order = iter([rows[i] for i in torch.randperm(len(rows), generator=rng).tolist()])
        batches += [tuple(next(order) for _ in batch) for batch in first]
    return replace(turn, batches=tuple(batches))


def parse_optimiser(text: str) -> Optimiser:
    """Return the optimiser of a text `kind:setting=value:...`; lists of numbers are written with slashes.

    Example:
        >>> parse_optimiser("adamw:betas=0.9/0.95:weight_decay=0.01").betas
        (0.9, 0.95)
    """
    kind, *parts = text.split(":")
    if kind not in KINDS:
        raise unknown("optimiser", kind, KINDS)
    settings: dict[str, Any] = {"kind": kind}
    for part in parts:
        name, _, value = part.partition("=")
        if name not in SETTINGS[kind]:
            raise unknown(f"optimiser {kind}", name, SETTINGS[kind])
        settings[name] = _read_setting(name, value)
    return check_optimiser(Optimiser(**settings))


def write_optimiser(optimiser: Optimiser) -> str:
    """Return the text of an optimiser, with the settings that differ from the defaults.

    Example:
        >>> write_optimiser(Optimiser("sgd", momentum=0.9, schedule=(0.1, 0.05)))
        'sgd:momentum=0.9:schedule=0.1/0.05'
    """
    values = {part.name: getattr(optimiser, part.name) for part in fields(optimiser)}
    changed = {part.name for part in fields(optimiser) if values[part.name] != part.default} - {"kind"}
    parts = [f"{name}={_write_setting(value)}" for name, value in values.items() if name in changed]
    return ":".join([optimiser.kind, *parts])


def check_optimiser(optimiser: Optimiser) -> Optimiser:
    """Return an optimiser; refuse settings outside their ranges."""
    if optimiser.kind not in KINDS:
        raise unknown("optimiser", str(optimiser.kind), KINDS)
    check_numbers(optimiser, "[0, 1)", "momentum")
    check_numbers(optimiser, "[0, inf)", "weight_decay", "eps")
    check_numbers(optimiser, "(0, inf)", "gamma")
    check_whole("step_size", optimiser.step_size)
    if len(optimiser.betas) != 2:
        raise WrongInput("betas", "has another number of values; write two, such as 0.9/0.999")
    for beta in optimiser.betas:
        check_number("betas", beta, "[0, 1)")
    schedule = optimiser.schedule
    if isinstance(schedule, str) and schedule not in SCHEDULES:
        raise unknown("schedule", schedule, (*SCHEDULES, "numbers such as 0.1/0.05"))
    for rate in () if isinstance(schedule, str) else schedule:
        check_number("schedule", rate, "(0, inf)")
    if optimiser.nesterov and not optimiser.momentum:
        raise WrongInput("nesterov", "needs momentum above 0; add momentum=0.9, or leave it out")
    return optimiser


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
