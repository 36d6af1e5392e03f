"""Gradient matching as a problem: N trials, the observed update of each, and the comparison of the two.

Every engine implements `Evaluate`: the objective of N stacked trials and its gradient with respect to the variables.
The objective is a distance of gradients plus weighted priors on the pictures (`Matching`). The priors are penalties:
total variation, norm, BatchNorm statistics, agreement of the restarts. All functions of the objective take tensors with
any leading axes, so for one trial or N; a trial's pictures are the last four, (B, C, H, W).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from secateur.attacks.inversion.registration import register
from secateur.functional import make_static
from secateur.gpu.gradient_products import products
from secateur.interfaces import Loss, Mask, Params
from secateur.training.optimisers import ONE_GRADIENT, LocalSteps

Distance = Literal["cosine", "euclidean"]

PICTURE = (-4, -3, -2, -1)
# The optimised tensors, N first: "inputs" (N, B, C, H, W) and, if labels are optimised too, "labels" (N, B, K).
Variables = Params
Bounds = tuple[Params, Params]  # the lowest and the highest values


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
    unsigned: Mask | None = None  # (N, ...): the observed entries whose size alone is known; None: none
    bounds: Bounds | None = None  # (N, ...): the lowest and the highest gradient that the update allows
    own_weights: bool = False  # every trial has its own `sent`
    loss: Loss = nn.functional.cross_entropy
    turn: LocalSteps = ONE_GRADIENT  # unrolled local steps; observed is then (sent - received) / the first rate
    compression: Callable[[Params], Params] | None = None  # applied to the trial's gradient before the comparison

    @property
    def trials(self) -> int:
        """Number of trials, N."""
        return next(iter(self.observed.values())).shape[0]

    def take(self, rows: Tensor) -> Problem:
        """Return the problem of the trials `rows`."""
        sent = {name: value[rows] for name, value in self.sent.items()} if self.own_weights else self.sent
        mask = None if self.mask is None else {name: value[rows] for name, value in self.mask.items()}
        unsigned = None if self.unsigned is None else {name: value[rows] for name, value in self.unsigned.items()}
        observed = {name: value[rows] for name, value in self.observed.items()}
        taken = replace(self, sent=sent, mask=mask, unsigned=unsigned, observed=observed)
        if self.bounds is None:
            return taken
        low, high = ({name: value[rows] for name, value in part.items()} for part in self.bounds)
        return replace(taken, bounds=(low, high))


class Evaluated(NamedTuple):
    """Evaluation of N trials: objective, matching loss and gradient."""

    total: Tensor  # (N,)
    matching: Tensor  # (N,)
    gradient: Variables


Evaluate = Callable[[Variables, Tensor | None, Params], Evaluated]  # (variables, labels (N, B) if fixed, fixed)


def structure(net: nn.Module, batchnorm: Literal["eval", "batch"]) -> nn.Module:
    """Return a deterministic copy of `net` without updates of running statistics; the sent model cannot change."""
    return make_static(copy.deepcopy(net), batchnorm)


def compare(
    problem: Problem,
    gradient: Mapping[str, Tensor],
    observed: Params,
    mask: Mask | None,
    needs_gap: bool = True,
    unsigned: Mask | None = None,
    low: Params | None = None,
    high: Params | None = None,
) -> Compared:
    """Compare the full gradient of one trial with its observed update (no leading axis)."""
    if low is not None and high is not None:
        gradient, observed = meet_bounds(gradient, low, high, problem.turn.softness)
    shown = dict(gradient) if problem.compression is None else problem.compression(dict(gradient))
    zero = next(iter(observed.values())).new_zeros(())
    dot, trial, target, gap = zero, zero, zero, zero if needs_gap else None
    for name, aim in observed.items():
        inside = None if mask is None else mask.get(name)
        aim = take_signs(aim, shown[name], None if unsigned is None else unsigned[name])
        terms = products(shown[name], aim, inside)
        dot, trial, target = dot + terms[0], trial + terms[1], target + terms[2]
        if gap is not None:
            value = shown[name] if inside is None else shown[name] * inside
            gap = gap + (value - aim).square().sum()
    return Compared(dot, trial, target, gap, ())


def meet_bounds(gradient: Mapping[str, Tensor], low: Params, high: Params, softness: float) -> tuple[Params, Params]:
    """Return the trial's gradient and the nearest one inside the bounds, both as g / (|g| + s).

    s is a share `softness` of the tensor's mean |g|. So a wrong sign counts much, whatever the size of the entry. An
    entry inside its bounds does not count.
    """
    shown, aims = {}, {}
    for name, value in gradient.items():
        if name in low:
            size = value.detach()
            scale = softness * size.abs().mean() + torch.finfo(value.dtype).tiny
            nearest = torch.minimum(torch.maximum(size, low[name]), high[name])
            shown[name], aims[name] = value / (value.abs() + scale), nearest / (nearest.abs() + scale)
    return shown, aims


def take_signs(aim: Tensor, trial: Tensor, unsigned: Tensor | None) -> Tensor:
    """Return the observed gradient with the trial's sign where only its size is known: <g, g*> is then |g| |g*|."""
    return aim if unsigned is None else torch.where(unsigned, aim.copysign(trial.detach()), aim)


