"""Who looks at a federation's rounds from the server's place, and what is shown to them.

Under secure aggregation (`view` "sum") nobody is shown a client's update: only the average that the server makes of
them, and of how many clients and examples it is. Here that is modelled in process, as what an observer is given; the
real protocol is Flower's SecAgg+. An attack takes all examples of a round as one batch. That is what the average holds
where clients take one step and weigh alike; after several steps, or of shares of unequal size, it comes close to it.

What clients answer to a model that the server changed for them: their turn as ever, on another network.

A victim cannot tell. It trains, prunes and defends itself by the terms of the federation, on every weight of what it
was sent. The server makes the mask, so a block of its own is kept whole; only where clients choose their masks (feddst)
they prune it as any layer. A defense withholds and rewrites the block's weights as any, and counts them in its rate.
The answer is not averaged, as it is of another model, and the victim's state stays what it was: for the federation the
client was lost in this round, and the round's row says so. Its bytes down are counted as those of the plain model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.defenses.withholding import Rates
from secateur.errors import WrongInput
from secateur.federated.client_training import Given, Model, Rows
from secateur.federated.client_turn import Turns, flat
from secateur.federated.faults import Fault
from secateur.federated.sampling import Drawn
from secateur.federated.spec import Terms
from secateur.functional import joined, split
from secateur.interfaces import Batch, Gradient, Mask, Params, ServerView, Weights
from secateur.seeding import derive

if TYPE_CHECKING:
    from secateur.federated.federation import Federation
    from secateur.federated.server import Gathered, Server

NOBODY = "no update of the round arrived"


class Changed:
    """A server's side of a round with another network."""

    def __init__(self, server: Server, net: nn.Module, state: Params) -> None:
        self.net, self.base, self.prunes = net, server.base, server.prunes
        params, buffers = split(net, state)
        self.weights = tree.clone(params)
        self.prefix = prefix_of(server.weights, self.weights)
        self.mask: Mask = {self.prefix + name: keep for name, keep in server.mask.items()}
        own = [name for name in self.weights if not name.startswith(self.prefix) and self.weights[name].ndim > 1]
        self.mask |= {name: torch.ones_like(self.weights[name], dtype=torch.bool) for name in own}
        self.model = Model(self.weights, tree.clone(buffers), self.mask if self.prunes else {})

    @property
    def received(self) -> Params:
        """What a victim is sent."""
        return joined(self.net, self.model.params | self.model.buffers)


def answers(
    federation: Federation, number: int, drawn: Drawn, net: nn.Module, state: Params, victims: Sequence[int]
) -> Iterator[tuple[int, Rows, Params, Params]]:
    """Client, rows, what it sends and its BatchNorm statistics: of each victim in the order of the round."""
    terms, seed = federation.terms, federation.seed
    server = Changed(federation.server, net, state)
    turns = Turns(net, terms, server, federation.train, "sequential")
    for client, rows in zip(drawn.clients, drawn.rows, strict=True):
        if client not in victims:
            continue
        training, sending = (derive(seed, what, number, client) for what in ("tampered", "defense"))
        own = [Generator(federation.device).manual_seed(each.initial_seed()) for each in (training, sending)]
        held = _renamed(federation.states.get(client, {}), turns.init(), list(federation.server.weights), server.prefix)
        one = Given(rows, held, *turns.draws(rows, *own))
        update = next(turns([(one, sending)], number))
        yield client, rows, update.values, update.buffers


def prefix_of(own: Params, changed: Params) -> str:
    """Where a changed network holds the federation's: what stands before every one of its names.

    Example:
        >>> prefix_of({"w": torch.ones(2)}, {"imprint.w": torch.ones(9), "net.w": torch.ones(2)})
        'net.'
    """
    first = next(iter(own))
    for found in (name.removesuffix(first) for name in changed if name.endswith(first)):
        names = {found + name: value.shape for name, value in own.items()}
        if all(name in changed and changed[name].shape == shape for name, shape in names.items()):
            return found
    raise WrongInput("attack", "its model does not hold the federation's network, so clients cannot train it")


def _renamed(state: Params, fresh: Params, names: Sequence[str], prefix: str) -> Params:
    """A client's state by the names of the changed network; of what is new in it the state before a first round."""
    found = dict(fresh)
    for key, value in state.items():
        places = [key.removesuffix(name) + prefix + name for name in names if key.endswith(name)]
        found |= {place: value for place in (key, *places) if place in fresh}
    return found


class Seen(NamedTuple):
    """One update of a round as the server sees it, and the truth for whoever evaluates what is made of it."""

    round: int
    client: int | None  # None: the sum of several
    view: ServerView
    truth: Batch  # the examples of all local steps in their order; of a sum step by step those of all clients
    rows: Tensor  # of the train part: which examples these are; evaluator only
    buffers: Params  # BatchNorm's statistics, sent in the clear
    clients: tuple[int, ...]  # of which it is made


class Look(NamedTuple):
    """One round; what is in it may be kept."""

    round: int
    sent: Params  # the model that was broadcast: parameters and buffers
    mask: Mask  # the server's own
    seen: Sequence[Seen]  # as they answered
    asked: Callable[[nn.Module, Params], list[Seen]]  # what the round's victims answer to another model


