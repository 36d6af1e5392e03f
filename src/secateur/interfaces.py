"""Interfaces of all parts: data types and protocols. Read this file first.

A method is a function or a frozen dataclass that implements one of these protocols. Nothing in this file has behaviour
beyond a one-liner. Interfaces of federations are added together with the methods that need them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, Self, runtime_checkable

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

Params = dict[str, Tensor]  # by parameter name; a "state" also holds buffers
Mask = dict[str, Tensor]  # by parameter name: bool, True = kept; a tensor without a mask is kept


class Batch(NamedTuple):
    """Inputs and their labels."""

    inputs: Tensor  # (N, ...)
    labels: Tensor  # (N,) int64

    def take(self, rows: Tensor) -> Batch:
        """Return the same rows of both; `rows` holds indices or is a bool mask."""
        return Batch(self.inputs[rows], self.labels[rows])

    def to(self, device: torch.device | str) -> Batch:
        """Return both on a device."""
        return Batch(self.inputs.to(device), self.labels.to(device))

    @property
    def size(self) -> int:
        """The number of examples (len() of a tuple is its number of fields)."""
        return self.inputs.shape[0]


# Pruning -------------------------------------------------------------------------------------------------------


class Pruner(Protocol):
    """Pruning method that chooses the weights to remove: a frozen dataclass whose fields are its hyper-parameters."""

    def __call__(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> Mask:
        """Return the mask at a sparsity in [0, 1); `batch` is training data for scores that use gradients."""
        ...


@runtime_checkable
class ChecksModel(Protocol):
    """Pruner that cannot take every network, and says so before any training."""

    def check(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        """Raise WrongInput, with what can be used instead, if the network cannot be compressed."""
        ...


@runtime_checkable
class Reshaper(Protocol):
    """Compressor that gives a smaller network instead of a mask; the smaller network is then trained."""

    def reshape(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> nn.Module:
        """Return the smaller network; a pure function of its arguments."""
        ...


@runtime_checkable
class Converter(Protocol):
    """Compressor that gives a trained network another form, which can only be asked."""

    def convert(self, net: nn.Module, batch: Batch) -> nn.Module:
        """Return the network in its new form; a pure function of its arguments."""
        ...


@runtime_checkable
class Teaches(Protocol):
    """Reshaper whose network learns from the original."""

    def guide(self, original: nn.Module, device: torch.device) -> Guide:
        """Return the term that is added to the training loss."""
        ...

    def share(self, loss: Loss) -> Loss:
        """Return the part of the training loss that the labels have."""
        ...


@runtime_checkable
class TrainsWithPenalty(Protocol):
    """Pruner whose original model is trained with an additional loss term (network slimming)."""

    def penalty(self, net: nn.Module) -> Callable[[Params], Tensor]:
        """Return the term on the parameters of `net` that is added to the training loss."""
        ...


# Training ------------------------------------------------------------------------------------------------------
Loss = Callable[[Tensor, Tensor], Tensor]  # (logits, labels) -> scalar
LossOf = Callable[[Params, Tensor, Tensor], Tensor]  # (parameters, inputs, labels) -> scalar
Transform = Callable[[Tensor, Generator], Tensor]  # inputs -> inputs
Penalty = Callable[[Params], Tensor]  # parameters -> scalar
Guide = Callable[[Tensor, Tensor], Tensor]  # (inputs, logits) -> scalar

# Membership ----------------------------------------------------------------------------------------------------
Predict = Callable[[Tensor], Tensor]  # (N, ...) inputs -> (N, K) probabilities


@dataclass(frozen=True)
class BlackBox:
    """Predictions of a model: all that a membership attacker observes."""

    predict: Predict
    labels_only: bool = False  # then `predict` returns one-hot rows, which attacks that need probabilities refuse
    metered: bool = False  # True if questions cost, as at an endpoint: gaps of moved inputs are then not measured
    rows: int | None = field(default=None, kw_only=True)  # to ask about at a time; None: all, as answers fit in memory


@dataclass(frozen=True)
class Shadow:
    """Shadow model of the attacker, with data that it was and was not trained on."""

    box: BlackBox
    members: Batch
    nonmembers: Batch


@dataclass(frozen=True)
class InOut:
    """Models of the attacker on one pool; each example trains some of them, by our own design exactly half."""

    boxes: Sequence[BlackBox]
    pool: Batch
    membership: Tensor  # (models, N) bool
    population: Tensor | None = None  # rows of the pool that are no candidates, if the attacker has such


@dataclass(frozen=True)
class Candidates:
    """Examples whose membership is to be decided; `population` is data that the attacker knows to be non-members."""

    batch: Batch
    ids: Tensor | None = None  # (N,) rows of an InOut pool, if there is one
    population: Batch | None = field(default=None)


class Guesses(NamedTuple):
    """Result of a membership attack for each candidate."""

    scores: Tensor  # (N,) high = member: the ranking for AUC and for TPR at a fixed FPR
    members: Tensor | None  # (N,) bool: the decision at a threshold; None: the attack had no shadows to learn one
    note: str | None = None  # a remark on how the attack ran, for readers of the result; added to every row


class MembershipAttack(Protocol):
    """Membership attack: separates members from non-members."""

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn from the attacker's models; return the fitted attack, a new object."""
        ...

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score every candidate, and decide it. Ranking and decision differ: thresholds may differ by class."""
        ...


@runtime_checkable
class CountsModels(Protocol):
    """Attack that needs more than one shadow model (LiRA, RMIA)."""

    def shortage(self, shadows: int, in_out: int) -> str | None:
        """Return why the attack cannot run with these numbers of disjoint shadows and in-out models; None if it can."""
        ...


# Inversion -----------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Gradient:
    """Update that is the gradient of the batch's mean loss, by parameter name."""

    values: Params