def expand_as(values: Tensor, like: Tensor) -> Tensor:
    """Return values (N,) as (N, 1, 1, ...), to broadcast against `like` trial by trial."""
    return values.view(-1, *[1] * (like.ndim - 1))


class BatchNormInputs:
    """Context that records the mean and variance of the input of every BatchNorm, and its name in `names`."""

    def __init__(self, net: nn.Module, wanted: bool = True) -> None:
        modules = net.named_modules() if wanted else ()
        self.modules: dict[nn.Module, str] = {m: name for name, m in modules if isinstance(m, _BatchNorm)}
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


COLOURS = 0.93  # correlation of two colours of natural pictures
CONTRAST = 0.25  # standard deviation of their pixels, in [0, 1]


@dataclass(frozen=True, eq=False)
class NaturalBasis:
    """Coordinates of pictures in which those of natural pictures are alike: cosines whose amplitude falls as 1/f.

    Natural pictures have such a spectrum (Field 1987), and their colours go together. A search in these coordinates
    finds coarse shapes before details. The origin is grey.
    """

    rows: Tensor  # (H, H), orthonormal cosines
    columns: Tensor  # (W, W)
    amplitude: Tensor  # (H, W), of each pair of cosines
    colours: Tensor  # (C, C), a root of the covariance of colours
    unmix: Tensor  # its inverse
    grey: Tensor  # (C, 1, 1)

    def coordinates(self, inputs: Tensor) -> Tensor:
        """Return the coordinates (..., C, H, W) of inputs."""
        return self.rows @ mix(self.unmix, inputs - self.grey) @ self.columns.mT / self.amplitude

    def move(self, step: Tensor) -> Tensor:
        """Return a step of the coordinates as one of the inputs."""
        return mix(self.colours, self.rows.mT @ (step * self.amplitude) @ self.columns)

    def pull(self, gradient: Tensor) -> Tensor:
        """Return the gradient by the coordinates from that by the inputs."""
        return self.rows @ mix(self.colours.mT, gradient) @ self.columns.mT * self.amplitude


def natural_basis(shape: Sequence[int], mean: Tensor, std: Tensor) -> NaturalBasis:
    """Return the basis for inputs (C, H, W), which are pixels in [0, 1] less `mean`, over `std`."""
    channels, height, width = shape
    rows, columns = cosines(height).to(mean), cosines(width).to(mean)
    down, across = torch.arange(height).to(mean), torch.arange(width).to(mean)
    amplitude = (down[:, None].square() + across.square() + 1).rsqrt()
    amplitude = amplitude * CONTRAST / amplitude.square().mean().sqrt()
    covariance = torch.full((channels, channels), COLOURS).fill_diagonal_(1).to(mean)
    scale = std.flatten().expand(channels)
    colours = torch.linalg.cholesky(covariance) / scale[:, None]
    grey = ((0.5 - mean) / std).expand(channels, 1, 1)
    return NaturalBasis(rows, columns, amplitude, colours, torch.linalg.inv(colours), grey)


def cosines(size: int) -> Tensor:
    """Return (size, size) float64, the orthonormal cosines of a row of pixels (DCT-II), a frequency a row."""
    frequency = torch.arange(size, dtype=torch.float64)[:, None]
    position = frequency.T + 0.5
    waves = torch.cos(math.pi * position * frequency / size) * math.sqrt(2 / size)
    waves[0] /= math.sqrt(2)
    return waves


def mix(matrix: Tensor, inputs: Tensor) -> Tensor:
    """Return the channels of (..., C, H, W) mixed by a matrix (C, C)."""
    return (matrix @ inputs.flatten(-2)).view_as(inputs)