class Observer(Protocol):
    """Somebody at the server."""

    def looks(self, number: int) -> bool:
        """Whether this round is to be shown."""
        ...

    def victims(self, number: int, clients: Sequence[int]) -> Sequence[int]:
        """Which of a round's clients are sent a model of the observer's own; what these send is not averaged."""
        ...

    def __call__(self, look: Look) -> None:
        """Look at a round, after its updates have come in and before the server's step."""
        ...

    @property
    def waits(self) -> bool:
        """Whether it put something off."""
        ...

    def finish(self) -> None:
        """Do it; at the latest after the last round."""
        ...

    def state(self) -> tuple[Params, Any]:
        """What was kept of earlier rounds: tensors, and plain values."""
        ...

    def load(self, tensors: Params, data: Any) -> None:
        """Go on from what `state` gave."""
        ...


class Every:
    """A function that is called with every client of every so many rounds, and keeps to itself what it learns."""

    def __init__(self, every: int, function: Callable[[Seen], None]) -> None:
        self.every, self.function = every, function

    def looks(self, number: int) -> bool:
        """Every so many rounds."""
        return number % self.every == 0

    def victims(self, number: int, clients: Sequence[int]) -> Sequence[int]:
        """It only looks."""
        return ()

    def __call__(self, look: Look) -> None:
        """Client by client."""
        for seen in look.seen:
            self.function(seen)

    waits = False

    def finish(self) -> None:
        """Nothing was put off."""

    def state(self) -> tuple[Params, Any]:
        """Nothing is kept."""
        return {}, None

    def load(self, tensors: Params, data: Any) -> None:
        """There is nothing to go on from."""


class Arrived(NamedTuple):
    """An update that came in with the form of the server's weights, and what is asked of it."""

    client: int
    rows: Rows
    values: Params  # empty where nobody looks
    buffers: Params
    alive: Tensor | None = None  # () whether it is finite, and so averaged; None: it is
    size: Tensor | None = None  # () bytes of its values, where these vary
    rates: Rates | None = None  # how much was withheld

    @property
    def counts(self) -> bool:
        """Whether it is in the average: asks the device, where only that knows."""
        return self.alive is None or bool(self.alive)


class Panel:
    """All observers of one federation."""

    def __init__(self, observers: Sequence[Observer], federation: Federation) -> None:
        self.observers, self.federation = observers, federation

    def looks(self, number: int) -> bool:
        """Whether somebody looks at a round."""
        return any(each.looks(number) for each in self.observers)

    @property
    def waits(self) -> bool:
        """Whether something was put off."""
        return any(each.waits for each in self.observers)

    def victims(self, number: int, clients: Sequence[int]) -> set[int]:
        """Who is sent another model in this round."""
        looking = [each for each in self.observers if each.looks(number)]
        return {client for each in looking for client in each.victims(number, clients)}

    def show(
        self, number: int, drawn: Drawn, faults: Mapping[int, Fault], arrived: Sequence[Arrived], gathered: Gathered
    ) -> None:
        """Show a round to whoever looks at it."""
        if not self.looks(number):
            return
        federation = self.federation
        sent, mask = federation.server.received, tree.clone(federation.server.mask)
        arrived = [one for one in arrived if one.counts]
        if federation.terms.view == "sum":
            seen = [self._sum(number, sent, arrived, gathered)] if arrived else []
        else:
            seen = [self._seen(number, sent, one) for one in arrived]
        for each in self.observers:
            if each.looks(number):
                victims = [c for c in each.victims(number, drawn.clients) if faults.get(c) == "tampered"]

                def asked(net: nn.Module, state: Params, victims: Sequence[int] = victims) -> list[Seen]:
                    turned = answers(federation, number, drawn, net, state, victims)
                    return [self._seen(number, state, Arrived(*one)) for one in turned]

                each(Look(number, sent, mask, seen, asked))

    def _seen(self, number: int, sent: Params, one: Arrived) -> Seen:
        rows = flat(one.rows)
        view = ServerView(sent, as_sent(self.federation.terms, sent, tree.clone(one.values)))
        truth = self.federation.examples(rows)
        return Seen(number, one.client, view, truth, rows, tree.clone(one.buffers), (one.client,))

    def _sum(self, number: int, sent: Params, arrived: Sequence[Arrived], gathered: Gathered) -> Seen:
        """What secure aggregation lets through."""
        federation, server = self.federation, self.federation.server
        values, statistics = server.mean_of(gathered), server.statistics_of(gathered)
        steps = [one.rows for one in arrived if isinstance(one.rows, Tensor)]
        rows = torch.cat(steps, 1).flatten() if steps else torch.cat([flat(one.rows) for one in arrived])
        view = ServerView(sent, as_sent(federation.terms, sent, tree.clone(values)))
        clients = tuple(one.client for one in arrived)
        return Seen(number, None, view, federation.examples(rows), rows, statistics, clients)

    def finish(self) -> None:
        """After the last round."""
        for each in self.observers:
            each.finish()

    def state(self) -> tuple[Params, list[Any]]:
        """What all of them keep."""
        kept = [each.state() for each in self.observers]
        tensors = {f"{place}.{name}": value for place, (some, _) in enumerate(kept) for name, value in some.items()}
        return tensors, [data for _, data in kept]

    def load(self, tensors: Params, data: Sequence[Any]) -> None:
        """Go on from what `state` gave."""
        for place, (each, own) in enumerate(zip(self.observers, data, strict=True)):
            prefix = f"{place}."
            each.load({n.removeprefix(prefix): v for n, v in tensors.items() if n.startswith(prefix)}, own)


def as_sent(terms: Terms, sent: Params, values: Params) -> Gradient | Weights:
    """An update as an attacker takes it: the gradients of several steps are a path that ends at weights."""
    if not terms.sends_gradients:
        return Weights(values)
    if terms.local.steps == 1:
        return Gradient(values)
    return Weights({name: sent[name] - terms.local.learning_rate * value for name, value in values.items()})
