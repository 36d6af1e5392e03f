"""The clients of a round as one axis: one by one on a CPU, stacked and captured in a CUDA graph on a GPU.

| way        | how                                                                                              |
|------------|--------------------------------------------------------------------------------------------------|
| sequential | one client after the other, channels_last                                                         |
| stacked    | all clients in one vmap; on a GPU a CUDA graph that reads the server's tensors where they are      |

Stacked clients need batches of equal sizes: those of local steps always have, those of local epochs may not, and such a
round goes one by one. In float64 both are equal to 1e-9 over rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.errors import WrongInput, unknown
from secateur.federated.graphs import Captured
from secateur.federated.local import Local, OwnTurn, Sent, Trained, added, gradient, train
from secateur.functional import Ask, Functional
from secateur.interfaces import Batch, Mask, Params
from secateur.precision import tf32
from secateur.prediction import arranged

Choose = Callable[[int, Params, Params], Mask]  # (place in the round, weights, dense gradient) -> a client's own mask
WAYS = ("auto", "sequential", "stacked")


class Given(NamedTuple):
    """What one client of a round is given beside the server's model."""

    rows: Tensor | Sequence[Tensor]  # of the data, a step each: (steps, B), or batches of several sizes
    start: Params | None  # where it begins instead of at what it received (withheld weights put back)
    state: Params  # of a turn of its own
    noise: Sequence[tuple[Tensor, ...]]  # of the network, a step each
    chance: Params  # of a turn of its own


@dataclass(frozen=True, eq=False)
class _Stacked:
    """The same of all clients, stacked: what a graph copies in."""

    rows: Tensor  # (clients, steps, B)
    start: Params
    state: Params
    noise: tuple[tuple[Tensor, ...], ...]
    chance: Params

    def tensors(self) -> list[Tensor]:
        """In a fixed order."""
        noise = [each for step in self.noise for each in step]
        return [self.rows, *self.start.values(), *self.state.values(), *noise, *self.chance.values()]

    def clone(self) -> Self:
        """The same in memory of its own."""
        noise = tuple(tuple(each.clone() for each in step) for step in self.noise)
        start, state, chance = (tree.clone(each) for each in (self.start, self.state, self.chance))
        return type(self)(self.rows.clone(), start, state, noise, chance)


@dataclass(frozen=True, eq=False)
class Model:
    """The model that a round's clients receive: tensors that stay where they are, changed in place between rounds."""

    params: Params
    buffers: Params
    mask: Mask