@dataclass(frozen=True)
class Matching:
    """The objective: scale * distance + tv * TV(x) + l2 * ||x||^2 + batchnorm * R_BN + group * ||x - consensus||^2.

    With a basis the mean square of the natural coordinates is added, times `natural`.
    """

    distance: Distance = "cosine"
    scale: float = 1.0
    tv: float = 0.0
    l2: float = 0.0
    batchnorm: float = 0.0
    first_batchnorm: float = 10.0  # factor of the first BatchNorm's share
    group: float = 0.0
    natural: float = 0.0
    basis: NaturalBasis | None = None  # of the natural prior

    @property
    def needs_gap(self) -> bool:
        """True if |g - g*|^2 is needed: for the Euclidean distance alone."""
        return self.distance == "euclidean"

    @property
    def needs_statistics(self) -> bool:
        """True if the batch's statistics are needed: for the BatchNorm prior alone."""
        return self.batchnorm > 0

    def __call__(self, compared: Compared, variables: Variables, fixed: Params) -> tuple[Tensor, Tensor]:
        """Return (...,) the objective, and the distance alone."""
        matching = euclidean(compared) if self.distance == "euclidean" else cosine(compared)
        inputs = variables["inputs"]
        total = self.scale * matching
        if self.tv:
            total = total + self.tv * total_variation(inputs)
        if self.l2:
            total = total + self.l2 * squared_norm(inputs)
        if self.basis is not None:
            total = total + self.natural * self.basis.coordinates(inputs).square().mean(PICTURE)
        if self.batchnorm and compared.statistics:
            gap = statistics_gap(compared.statistics, fixed, self.first_batchnorm)
            total = total + self.batchnorm * gap
        if self.group:
            total = total + self.group * disagreement(inputs, fixed)
        return total, matching


def cosine(compared: Compared) -> Tensor:
    """Return 1 - <g, g*> / (|g| |g*|), over all parameters jointly (IG, Geiping et al. 2020, Eq. 4)."""
    tiny = torch.finfo(compared.dot.dtype).tiny
    return 1 - compared.dot / (compared.trial.clamp_min(tiny).sqrt() * compared.observed.clamp_min(tiny).sqrt())


def euclidean(compared: Compared) -> Tensor:
    """Return the sum over parameters of ||g - g*||^2 (DLG, Zhu et al. 2019; GI, Yin et al. 2021, Eq. 3)."""
    assert compared.gap is not None, "the objective asked for it"
    return compared.gap


def total_variation(inputs: Tensor) -> Tensor:
    """Return mean|dx| + mean|dy| over the differences that exist (no padding): TV of IG (Geiping et al. 2020)."""
    across = (inputs[..., :, 1:] - inputs[..., :, :-1]).abs().mean(PICTURE) if inputs.shape[-1] > 1 else 0
    down = (inputs[..., 1:, :] - inputs[..., :-1, :]).abs().mean(PICTURE) if inputs.shape[-2] > 1 else 0
    return across + down + inputs.new_zeros(inputs.shape[:-4])


def squared_norm(inputs: Tensor) -> Tensor:
    """Return ||x||^2 (GI, Yin et al. 2021, Eq. 9)."""
    return inputs.square().sum(PICTURE)


def statistics_gap(seen: Sequence[tuple[Tensor, Tensor]], fixed: Params, first: float) -> Tensor:
    """Return the sum over BatchNorms of ||mean - m||_2 + ||var - v||_2, the first one's times `first` (GI, Eq. 10).

    The expected m and v of layer i are `fixed["batchnorm.i.mean"]` and `fixed["batchnorm.i.var"]`. They are the running
    statistics or, for the stronger attacker, the batch's own. A layer without them is left out.
    """
    total = seen[0][0].new_zeros(seen[0][0].shape[:-1])
    for i, (mean, variance) in enumerate(seen):
        if f"batchnorm.{i}.mean" not in fixed:
            continue
        gap = distance(mean, fixed[f"batchnorm.{i}.mean"]) + distance(variance, fixed[f"batchnorm.{i}.var"])
        total = total + gap * (first if i == 0 else 1)
    return total


def distance(a: Tensor, b: Tensor) -> Tensor:
    """Return ||a - b||_2 over the last axis, with a gradient of zero where they are equal."""
    squares = (a - b).square().sum(-1)
    return squares.clamp_min(torch.finfo(a.dtype).tiny).sqrt()


def disagreement(inputs: Tensor, fixed: Params) -> Tensor:
    """Return ||x - consensus||^2 with `fixed["consensus"]`: group consistency (GI, Eq. 12)."""
    return (inputs - fixed["consensus"]).square().sum(PICTURE)


def consensus(inputs: Tensor, restarts: int, registers: bool = False) -> Tensor:
    """Return (N, ...) the mean over each target's finite restarts, for each of its restarts.

    With `registers` every picture is first aligned to that mean, and the consensus is the mean of the aligned ones.
    """
    grouped = inputs.view(-1, restarts, *inputs.shape[1:])
    alive = grouped.flatten(2).isfinite().all(2).view(-1, restarts, *[1] * (inputs.ndim - 1))
    finite, count = torch.where(alive, grouped, 0), alive.sum(1, keepdim=True).clamp_min(1)
    mean = (finite.sum(1, keepdim=True) / count).expand_as(grouped)
    if registers:
        aligned = register(*(part.reshape(-1, *inputs.shape[2:]) for part in (finite, mean))).view_as(grouped)
        mean = (torch.where(alive, aligned, 0).sum(1, keepdim=True) / count).expand_as(grouped)
    return mean.flatten(0, 1)
