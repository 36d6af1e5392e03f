"""The shapes that every part is built to. Read this file first.

A method is a function or a frozen dataclass that has one of these shapes; nothing here has behaviour beyond a
one-liner. The shapes of whole federations join this file with the methods that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

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
LossOf = Callable[[Params, Tensor, Tensor], Tensor]  # (parameters, inputs, labels) -> scalar
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


@runtime_checkable
class CountsModels(Protocol):
    """An attack that one shadow model is not enough for (LiRA, RMIA)."""

    def shortage(self, shadows: int, in_out: int) -> str | None:
        """Why it cannot run with so many disjoint shadows and in-out models; None where it can."""
        ...


# Inversion -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gradient:
    """An update that is the gradient of the batch's mean loss, by parameter name."""

    values: Params


@dataclass(frozen=True)
class Weights:
    """An update that is the client's weights after its local steps, by parameter name."""

    values: Params


@dataclass(frozen=True)
class ServerView:
    """All that a server sees of one client in one round."""

    sent: Params  # the model it sent: parameters and buffers
    update: Gradient | Weights  # what came back


@dataclass(frozen=True, eq=False)
class Knowledge:
    """What the attacker knows beside the updates; it is printed with the result."""

    net: nn.Module  # the structure, never its tensors
    input_shape: tuple[int, ...]  # (C, H, W)
    classes: int
    mean: Tensor  # (C, 1, 1): how pixels in [0, 1] become inputs, (pixel - mean) / std
    std: Tensor  # (C, 1, 1)
    batch_size: int = 1
    labels: Tensor | None = None  # (targets, B): the true ones, where the attacker is given them
    loss: Loss = cross_entropy
    batchnorm: Literal["eval", "batch"] = "eval"  # by which statistics the client normalised
    statistics: Sequence[Params] | None = None  # a target each: mean and variance of every BatchNorm's input, if told
    local_steps: int = 1  # of a client that sends weights
    learning_rate: float | None = None  # of its steps; needed for weights
    local_batch: int | None = None  # examples a step takes, in order and again from the start; None: all of them
    compression: Callable[[Params], Params] | None = None  # the client's own, for an attacker that re-applies it
    generator: Callable[[Tensor, Tensor], Tensor] | None = None  # pictures of noise (N, 128) and labels, by public data

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest input of a valid picture, (C, 1, 1) each."""
        return -self.mean / self.std, (1 - self.mean) / self.std

    def pixels(self, inputs: Tensor) -> Tensor:
        """Inputs as pixels in [0, 1]."""
        return (inputs * self.std.to(inputs) + self.mean.to(inputs)).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """What an attack makes of one target's updates; chosen by the attack's own loss, never by the truth."""

    batch: Batch  # inputs in the model's units and the labels the attack believes; it may find fewer or more than B
    loss: float  # the attack's own, of the trial that was taken
    curve: Sequence[tuple[int, float]] = ()  # (iteration, loss) of that trial
    trial: int = 0  # which one was taken
    diverged: int = 0  # trials that were begun again after a NaN or an explosion
    note: str | None = None  # what a reader of the result must know of how the attack ran


class Watch(Protocol):
    """Who follows a long attack: shows how far it is, keeps what a resumed run goes on from."""

    def advance(self, iterations: int) -> None:
        """So many more iterations of the stacked trials are done."""
        ...

    def load(self) -> Params | None:
        """What `save` was given last for these targets, in a run that was interrupted."""
        ...

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Called often: the attack could go on from `state`; `pictures` are what it has so far, a target each."""
        ...


class InversionAttack(Protocol):
    """Turns updates back into what they were made of."""

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse, before any work and with the reason, what this attack cannot be mounted on (WrongInput)."""
        ...

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """The model that the server sends instead: an active attacker's; a passive one returns it unchanged."""
        ...

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """Every target's pictures as they are finished, with the target's index; a target is one round or several.

        `chance` has a generator for each target, which may be one for all: an attack takes one draw for each target, in
        order, or none at all.
        """
        ...


# Updates -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class Turning:
    """What a client has at hand when it rewrites its gradient."""

    net: nn.Module  # the structure
    sent: Params  # the model it received: parameters and buffers
    batch: Batch  # its own examples, as it used them
    round: int
    rng: Generator  # on the CPU; noise on another device is drawn from a generator that this one seeds
    loss: Loss = cross_entropy
    batchnorm: Literal["eval", "batch"] = "batch"


class Upload(Protocol):
    """Rewrites what leaves the client: a frozen dataclass whose fields are its hyper-parameters."""

    def init(self, params: Params) -> Params:
        """The state that the client keeps at home, by name; empty where there is none."""
        ...

    def __call__(self, grads: Params, state: Params, turning: Turning) -> tuple[Params, Params]:
        """What is sent, and the state afterwards; neither shares memory with what was given unless it is unchanged."""
        ...


class Sent(NamedTuple):
    """What a turn of its own (PriPrune) comes to; of many clients every tensor has them first."""

    values: Params  # exactly 0 where withheld or pruned
    withheld: Mask
    state: Params
    summed: Params
    last: Params
    loss: Tensor


class OwnTurn(Protocol):
    """A defense that trains by itself: its mask and the weights together."""

    def init(self, params: Params) -> Params:
        """A client's state before its first round, on the device of the parameters."""
        ...

    def caution(self, weights: int) -> str | None:
        """What is to be known before it trains a network of so many weights; None where there is nothing."""
        ...

    def noise(self, params: Params, steps: int, rng: Generator) -> Params:
        """All chance of a turn, drawn on the generator's device, the steps first; empty where there is none."""
        ...

    def turn(
        self,
        loss: LossOf,
        received: Params,
        mask: Mask,
        state: Params,
        batches: Batch,
        noise: Params,
        learning_rate: float,
    ) -> Sent:
        """One client's turn on batches (steps, B, ...): pure, and as it is under vmap."""
        ...