@dataclass(frozen=True)
class Weights:
    """Update that is the client's weights after its local steps, by parameter name."""

    values: Params
    buffers: Params | None = None  # running statistics of BatchNorm after the steps, if the client sends them


@dataclass(frozen=True)
class ServerView:
    """All data of one client and one round that the server observes."""

    sent: Params  # the model that the server sent: parameters and buffers
    update: Gradient | Weights  # the client's answer
    last: Mask | None = None  # entries that were not 0 in its last answer, where that tells; None: nothing is known
    squares: Params | None = None  # of its summed gradients, which a base pruning (PruneFL) makes it send too


@dataclass(frozen=True)
class Optimiser:
    """Optimiser of a client's local steps; the default is plain gradient descent.

    Its state is zero at the begin of every turn. training/optimisers.py has its rule, and reads it from a text.
    """

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: float = 0.0  # of sgd
    nesterov: bool = False  # of sgd
    weight_decay: float = 0.0  # added to the gradient; adamw: to the direction
    betas: tuple[float, float] = (0.9, 0.999)  # of adam and adamw
    eps: float = 1e-8  # of adam and adamw
    schedule: Literal["constant", "step", "cosine"] | tuple[float, ...] = "constant"  # numbers: the rate of every step
    step_size: int = 1  # schedule step: local steps between two decays
    gamma: float = 0.1  # schedule step: the factor of a decay

    @property
    def is_plain(self) -> bool:
        """True if a direction is the gradient itself."""
        return self.kind == "sgd" and self.momentum == 0 and self.weight_decay == 0

    @property
    def is_adaptive(self) -> bool:
        """True if a direction is divided by the size of gradients, so that one step shows little but signs."""
        return self.kind != "sgd"


PLAIN_SGD = Optimiser()


