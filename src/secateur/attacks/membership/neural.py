"""Neural membership attacks: a network trained on the shadow models' answers about their own examples.

NN sees the probabilities, NNcls also the true label, Top3-NN the three largest probabilities.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import one_hot

from secateur.attacks.membership.neural_trainer import Drop, NeuralSchedule, initialised, keep, logits, train
from secateur.attacks.membership.thresholds import shadow_sides
from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.inference import probabilities
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow


@dataclass(frozen=True)
class NetworkAttack(NeuralSchedule, ABC):
    """A network over features of the model's answers."""

    fitted: Any = field(default=None, init=False, repr=False, compare=False)  # (network, seed of the queries)

    @abstractmethod
    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return the network's inputs (N, F), one row an example; `rng` begins anew for every set of examples."""

    def network(self, features: int) -> nn.Module:
        """Return the network, called as `network(features, drop)`."""
        return Mlp(features)

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Query every shadow once, and train the network on the answers."""
        sides = shadow_sides(shadows)
        seed = int(torch.randint(2**62, (), generator=rng))
        seen = torch.cat([self._seen(box, batch, seed) for box, batch, _ in sides])
        truths = torch.cat([torch.full_like(batch.labels, truth) for _, batch, truth in sides])
        network = initialised(lambda: self.network(seen.shape[1]), rng).to(seen.device)
        train(network, Batch(seen, truths), self, rng)
        fitted = copy.copy(self)
        object.__setattr__(fitted, "fitted", (network, seed))
        return fitted

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the logit of member, decide by its sign."""
        if self.fitted is None:
            raise WrongInput("attack", "fit it on shadow models first")
        network, seed = self.fitted
        outside, member = logits(network, self._seen(box, candidates.batch, seed)).unbind(1)
        return Guesses(member - outside, member > outside)

    def _seen(self, box: BlackBox, batch: Batch, seed: int) -> Tensor:
        """Return the features of a batch, with the queries' own generator."""
        return self.features(box, batch, Generator().manual_seed(seed)).float()


class Mlp(nn.Module):
    """An MLP 512-256-128-2 with ReLU and dropout."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((features, 512, 256, 128, 2)))

    def forward(self, x: Tensor, drop: Drop = keep) -> Tensor:
        """Return the logits (N, 2) of non-member and member for features (N, F)."""
        *hidden, last = self.layers
        for layer in hidden:
            x = drop(layer(x).relu())
        return last(x)  # type: ignore[no-any-return]


@method("attack", "nn", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Nn(NetworkAttack):
    """An MLP tells members by all probabilities (Shokri et al. 2017; samia_ppb 5.1, NN)."""

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return p (N, K)."""
        return probabilities(box, batch.inputs)


@method("attack", "nn-cls", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class NnCls(NetworkAttack):
    """An MLP tells members by all probabilities and the true label (Nasr et al. 2018; samia_ppb 5.1, NNcls)."""

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return p and the one-hot label (N, 2K)."""
        p = probabilities(box, batch.inputs)
        return torch.cat([p, one_hot(batch.labels, p.shape[1]).to(p)], 1)


@method("attack", "top3-nn", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Top3Nn(NetworkAttack):
    """An MLP tells members by the three largest probabilities (Salem et al. 2019; samia_ppb 5.1, Top3-NN)."""

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """Return the largest p (N, 3), in falling order; (N, 2) where there are two classes."""
        p = probabilities(box, batch.inputs)
        return p.topk(min(3, p.shape[1]), 1).values
