"""Gradient matching as a problem: N trials, the observed update of each, and the comparison of the two.

Every engine implements `Evaluate`: the objective of N stacked trials and its gradient with respect to the variables.
An objective accepts tensors with any leading axes, so the same code evaluates one trial or N.
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

# The optimised tensors, N first: "inputs" (N, B, C, H, W) and, if labels are optimised too, "labels" (N, B, K).
Variables = Params


class Compared(NamedTuple):
    """Inner products of a trial's gradient g and the observed one g* over all matched entries; tensors are (...,)."""

    dot: Tensor  # <g, g*>
    trial: Tensor  # |g|^2
    observed: Tensor  # |g*|^2
    gap: Tensor | None  # |g - g*|^2; None if the objective does not need it
    statistics: Sequence[tuple[Tensor, Tensor]]  # mean and variance (..., C) of every BatchNorm's input, or empty


class Objective(Protocol):
    """Objective function that is minimised; it works independently over any leading axes."""

    @property
    def needs_gap(self) -> bool:
        """True if the objective needs |g - g*|^2; near the optimum float32 cannot derive it from the other products."""
        ...

    @property
    def needs_statistics(self) -> bool:
        """True if the objective needs the statistics of the BatchNorm inputs."""
        ...

    def __call__(self, compared: Compared, variables: Variables, fixed: Params) -> tuple[Tensor, Tensor]:
        """Return the total (...,) and its gradient-matching part (...,), which ranks the trials.

        `fixed` holds tensors that are constant within a step, e.g. the consensus of the seeds.
        """
        ...


@dataclass(frozen=True, eq=False)
class Problem:
    """N trials of gradient matching on one network."""

    net: nn.Module  # as returned by `structure`
    sent: Params  # parameters and buffers, shared by all trials; N first if `own_weights`
    observed: Params  # (N, ...) by parameter name; a name that is absent is not matched
    mask: Mask | None = None  # (N, ...): the entries of a trial's gradient that are compared; None: all
    own_weights: bool = False  # every trial has its own `sent`
    loss: Loss = nn.functional.cross_entropy
    steps: int = 1  # unrolled local steps; observed is then (sent - received) / learning_rate
    learning_rate: float = 0.0
    step_batch: int | None = None
    compression: Callable[[Params], Params] | None = None  # applied to the trial's gradient before the comparison

    @property
    def trials(self) -> int:
        """Number of trials, N."""
        return next(iter(self.observed.values())).shape[0]

    def take(self, rows: Tensor) -> Problem:
        """Return the problem of the trials `rows`."""
        sent = {name: value[rows] for name, value in self.sent.items()} if self.own_weights else self.sent
        mask = None if self.mask is None else {name: value[rows] for name, value in self.mask.items()}
        observed = {name: value[rows] for name, value in self.observed.items()}
        return replace(self, sent=sent, mask=mask, observed=observed)


class Evaluated(NamedTuple):
    """Evaluation of N trials: objective, matching loss and gradient."""

    total: Tensor  # (N,)
    matching: Tensor  # (N,)
    gradient: Variables


Evaluate = Callable[[Variables, Tensor | None, Params], Evaluated]  # (variables, labels (N, B) if fixed, fixed)


def structure(net: nn.Module, batchnorm: Literal["eval", "batch"]) -> nn.Module:
    """Return a deterministic copy of `net` without updates of running statistics; the sent model cannot change."""
    return evaluated(copy.deepcopy(net), batchnorm)


def compared(
    problem: Problem, gradient: Mapping[str, Tensor], observed: Params, mask: Mask | None, needs_gap: bool = True
) -> Compared:
    """Compare the full gradient of one trial with its observed update (no leading axis)."""
    shown = dict(gradient) if problem.compression is None else problem.compression(dict(gradient))
    zero = next(iter(observed.values())).new_zeros(())
    dot, trial, target, gap = zero, zero, zero, zero if needs_gap else None
    for name, aim in observed.items():
        inside = None if mask is None else mask.get(name)
        terms = products(shown[name], aim, inside)
        dot, trial, target = dot + terms[0], trial + terms[1], target + terms[2]
        if gap is not None:
            value = shown[name] if inside is None else shown[name] * inside
            gap = gap + (value - aim).square().sum()
    return Compared(dot, trial, target, gap, ())


def along(values: Tensor, like: Tensor) -> Tensor:
    """Return values (N,) as (N, 1, 1, ...), to broadcast against `like` trial by trial."""
    return values.view(-1, *[1] * (like.ndim - 1))


class BatchNormInputs:
    """Context that records the mean and variance of the input of every BatchNorm, and its name in `names`."""

    def __init__(self, net: nn.Module, wanted: bool = True) -> None:
        modules = net.named_modules() if wanted else ()
        self.modules = {module: name for name, module in modules if isinstance(module, _BatchNorm)}
        self.names: list[str] = []
        self.statistics: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> list[tuple[Tensor, Tensor]]:
        self._hooks = [module.register_forward_pre_hook(self._record) for module in self.modules]
        return self.statistics

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _record(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0]
        dims = [0, *range(2, x.ndim)]
        self.names.append(self.modules[module])
        self.statistics.append((x.mean(dims), x.var(dims, unbiased=False)))