@dataclass(frozen=True, eq=False)
class Knowledge:
    """Knowledge of the attacker beside the updates; printed with the result."""

    net: nn.Module  # the structure, never its tensors
    input_shape: tuple[int, ...]  # (C, H, W)
    classes: int
    mean: Tensor  # (C, 1, 1): inputs are (pixel - mean) / std for pixels in [0, 1]
    std: Tensor  # (C, 1, 1)
    batch_size: int = 1
    labels: Tensor | None = None  # (targets, B): the true labels, if the attacker knows them
    loss: Loss = cross_entropy
    batchnorm: Literal["eval", "batch"] = "eval"  # the statistics by which the client normalised
    statistics: Sequence[Params] | None = None  # per target: mean and variance of every BatchNorm input
    local_steps: int = 1  # of a client that sends weights
    learning_rate: float | None = None  # of the local steps; needed for weights
    local_batch: int | None = None  # examples per step, in order and cyclic; None: all of them
    local_epochs: int | None = None  # passes over all examples, instead of steps; the last batch may be smaller
    optimiser: Optimiser = PLAIN_SGD  # of the local steps
    compression: Callable[[Params], Params] | None = None  # the client's, for an attacker that re-applies it
    generator: Callable[[Tensor, Tensor], Tensor] | None = None  # noise (N, 128), labels -> pictures; public data

    @property
    def box(self) -> tuple[Tensor, Tensor]:
        """The lowest and the highest input of a valid picture, each (C, 1, 1)."""
        return -self.mean / self.std, (1 - self.mean) / self.std

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return inputs as pixels in [0, 1]."""
        return (inputs * self.std.to(inputs) + self.mean.to(inputs)).clamp(0, 1)


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Reconstruction of one target from its updates; selected by the attack's loss, never by the truth."""

    batch: Batch  # inputs in the model's units, and the labels inferred; there may be fewer or more than B
    loss: float  # the attack's loss of the selected trial
    curve: Sequence[tuple[int, float]] = ()  # (iteration, loss) of the selected trial
    trial: int = 0  # index of the selected trial
    diverged: int = 0  # trials that were restarted after a NaN or an explosion
    note: str | None = None  # a remark on how the attack ran, for readers of the result


class Watch(Protocol):
    """Observer of a long attack: shows its progress, and saves the state from which a run resumes."""

    def advance(self, iterations: int) -> None:
        """Report that so many more iterations of the stacked trials are done."""
        ...

    def load(self) -> Params | None:
        """Return the state that `save` last stored for these targets, if the run was interrupted; else None."""
        ...

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Save the state from which the attack can resume; attacks call this often.

        `pictures` holds the current reconstruction of each target.
        """
        ...


class InversionAttack(Protocol):
    """Inversion attack: reconstructs a client's examples from its updates."""

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Raise WrongInput with the reason, before any work, if the attack cannot be applied."""
        ...

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """Return the model that the server sends instead; a passive attacker inherits this and changes nothing."""
        return net, state

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """Yield the index and the reconstruction of each target as it is finished; a target is one round or several.

        `chance` has a generator for each target; all may be the same generator. An attack therefore makes one draw for
        each target, in order, or no draw at all.
        """
        ...


# Updates -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class UploadContext:
    """Context in which a client rewrites its gradient."""

    net: nn.Module  # the structure
    sent: Params  # the model that the client received: parameters and buffers
    batch: Batch  # the client's examples, as used for the gradient
    round: int
    rng: Generator  # on the CPU; this generator seeds those of other devices
    loss: Loss = cross_entropy
    batchnorm: Literal["eval", "batch"] = "batch"


class Upload(Protocol):
    """Defense that rewrites a client's upload: a frozen dataclass whose fields are its hyper-parameters."""

    def init(self, params: Params) -> Params:
        """Return the state that the client keeps and never sends, by name; empty unless a defense overrides it."""
        return {}

    def __call__(self, grads: Params, state: Params, context: UploadContext) -> tuple[Params, Params]:
        """Return the upload and the new state; neither shares memory with an argument unless it is unchanged."""
        ...


class ClientResult(NamedTuple):
    """Result of a client update that a defense computes (PriPrune); for many clients their axis is first."""

    values: Params  # exactly 0 where withheld or pruned
    withheld: Mask
    state: Params
    summed: Params
    last: Params
    loss: Tensor


class CustomTurn(Protocol):
    """Defense that replaces a client's training: it trains its mask and the weights together."""

    def init(self, params: Params) -> Params:
        """Return a client's state before its first round, on the device of the parameters."""
        ...

    def caution(self, weights: int) -> str | None:
        """Return a warning about training a network of so many weights, or None."""
        ...

    def noise(self, params: Params, steps: int, rng: Generator) -> Params:
        """Draw all noise of a client update on the generator's device, with the steps first; may be empty."""
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
    ) -> ClientResult:
        """Compute one client's update on batches (steps, B, ...); a pure function that also runs under vmap."""
        ...
