"""A client's local training, for one client and for many as one axis.

`train` is pure at its boundary: it clones what it starts from, unless that is `fresh`, and returns new tensors. All
that it does outside of the objective works entry by entry, so that the same lines train one client, or many whose
tensors are stacked along a first axis and whose objective is under vmap. `Crowd` chooses which: one
by one on a CPU, stacked and captured in a CUDA graph on a GPU.

| way        | how                                                                                              |
|------------|--------------------------------------------------------------------------------------------------|
| sequential | one client after the other, channels_last                                                         |
| stacked    | all clients in one vmap; on a GPU a CUDA graph that reads the server's tensors where they are      |

Stacked clients need batches of equal sizes: those of local steps always have, those of local epochs may not, and such a
round goes one by one. In float64 both are equal to 1e-9 over rounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.defenses.private_client import PrivateTurn
from secateur.errors import WrongInput, unknown
from secateur.functional import Ask, Functional
from secateur.gpu.client_ops import copies, descend, erase
from secateur.gpu.precision import tf32
from secateur.gpu.stacked_layers import Products
from secateur.inference import arranged
from secateur.interfaces import Batch, Loss, Mask, OwnTurn, Params, Sent

Objective = Callable[..., Tensor]  # (params, buffers, inputs, labels, *noise) -> the loss, or (clients,) losses

Choose = Callable[[Params, Params], Mask]  # (weights, dense gradient) -> a client's own mask; runs under vmap
Rows = Tensor | Sequence[Tensor]  # a step each: (steps, B), or batches of several sizes
Noise = Sequence[tuple[Tensor, ...]]  # of the network, a step each
WAYS = ("auto", "sequential", "stacked")


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


class Given(NamedTuple):
    """What one client of a round has beside the server's model; of many every tensor has them first."""

    rows: Rows  # of the data
    state: Params  # what it kept at home
    noise: Noise
    chance: Params  # of a turn of its own, of a rule that withholds, of an upload


@dataclass(frozen=True, eq=False)
class Model:
    """The model that a round's clients receive: tensors that stay where they are, changed in place between rounds."""

    params: Params
    buffers: Params
    mask: Mask


