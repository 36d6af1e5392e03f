"""The training of a round's clients as one axis: one by one on a CPU, stacked and captured in a CUDA graph on a GPU.

| way        | how                                                                                              |
|------------|--------------------------------------------------------------------------------------------------|
| sequential | one client after the other, channels_last                                                         |
| stacked    | all clients in one vmap; on a GPU a CUDA graph that reads the server's tensors where they are      |

Stacked clients need batches of equal sizes: those of local steps always have, those of local epochs may not, and such a
round goes one by one. In float64 both are equal to 1e-9 over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.defenses.private_turn import PrivateTurn
from secateur.errors import WrongInput, unknown
from secateur.federated.local import Local, OwnTurn, Sent, Trained, added, gradient, train
from secateur.functional import Ask, Functional
from secateur.interfaces import Batch, Mask, Params
from secateur.lanes import copies
from secateur.precision import tf32
from secateur.prediction import arranged
from secateur.stacking.products import Products

Choose = Callable[[Params, Params], Mask]  # (weights, dense gradient) -> a client's own mask; runs under vmap
Rows = Tensor | Sequence[Tensor]  # a step each: (steps, B), or batches of several sizes
Noise = Sequence[tuple[Tensor, ...]]  # of the network, a step each
WAYS = ("auto", "sequential", "stacked")


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


def caution(net: nn.Module, own: OwnTurn | None) -> str | None:
    """What is to be known before turns of their own train this network."""
    return None if own is None else own.caution(sum(value.numel() for value in net.parameters() if value.ndim > 1))


def even(rows: Sequence[Rows]) -> bool:
    """Whether all batches of all clients are of one size, and as many."""
    sizes = {tuple(len(batch) for batch in own) for own in rows}
    return len(sizes) == 1 and len(set(next(iter(sizes)))) == 1


def repeated(tensors: Params, count: int) -> Params:
    """The same for each of many: views."""
    return {name: value.expand(count, *value.shape) for name, value in tensors.items()}
