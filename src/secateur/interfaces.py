"""The shapes that every part is built to. Read this file first.

A method is a function or a frozen dataclass that has one of these shapes; nothing here has behaviour beyond a
one-liner. The shapes of inversion and federation join this file with the methods that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Generator, Tensor, nn

Params = dict[str, Tensor]  # by parameter name; also holds buffers where the text says "state"
Mask = dict[str, Tensor]  # by parameter name: bool, True = kept; a name that is absent is kept whole


class Batch(NamedTuple):
    """Inputs and their labels."""

    inputs: Tensor  # (N, ...)
    labels: Tensor  # (N,) int64

    def take(self, rows: Tensor) -> Batch:
        """The same rows of both: indices or a bool mask."""
        return Batch(self.inputs[rows], self.labels[rows])

    def to(self, device: torch.device | str) -> Batch:
        """Both on a device."""
        return Batch(self.inputs.to(device), self.labels.to(device))

    @property
    def size(self) -> int:
        """How many examples (len() of a tuple is its number of fields)."""
        return self.inputs.shape[0]


# Pruning -------------------------------------------------------------------------------------------------------
Score = Callable[[nn.Module, Batch, Generator], Params]  # the lowest are pruned


class Pruner(Protocol):
    """Chooses what to remove: a frozen dataclass whose fields are its hyper-parameters."""

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """The mask at a sparsity in [0, 1); `batch` is training data, for the scores that look at gradients."""
        ...


@runtime_checkable
class TrainsWithPenalty(Protocol):
    """A pruner whose original model is trained with a term of its own (network slimming)."""

    def penalty(self, net: nn.Module) -> Callable[[Params], Tensor]:
        """A term on the parameters of `net` that is added to the training loss."""
        ...


# Training ------------------------------------------------------------------------------------------------------
Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> scalar
Transform = Callable[[Tensor, Generator], Tensor]  # inputs -> inputs
Penalty = Callable[[Params], Tensor]  # parameters -> scalar

# Membership ----------------------------------------------------------------------------------------------------
Predict = Callable[[Tensor], Tensor]  # (N, ...) inputs -> (N, K) probabilities


@dataclass(frozen=True)
class BlackBox:
    """All that a membership attacker sees of a model: its predictions."""

    predict: Predict
    labels_only: bool = False  # then `predict` gives one-hot rows, and attacks that need probabilities refuse it


@dataclass(frozen=True)
class Shadow:
    """A model of the attacker's own, with what it was and was not trained on."""

    box: BlackBox
    members: Batch
    nonmembers: Batch


@dataclass(frozen=True)
class InOut:
    """Models of the attacker's over one pool of examples, each example in exactly half of them."""

    boxes: Sequence[BlackBox]
    pool: Batch
    membership: Tensor  # (models, N) bool


@dataclass(frozen=True)
class Candidates:
    """The examples whose membership is asked; `population` is data the attacker knows to be outside."""

    batch: Batch
    ids: Tensor | None = None  # (N,) rows of an InOut pool, where there is one
    population: Batch | None = field(default=None)


class Guesses(NamedTuple):
    """What a membership attack says of each candidate."""

    scores: Tensor  # (N,) high = member: the ranking that AUC and TPR at a fixed FPR are made of
    members: Tensor  # (N,) bool: the decision at the threshold the attack learnt from its shadows
    note: str | None = None  # what a reader of the result must know of how the attack ran: every row carries it


class MembershipAttack(Protocol):
    """Tells members from non-members."""

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn from the attacker's own models; returns the fitted attack, a new object."""
        ...

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score and decide every candidate. Ranking and decision differ: thresholds may differ by class."""
        ...
