"""The objective of gradient matching: a distance of gradients plus weighted priors on the pictures.

The priors are penalties: total variation, norm, BatchNorm statistics, agreement of the restarts. All functions take
tensors with any leading axes, so for one trial or many; a trial's pictures are the last four, (B, C, H, W).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.attacks.inversion.problem import Compared, Variables
from secateur.interfaces import Params

Distance = Literal["cosine", "euclidean"]

PICTURE = (-4, -3, -2, -1)


@dataclass(frozen=True)
class Matching:
    """The objective: scale * distance + tv * TV(x) + l2 * ||x||^2 + batchnorm * R_BN + group * ||x - consensus||^2."""

    distance: Distance = "cosine"
    scale: float = 1.0
    tv: float = 0.0
    l2: float = 0.0
    batchnorm: float = 0.0
    first_batchnorm: float = 10.0  # factor of the first BatchNorm's share
    group: float = 0.0

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


def consensus(inputs: Tensor, restarts: int) -> Tensor:
    """Return (N, ...) the mean over each target's finite restarts, for each of its restarts."""
    grouped = inputs.view(-1, restarts, *inputs.shape[1:])
    alive = grouped.flatten(2).isfinite().all(2).view(-1, restarts, *[1] * (inputs.ndim - 1))
    mean: Tensor = torch.where(alive, grouped, 0).sum(1, keepdim=True) / alive.sum(1, keepdim=True).clamp_min(1)
    return mean.expand_as(grouped).flatten(0, 1)
