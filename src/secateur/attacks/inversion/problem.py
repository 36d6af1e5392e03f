"""Gradient matching as a problem: many trials, what was observed for each, and how a trial is compared with it.

Every engine answers the same question, `Evaluate`: the objective of N stacked trials and its gradient by what is
optimised. An objective is written once, for tensors with any leading axes, so it serves one trial and N of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.functional import evaluated
from secateur.gpu.gradient_products import products
from secateur.interfaces import Loss, Mask, Params

Variables = Params  # what is optimised, N first: "inputs" (N, B, C, H, W) and, if they are too, "labels" (N, B, K)


class Compared(NamedTuple):
    """How the gradient of a trial lies to the observed one, over all matched entries; (...,) each."""

    dot: Tensor  # <g, g*>
    trial: Tensor  # |g|^2
    observed: Tensor  # |g*|^2
    gap: Tensor | None  # |g - g*|^2; None where the objective does not need it
    statistics: Sequence[tuple[Tensor, Tensor]]  # mean and variance (..., C) of every BatchNorm's input, if wanted


class Objective(Protocol):
    """What is minimised. Works entry by entry over any leading axes."""

    @property
    def needs_gap(self) -> bool:
        """Whether it asks for |g - g*|^2 itself: near the end float32 cannot have it from the other three."""
        ...

    @property
    def needs_statistics(self) -> bool:
        """Whether it asks for the statistics of what BatchNorms are given."""
        ...

    def __call__(self, compared: Compared, variables: Variables, fixed: Params) -> tuple[Tensor, Tensor]:
        """(...,) the whole, and the part that compares gradients, by which trials are judged.

        `fixed` holds what does not change within a step, e.g. the consensus of the seeds.
        """
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """N trials of gradient matching on one network."""

    net: nn.Module  # as `structure` gives it
    sent: Params  # parameters and buffers, of all trials; with N first where `own_weights`
    observed: Params  # (N, ...) by the names that are matched; a name that is missing is left out of the matching
    mask: Mask | None = None  # (N, ...): the entries of a trial's gradient that are compared; None: all
    own_weights: bool = False  # every trial has its own `sent`
    loss: Loss = nn.functional.cross_entropy
    steps: int = 1  # local steps that are unrolled; observed is then (sent - received) / learning_rate
    learning_rate: float = 0.0
    step_batch: int | None = None
    compression: Callable[[Params], Params] | None = None  # applied to the trial's gradient before it is compared

    @property
    def trials(self) -> int:
        """N."""
        return next(iter(self.observed.values())).shape[0]

    def take(self, rows: Tensor) -> Problem:
        """Some of the trials."""
        own = {name: value[rows] for name, value in self.sent.items()} if self.own_weights else self.sent
        mask = None if self.mask is None else {name: value[rows] for name, value in self.mask.items()}
        observed = {name: value[rows] for name, value in self.observed.items()}
        return replace(self, sent=own, mask=mask, observed=observed)


class Evaluated(NamedTuple):
    """One evaluation of N trials."""

    total: Tensor  # (N,)
    matching: Tensor  # (N,)
    gradient: Variables


Evaluate = Callable[[Variables, Tensor | None, Params], Evaluated]  # (variables, labels (N, B) if fixed, fixed)
Engine = Callable[[Problem, Objective], Evaluate]


def structure(net: nn.Module, batchnorm: Literal["eval", "batch"]) -> nn.Module:
    """A copy of `net` that draws nothing and keeps no running statistics; nothing of the sent model can change."""
    return evaluated(copy.deepcopy(net), batchnorm)


def compared(
    problem: Problem, gradient: Mapping[str, Tensor], observed: Params, mask: Mask | None, needs_gap: bool = True
) -> Compared:
    """Compare one trial's gradient, given whole, with what was observed for it (no leading axis)."""
    shown = dict(gradient) if problem.compression is None else problem.compression(dict(gradient))
    zero = next(iter(observed.values())).new_zeros(())
    dot, trial, target, gap = zero, zero, zero, zero if needs_gap else None
    for name, aim in observed.items():
        inside = None if mask is None else mask.get(name)
        found = products(shown[name], aim, inside)
        dot, trial, target = dot + found[0], trial + found[1], target + found[2]
        if gap is not None:
            value = shown[name] if inside is None else shown[name] * inside
            gap = gap + (value - aim).square().sum()
    return Compared(dot, trial, target, gap, ())


class BatchNormInputs:
    """Notes mean and variance of what every BatchNorm is given, while it is entered."""

    def __init__(self, net: nn.Module, wanted: bool) -> None:
        self.modules = [module for module in net.modules() if isinstance(module, _BatchNorm)] if wanted else []
        self.found: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> list[tuple[Tensor, Tensor]]:
        self.found = []
        self._hooks = [module.register_forward_pre_hook(self._note) for module in self.modules]
        return self.found

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _note(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        dims = [0, *range(2, x.ndim)]
        self.found.append((x.mean(dims), x.var(dims, unbiased=False)))
