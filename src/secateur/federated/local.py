"""A client's local training, for one client and for many as one axis.

`train` is pure at its boundary: it clones what it starts from, unless that is `fresh`, and returns new tensors. All
that it does outside of the objective works entry by entry, so that the same lines train one client, or many whose
tensors are stacked along a first axis and whose objective is under vmap. crowd.py chooses which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Generator, Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from secateur import tree
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Loss, LossOf, Mask, Params
from secateur.lanes import descend, erase

Objective = Callable[..., Tensor]  # (params, buffers, inputs, labels, *noise) -> the loss, or (clients,) losses


@dataclass(frozen=True)
class Local:
    """How a client trains in its turn; the defaults are PruneFL's and PriPrune's on FEMNIST."""

    steps: int | None = 5  # of one batch each; None: epochs
    epochs: int | None = None  # passes over the client's rows
    batch_size: int = 20
    learning_rate: float = 0.25
    momentum: float = 0.0  # begins anew in every turn
    weight_decay: float = 0.0
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise WrongInput("local_steps", "give either local_steps or local_epochs, and not both")
        for name in ("steps", "epochs", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise WrongInput(f"local_{name}", f"{value} is not allowed; give a whole number from 1")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise WrongInput("learning_rate", f"{self.learning_rate} is not allowed; give a number above 0")
        if not 0 <= self.momentum < 1:
            raise WrongInput("momentum", f"{self.momentum} is not allowed; give a number from 0 to below 1")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise WrongInput("weight_decay", f"{self.weight_decay} is not allowed; give a number from 0")

    @property
    def plain(self) -> bool:
        """Whether what was trained is the start minus the rate times the sum of the gradients."""
        return self.momentum == 0 and self.weight_decay == 0


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """PruneFL's loss: binary cross-entropy with logits on one-hot labels, the mean over examples and classes.

    Labels may be shares of classes, as an attacker tries them.
    """
    classes = torch.arange(logits.shape[-1], device=labels.device)  # one_hot looks at the labels, which vmap refuses
    shares = labels if labels.is_floating_point() else labels[..., None] == classes
    return binary_cross_entropy_with_logits(logits, shares.to(logits.dtype))


LOSSES: dict[str, Loss] = {"cross-entropy": cross_entropy, "binary": binary_cross_entropy}


class Trained(NamedTuple):
    """What local training comes to; of many clients every tensor has them first."""

    params: Params  # exactly 0 where the mask drops
    buffers: Params
    summed: Params  # the dense gradients' sum over the steps; empty where nobody asked, or without a step
    last: Params  # the dense gradient of the last batch; likewise
    loss: Tensor  # the mean over the steps


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


def train(
    objective: Objective,
    start: Params,
    buffers: Params,
    mask: Mask,
    batches: Sequence[tuple[Tensor, ...]],
    local: Local,
    summing: bool = False,
    fresh: bool = False,
) -> Trained:
    """SGD from `start`, a step for each of `batches` (inputs, labels, noise of the network ...).

    What the mask drops is zero from the start on. `summing` adds up the dense gradients. `fresh`: nobody else needs
    `start`, which is changed, and which is zero there already.
    """
    params = {name: value.requires_grad_() for name, value in (start if fresh else tree.clone(start)).items()}
    held, leaves = tree.clone(buffers), list(params.values())
    dropped = [~mask[name] if name in mask else None for name in params]
    if not fresh:
        _drop(leaves, dropped)
    moments: list[Tensor] = []
    summed: list[Tensor] = []
    losses = []
    grads: list[Tensor] = []
    for batch in batches:
        grads = []  # their memory serves the next ones
        loss = objective(params, held, *batch)
        # A sum's gradient holds each stacked client's own.
        grads = list(torch.autograd.grad(loss.sum(), leaves, allow_unused=True, materialize_grads=True))
        losses.append(loss.detach())
        with torch.no_grad():
            if summing and len(losses) > 2:
                torch._foreach_add_(summed, grads)
            elif summing:  # two gradients may share their memory: these are never changed
                summed = list(torch._foreach_add(summed, grads)) if summed else grads
            moments = _descend(leaves, grads, moments, local, dropped)
    return Trained(
        {name: leaf.detach() for name, leaf in params.items()},
        held,
        dict(zip(params, summed, strict=False)),
        dict(zip(params, grads, strict=False)),
        torch.stack(losses).mean(0) if losses else leaves[0].new_zeros(()),
    )


def gradient(objective: Objective, params: Params, buffers: Params, batch: tuple[Tensor, ...]) -> Params:
    """The dense gradient of one batch, where nobody steps."""
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    loss = objective(leaves, tree.clone(buffers), *batch)
    grads = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(leaves, grads, strict=True))


def added(before: Trained, after: Trained, first: int, then: int) -> Trained:
    """One training of `first` steps and `then` more as one."""
    summed = {name: value + before.summed[name] if before.summed else value for name, value in after.summed.items()}
    return after._replace(summed=summed, loss=(first * before.loss + then * after.loss) / (first + then))


def _descend(
    leaves: list[Tensor], grads: list[Tensor], moments: list[Tensor], local: Local, dropped: Sequence[Tensor | None]
) -> list[Tensor]:
    """One step of torch.optim.SGD, and zero where this is dropped; returns the moments."""
    step = grads
    if local.weight_decay:
        step = list(torch._foreach_add(grads, leaves, alpha=local.weight_decay))
    if local.momentum:
        if moments:
            torch._foreach_mul_(moments, local.momentum)
            torch._foreach_add_(moments, step)
        else:
            moments = [value.clone() for value in step]
        step = moments
    descend([leaf.detach() for leaf in leaves], step, local.learning_rate, dropped)
    return moments


@torch.no_grad()
def _drop(leaves: Sequence[Tensor], dropped: Sequence[Tensor | None]) -> None:
    for leaf, where in zip(leaves, dropped, strict=True):
        if where is not None:
            erase(where, leaf.detach())
