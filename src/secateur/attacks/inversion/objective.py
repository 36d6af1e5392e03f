"""What gradient matching minimises: a distance of gradients and weighted priors, for one trial or many."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from secateur.attacks.inversion import priors
from secateur.attacks.inversion.problem import Compared, Variables
from secateur.interfaces import Params

Distance = Literal["cosine", "euclidean"]


@dataclass(frozen=True)
class Matching:
    """scale * distance + tv * TV(x) + l2 * ||x||^2 + batchnorm * R_BN + group * ||x - consensus||^2."""

    distance: Distance = "cosine"
    scale: float = 1.0
    tv: float = 0.0
    l2: float = 0.0
    batchnorm: float = 0.0
    first_batchnorm: float = 10.0  # the first BatchNorm's share is so many times the others'
    group: float = 0.0

    @property
    def needs_gap(self) -> bool:
        """Only the Euclidean distance does."""
        return self.distance == "euclidean"

    @property
    def needs_statistics(self) -> bool:
        """Only the BatchNorm prior does."""
        return self.batchnorm > 0

    def __call__(self, compared: Compared, variables: Variables, fixed: Params) -> tuple[Tensor, Tensor]:
        """(...,) the whole, and the distance alone."""
        matching = euclidean(compared) if self.distance == "euclidean" else cosine(compared)
        inputs = variables["inputs"]
        total = self.scale * matching
        if self.tv:
            total = total + self.tv * priors.total_variation(inputs)
        if self.l2:
            total = total + self.l2 * priors.squared_norm(inputs)
        if self.batchnorm and compared.statistics:
            gap = priors.statistics_gap(compared.statistics, fixed, self.first_batchnorm)
            total = total + self.batchnorm * gap
        if self.group:
            total = total + self.group * priors.disagreement(inputs, fixed)
        return total, matching


def cosine(compared: Compared) -> Tensor:
    """1 - <g, g*> / (|g| |g*|), one over all parameters jointly (IG, Geiping et al. 2020, Eq. 4)."""
    tiny = torch.finfo(compared.dot.dtype).tiny
    return 1 - compared.dot / (compared.trial.clamp_min(tiny).sqrt() * compared.observed.clamp_min(tiny).sqrt())


def euclidean(compared: Compared) -> Tensor:
    """Sum over parameters of ||g - g*||^2 (DLG, Zhu et al. 2019; GI, Yin et al. 2021, Eq. 3)."""
    assert compared.gap is not None, "the objective asked for it"
    return compared.gap