class Crowd:
    """Trains clients, one or many."""

    def __init__(
        self, net: nn.Module, data: Batch, model: Model, local: Local, own: OwnTurn | None = None, way: str = "auto"
    ) -> None:
        if way not in WAYS:
            raise unknown("way", way, WAYS)
        device = data.inputs.device
        check_network(net, own, data.inputs)
        self.data, self.model, self.local, self.own = data, model, local, own
        self.function = Functional(net, training=True, device=device)
        self.stacks = way == "stacked" or (way == "auto" and device.type == "cuda")
        self.summing = False  # whether the dense gradients are added up
        self._asks: dict[int, list[Ask]] = {}

    def received(self, start: Params | None = None) -> Params:
        """Where one client begins, or all: at `start`, else at the server's model, arranged for `one`."""
        params = self.model.params if start is None else start
        return params if self.own is not None else arranged(params)

    def one(self, one: Given, start: Params, choose: Choose | None = None) -> tuple[Trained | Sent, Mask | None]:
        """One client's training, and the mask that it chose, if it does."""
        batches = [self._batch(rows) for rows in one.rows]
        with tf32(True):
            return self._trained(lambda function, *_: function, one, start, self.model.buffers, batches, choose)

    def many(self, many: Given, start: Params, choose: Choose | None) -> tuple[Trained | Sent, Mask | None]:
        """The same of many, stacked: from the server's model, but for tensors of their own in `start`.

        These change, and are 0 where the server's mask drops.
        """
        assert isinstance(many.rows, Tensor)
        inputs, labels = self._cast(self.data.inputs[many.rows]), self.data.labels[many.rows]
        batches = [(inputs[:, step], labels[:, step]) for step in range(many.rows.shape[1])]
        count, params, mask, fresh = len(inputs), self.model.params, self.model.mask, self.own is None
        begun, buffers = (repeated(each, count) for each in (params, self.model.buffers))
        if fresh:
            begun = {
                name: start[name] if name in start else copies(value, count, mask.get(name))
                for name, value in params.items()
            }
        with tf32(True), Products():
            return self._trained(vmap, many, begun, buffers, batches, choose, fresh)

    def _trained(
        self,
        each: Callable[..., Any],  # vmap, or of one client the function as it is
        given: Given,
        start: Params,
        buffers: Params,
        batches: Sequence[tuple[Tensor, Tensor]],
        choose: Choose | None,
        fresh: bool = False,
    ) -> tuple[Trained | Sent, Mask | None]:
        """In a round where clients choose masks of their own they do so before their last step (FedDST).

        What a mask lets in again begins at 0 and takes that step. A turn of its own (PriPrune) has its mask from the
        start, chosen by the gradient of its last batch at what it received.
        """
        model, local, objective = self.model, self.local, each(self._objective)
        steps = [(*batch, *noise) for batch, noise in zip(batches, given.noise or [()] * len(batches), strict=True)]
        if choose is None:
            if self.own is not None:
                return self._own_turn(each, given, batches, None), None
            return train(objective, start, buffers, model.mask, steps, local, self.summing, fresh), None
        first = [] if self.own is not None else steps[:-1]
        before = train(objective, start, buffers, model.mask, first, local, summing=True, fresh=fresh)
        last = before.last or gradient(objective, before.params, before.buffers, steps[-1])
        mask = each(lambda *found: model.mask | choose(*found))(before.params, last)
        if self.own is not None:
            return self._own_turn(each, given, batches, mask), mask
        after = train(objective, before.params, before.buffers, mask, steps[-1:], local, summing=True)
        return added(before, after, len(first), 1), mask

    def _own_turn(
        self, each: Callable[..., Any], given: Given, batches: Sequence[tuple[Tensor, Tensor]], chosen: Mask | None
    ) -> Sent:
        own, model, rate = self.own, self.model, self.local.learning_rate
        assert own is not None

        def turn(state: Params, inputs: Tensor, labels: Tensor, chance: Params, chosen: Mask | None) -> tuple[Any, ...]:
            mask, batches = model.mask if chosen is None else chosen, Batch(inputs, labels)
            return tuple(own.turn(self._loss, model.params, mask, state, batches, chance, rate))

        axis = batches[0][1].ndim - 1  # many clients come before the steps
        inputs, labels = (torch.stack(part, axis) for part in zip(*batches, strict=True))
        many = each(turn, (0, 0, 0, 0, None if chosen is None else 0))
        return Sent(*many(given.state, inputs, labels, given.chance, chosen))

    def noise(self, rows: Rows, rng: Generator) -> Noise:
        """What the network draws for each step: dropout, and noise inside it."""
        sizes = [rows.shape[-1]] * len(rows) if isinstance(rows, Tensor) else [len(step) for step in rows]
        for size in sizes:
            if size not in self._asks:
                tensors = self.model.params | self.model.buffers
                self._asks[size] = self.function.asks(tensors, self._cast(self.data.inputs[[0] * size]))
        return [tuple(ask.draw(rng) for ask in self._asks[size]) for size in sizes]

    def _objective(self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        return self.local.loss(self.function(params | buffers, inputs, noise), labels)

    def _loss(self, params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return self._objective(params, self.model.buffers, inputs, labels)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.to(self.data.inputs.device)
        inputs = self._cast(self.data.inputs[rows])
        return inputs if self.own is not None else arranged({"": inputs})[""], self.data.labels[rows]

    def _cast(self, inputs: Tensor) -> Tensor:
        return inputs.to(next(iter(self.model.params.values())).dtype)


def check_network(net: nn.Module, own: OwnTurn | None, inputs: Tensor) -> None:
    """Refuse a network whose statistics, or chance, a turn of its own does not follow.

    A dry forward finds dropout that is called as a function too, which no module shows.
    """
    if own is None:
        return
    name = type(own.inner if isinstance(own, PrivateTurn) else own).__name__
    if any(isinstance(module, _BatchNorm) for module in net.modules()):
        raise WrongInput("defense", f"{name} knows no BatchNorm; give a model without, such as conv-2")
    function = Functional(net, training=True, device=inputs.device)
    params = tree.params_of(function.structure)
    if function.asks(params, inputs[:1].to(next(iter(params.values())).dtype)):
        raise WrongInput("defense", f"{name} knows no network that draws; leave dropout and precode out")


def turn_caution(net: nn.Module, own: OwnTurn | None) -> str | None:
    """What is to be known before turns of their own train this network."""
    return None if own is None else own.caution(sum(value.numel() for value in net.parameters() if value.ndim > 1))


def even(rows: Sequence[Rows]) -> bool:
    """Whether all batches of all clients are of one size, and as many."""
    sizes = {tuple(len(batch) for batch in own) for own in rows}
    return len(sizes) == 1 and len(set(next(iter(sizes)))) == 1


def repeated(tensors: Params, count: int) -> Params:
    """The same for each of many: views."""
    return {name: value.expand(count, *value.shape) for name, value in tensors.items()}