class Crowd:
    """Runs the turns of a round's clients."""

    def __init__(
        self, net: nn.Module, data: Batch, model: Model, local: Local, own: OwnTurn | None = None, way: str = "auto"
    ) -> None:
        if way not in WAYS:
            raise unknown("way", way, WAYS)
        device = data.inputs.device
        check_network(net, own)
        self.data, self.model, self.local, self.own = data, model, local, own
        self.function = Functional(net, training=True, device=device)
        self.stacks = way == "stacked" or (way == "auto" and device.type == "cuda")
        self.summing = False  # whether the dense gradients are added up
        self._asks: dict[int, list[Ask]] = {}
        graph = self.stacks and device.type == "cuda"
        self._many = {
            summing: Captured(self._together(summing), device) if graph else self._together(summing)
            for summing in (False, True)
        }

    def __call__(self, given: Sequence[Given]) -> Iterator[Trained | Sent]:
        """Every client's turn in order; on a GPU to be used before the next round is asked for."""
        if self.stacks and _even(given):
            with tf32(True):
                made = self._many[self.summing](self._stack(given))
            for client in range(len(given)):
                yield type(made)(*(_lane(part, client) for part in made))
            return
        received = self._arranged(self.model.params)
        for one in given:
            with tf32(True):
                turned = self._alone(received, one)
            yield turned

    def readjusted(self, given: Sequence[Given], choose: Choose) -> Iterator[tuple[Trained | Sent, Mask]]:
        """The same in a round where clients choose masks of their own, before their last step, one by one (FedDST).

        What a mask lets in again begins at 0 and takes that step. A turn of its own (PriPrune) has its mask from the
        start, chosen by the gradient of its last batch at what it received.
        """
        received, model, local = self._arranged(self.model.params), self.model, self.local
        for place, one in enumerate(given):
            steps = [self._batch(rows) for rows in one.rows]
            noisy = [(*batch, *noise) for batch, noise in zip(steps, one.noise or [()] * len(steps), strict=True)]
            start = received if one.start is None else self._arranged(one.start)
            first = [] if self.own is not None else noisy[:-1]
            with tf32(True):
                before = train(self._objective, start, model.buffers, model.mask, first, local, summing=True)
                last = before.last or gradient(self._objective, before.params, before.buffers, noisy[-1])
                mask = model.mask | choose(place, before.params, last)
                if self.own is not None:
                    made: Trained | Sent = self._alone(received, one, mask)
                else:
                    after = train(self._objective, before.params, before.buffers, mask, noisy[-1:], local, summing=True)
                    made = added(before, after, len(first), 1)
            yield made, mask

    def noise(self, rows: Tensor | Sequence[Tensor], rng: Generator) -> list[tuple[Tensor, ...]]:
        """What the network draws for each step: dropout, and noise inside it."""
        sizes = [rows.shape[1]] * len(rows) if isinstance(rows, Tensor) else [len(step) for step in rows]
        for size in sizes:
            if size not in self._asks:
                tensors = self.model.params | self.model.buffers
                self._asks[size] = self.function.asks(tensors, self._cast(self.data.inputs[[0] * size]))
        return [tuple(ask.draw(rng) for ask in self._asks[size]) for size in sizes]

    def _objective(self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        return self.local.loss(self.function(params | buffers, inputs, noise), labels)

    def _loss(self, params: Params, inputs: Tensor, labels: Tensor) -> Tensor:
        return self._objective(params, self.model.buffers, inputs, labels)

    def _alone(self, received: Params, one: Given, mask: Mask | None = None) -> Trained | Sent:
        model, mask = self.model, self.model.mask if mask is None else mask
        batches = [self._batch(rows) for rows in one.rows]
        if self.own is not None:
            joined = Batch(*(torch.stack(each) for each in zip(*batches, strict=True)))
            rate = self.local.learning_rate
            return self.own.turn(self._loss, model.params, mask, one.state, joined, one.chance, rate)
        start = received if one.start is None else self._arranged(one.start)
        steps = [(*batch, *noise) for batch, noise in zip(batches, one.noise, strict=True)]
        return train(self._objective, start, model.buffers, mask, steps, self.local, self.summing)

    def _together(self, summing: bool) -> Callable[[_Stacked], Trained | Sent]:
        def turns(given: _Stacked) -> Trained | Sent:
            inputs, labels = self._cast(self.data.inputs[given.rows]), self.data.labels[given.rows]
            if self.own is not None:
                return self._own_turns(given, Batch(inputs, labels))
            count = len(given.rows)
            params, buffers = (_repeated(each, count) for each in (self.model.params, self.model.buffers))
            steps = [(inputs[:, s], labels[:, s], *noise) for s, noise in enumerate(given.noise)]
            objective = vmap(self._objective)
            return train(objective, given.start or params, buffers, self.model.mask, steps, self.local, summing)

        return turns

    def _own_turns(self, given: _Stacked, batches: Batch) -> Sent:
        own, model, rate = self.own, self.model, self.local.learning_rate
        assert own is not None

        def one(state: Params, inputs: Tensor, labels: Tensor, chance: Params) -> tuple[Any, ...]:
            return tuple(own.turn(self._loss, model.params, model.mask, state, Batch(inputs, labels), chance, rate))

        return Sent(*vmap(one)(given.state, batches.inputs, batches.labels, given.chance))

    def _stack(self, given: Sequence[Given]) -> _Stacked:
        first, device = given[0], self.data.inputs.device
        rows = torch.stack([one.rows if isinstance(one.rows, Tensor) else torch.stack([*one.rows]) for one in given])
        steps = [tuple(torch.stack(lanes) for lanes in zip(*step, strict=True)) for step in _by_step(given)]
        starts = [self.model.params if one.start is None else one.start for one in given]
        start = tree.stack(starts) if any(one.start is not None for one in given) else {}
        state, chance = (
            tree.stack([getattr(one, name) for one in given]) if getattr(first, name) else {}
            for name in ("state", "chance")
        )
        return _Stacked(rows.to(device), start, state, tuple(steps), chance)

    def _batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        rows = rows.to(self.data.inputs.device)
        return self._arranged({"": self._cast(self.data.inputs[rows])})[""], self.data.labels[rows]

    def _arranged(self, tensors: Params) -> Params:
        return tensors if self.own is not None else arranged(tensors)

    def _cast(self, inputs: Tensor) -> Tensor:
        return inputs.to(next(iter(self.model.params.values())).dtype)


def check_network(net: nn.Module, own: OwnTurn | None) -> None:
    """Refuse a network whose statistics a turn of its own does not follow."""
    if own is not None and any(isinstance(module, _BatchNorm) for module in net.modules()):
        raise WrongInput("defense", f"{type(own).__name__} knows no BatchNorm; give a model without, such as conv-2")


def _even(given: Sequence[Given]) -> bool:
    """Whether all batches of all clients are of one size."""
    uneven = (one.rows for one in given if not isinstance(one.rows, Tensor))
    steps = {len(one.rows) for one in given}
    sizes = {one.rows.shape[1] for one in given if isinstance(one.rows, Tensor)}
    return len(steps) == 1 and len(sizes | {len(batch) for rows in uneven for batch in rows}) == 1


def _by_step(given: Sequence[Given]) -> Iterator[list[tuple[Tensor, ...]]]:
    for step in range(len(given[0].rows)):
        yield [one.noise[step] if one.noise else () for one in given]


def _repeated(tensors: Params, count: int) -> Params:
    return {name: value.expand(count, *value.shape) for name, value in tensors.items()}


def _lane(part: Any, client: int) -> Any:
    """One client's part: views."""
    if isinstance(part, Tensor):
        return part[client]
    return {name: value[client] for name, value in part.items()}
