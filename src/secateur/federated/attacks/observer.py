"""Observers of a federation at the server, and the view of a round that they are shown.

Under secure aggregation (`view` "sum") an observer sees no client's update. It sees the server's average, and the
number of clients and examples in it. The view is modelled in process; the real protocol is Flower's SecAgg+. An attack
takes all examples of a round as one batch. That is exact where clients take one step and weigh alike. After several
steps, or with shares of unequal size, it is an approximation.

An active observer sends its victims a changed model (`answers`). A victim cannot tell. It trains, prunes and defends
itself by the terms of the federation, on every weight that was sent. The server makes the mask, so an added block is
kept whole; only where clients choose their masks (feddst) do they prune it like any layer. A defense withholds and
rewrites the block's weights like any others, and counts them in its rate. The answer is of another model, so the server
does not average it, and the victim's state stays as before. For the federation the client was lost in this round, and
the round's row says so. Its bytes down are counted as those of the plain model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.defenses.withholding import Rates
from secateur.errors import WrongInput
from secateur.federated.client_training import BroadcastModel, Rows
from secateur.federated.client_turn import ClientTurn, flatten_rows
from secateur.federated.faults import Fault
from secateur.federated.sampling import SampledClients
from secateur.federated.spec import FederationSpec
from secateur.functional import join_state, split
from secateur.interfaces import Batch, Gradient, Mask, Params, ServerView, Weights

if TYPE_CHECKING:
    from secateur.federated.federation import Federation
    from secateur.federated.server import RoundSums, Server

NOBODY = "no update of the round arrived"


class ClientView(NamedTuple):
    """One update of a round as the server sees it, with the truth for the evaluation of attacks."""

    round: int
    client: int | None  # None: the sum of several
    view: ServerView
    truth: Batch  # the examples of all local steps in their order; of a sum step by step those of all clients
    rows: Tensor  # of the train part: which examples these are; evaluator only
    buffers: Params  # BatchNorm's statistics, sent in the clear
    clients: tuple[int, ...]  # one, or those in the sum


class RoundView(NamedTuple):
    """One round as an observer sees it; its tensors may be kept."""

    round: int
    sent: Params  # the model that was broadcast: parameters and buffers
    mask: Mask  # of the server
    seen: Sequence[ClientView]  # in the order of arrival
    asked: Callable[[nn.Module, Params], list[ClientView]]  # the answers of the round's victims to another model


class Observer(ABC):
    """An observer at the server; by default it is passive, keeps nothing and postpones nothing."""

    leak: float | None = None  # the strongest result so far
    leak_name = ""  # the metric of `leak`

    @abstractmethod
    def looks(self, number: int) -> bool:
        """Return True if this round is to be shown."""

    @abstractmethod
    def __call__(self, look: Any) -> None:
        """Look at a RoundView, before the server's step; in a federation over sub-models at a SubmodelView."""

    def victims(self, number: int, clients: Sequence[int]) -> Sequence[int]:
        """Return the clients of a round that are sent a changed model; their updates are not averaged."""
        return ()

    @property
    def waits(self) -> bool:
        """True if work was postponed."""
        return False

    def finish(self) -> None:  # noqa: B027 (most observers have nothing to do)
        """Do the postponed work; called after the last round at the latest."""

    def state(self) -> tuple[Params, Any]:
        """Return the tensors and plain values that are kept of earlier rounds."""
        return {}, None

    def load(self, tensors: Params, data: Any) -> None:  # noqa: B027
        """Restore the result of `state`."""


class Every(Observer):
    """An observer that calls a function with every client's update in every `every`-th round."""

    def __init__(self, every: int, function: Callable[[Any], None]) -> None:
        self.every, self.function = every, function

    def looks(self, number: int) -> bool:
        """Return True in every `every`-th round."""
        return number % self.every == 0

    def __call__(self, look: Any) -> None:
        """Call the function with each update."""
        for seen in look.seen:
            self.function(seen)


class Arrived(NamedTuple):
    """An update that arrived, with the shapes of the server's weights."""

    client: int
    rows: Rows
    values: Params  # empty if no observer looks
    buffers: Params
    alive: Tensor | None = None  # () True if the update is finite, and so averaged; None: it is
    size: Tensor | None = None  # () bytes of the values, where the size varies
    rates: Rates | None = None  # the withheld shares
    squares: Params | None = None  # of its summed gradients, if the base pruning takes them; None if no observer looks

    @property
    def counts(self) -> bool:
        """True if the update is in the average; where only the device knows, this waits for the device."""
        return self.alive is None or bool(self.alive)


class Observers:
    """All observers of one federation."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = list(observers)

    def select_observers(self, number: int) -> list[Observer]:
        """Return the observers that look at a round."""
        return [observer for observer in self.observers if observer.looks(number)]

    @property
    def waits(self) -> bool:
        """True if an observer postponed work."""
        return any(observer.waits for observer in self.observers)

    def finish(self) -> None:
        """Do the observers' postponed work, after the last round."""
        for observer in self.observers:
            observer.finish()

    def state(self) -> tuple[Params, list[Any]]:
        """Return the state of all observers."""
        kept = [observer.state() for observer in self.observers]
        return tree.nest({index: tensors for index, (tensors, _) in enumerate(kept)}), [data for _, data in kept]

    def load(self, tensors: Params, data: Sequence[Any]) -> None:
        """Restore the result of `state`."""
        for index, (observer, saved) in enumerate(zip(self.observers, data, strict=True)):
            observer.load(tree.part(tensors, index), saved)


class RoundObservers(Observers):
    """The observers of a federation whose clients train the whole model."""

    def __init__(self, observers: Sequence[Observer], federation: Federation) -> None:
        super().__init__(observers)
        self.federation = federation

    def victims(self, number: int, clients: Sequence[int]) -> set[int]:
        """Return the clients that are sent a changed model in this round."""
        return {client for observer in self.select_observers(number) for client in observer.victims(number, clients)}

    def show(
        self,
        number: int,
        drawn: SampledClients,
        faults: Mapping[int, Fault],
        arrived: Sequence[Arrived],
        gathered: RoundSums,
    ) -> None:
        """Show a round to the observers that look at it."""
        if not self.select_observers(number):
            return
        federation = self.federation
        sent, mask = federation.server.received, tree.clone(federation.server.mask)
        arrived = [one for one in arrived if one.counts]
        if federation.terms.view == "sum":
            seen = [self._sum(number, sent, arrived, gathered)] if arrived else []
        else:
            seen = [self._view_client(number, sent, one) for one in arrived]
        for observer in self.select_observers(number):
            victims = [c for c in observer.victims(number, drawn.clients) if faults.get(c) == "tampered"]

            def ask_victims(net: nn.Module, state: Params, victims: Sequence[int] = victims) -> list[ClientView]:
                turned = answers(federation, number, drawn, net, state, victims)
                return [self._view_client(number, state, Arrived(*one)) for one in turned]

            observer(RoundView(number, sent, mask, seen, ask_victims))

    def _view_client(self, number: int, sent: Params, one: Arrived) -> ClientView:
        """Return one client's update as the server sees it."""
        rows = flatten_rows(one.rows)
        squares = None if one.squares is None else tree.clone(one.squares)
        update = convert_update(self.federation.terms, sent, tree.clone(one.values))
        if isinstance(update, Weights) and one.buffers:
            update = Weights(update.values, tree.clone(one.buffers))
        view = ServerView(sent, update, squares=squares)
        truth = self.federation.examples(rows)
        return ClientView(number, one.client, view, truth, rows, tree.clone(one.buffers), (one.client,))

    def _sum(self, number: int, sent: Params, arrived: Sequence[Arrived], gathered: RoundSums) -> ClientView:
        """Return the average of a round's updates, which is all that secure aggregation shows."""
        federation, server = self.federation, self.federation.server
        values, statistics = server.mean_of(gathered), server.statistics_of(gathered)
        steps = [one.rows for one in arrived if isinstance(one.rows, Tensor)]
        rows = torch.cat(steps, 1).flatten() if steps else torch.cat([flatten_rows(one.rows) for one in arrived])
        view = ServerView(sent, convert_update(federation.terms, sent, tree.clone(values)))
        clients = tuple(one.client for one in arrived)
        return ClientView(number, None, view, federation.examples(rows), rows, statistics, clients)


def convert_update(terms: FederationSpec, sent: Params, values: Params) -> Gradient | Weights:
    """Return an update as an attack takes it; changes that are no gradient become the weights that they lead to."""
    if not terms.sends_gradients:
        return Weights(values)
    if terms.local.steps == 1 and terms.local.is_plain:
        return Gradient(values)
    return Weights({name: sent[name] - terms.local.learning_rate * value for name, value in values.items()})


def answers(
    federation: Federation, number: int, drawn: SampledClients, net: nn.Module, state: Params, victims: Sequence[int]
) -> Iterator[tuple[int, Rows, Params, Params]]:
    """Yield (client, rows, sent values, BatchNorm statistics) of each victim of a changed model, in round order."""
    server = Changed(federation.server, net, state)
    turns = ClientTurn(net, federation.terms, server, federation.train, "sequential")
    for client, rows in zip(drawn.clients, drawn.rows, strict=True):
        if client not in victims:
            continue
        held = _rename(federation.states.get(client, {}), turns.init(), list(federation.server.weights), server.prefix)
        update = next(turns([turns.inputs(federation.seed, number, client, rows, held, "tampered")], number))
        yield client, rows, update.values, update.buffers


class Changed:
    """The server's side of a round with a changed network."""

    def __init__(self, server: Server, net: nn.Module, state: Params) -> None:
        self.net, self.base, self.prunes = net, server.base, server.prunes
        params, buffers = split(net, state)
        self.weights = tree.clone(params)
        self.prefix = prefix_of(server.weights, self.weights)
        self.mask: Mask = {self.prefix + name: keep for name, keep in server.mask.items()}
        added = [name for name in self.weights if not name.startswith(self.prefix) and self.weights[name].ndim > 1]
        self.mask |= {name: torch.ones_like(self.weights[name], dtype=torch.bool) for name in added}
        self.model = BroadcastModel(self.weights, tree.clone(buffers), self.mask if self.prunes else {})

    @property
    def received(self) -> Params:
        """The tensors that a victim is sent."""
        return join_state(self.net, self.model.params | self.model.buffers)


def prefix_of(original: Params, changed: Params) -> str:
    """Return the prefix under which a changed network holds the names of the federation's network.

    Example:
        >>> prefix_of({"w": torch.ones(2)}, {"imprint.w": torch.ones(9), "net.w": torch.ones(2)})
        'net.'
    """
    first = next(iter(original))
    for prefix in (name.removesuffix(first) for name in changed if name.endswith(first)):
        names = {prefix + name: value.shape for name, value in original.items()}
        if all(name in changed and changed[name].shape == shape for name, shape in names.items()):
            return prefix
    raise WrongInput("attack", "its model does not hold the federation's network, so clients cannot train it")


def _rename(state: Params, fresh: Params, names: Sequence[str], prefix: str) -> Params:
    """Return a client's state by the changed network's names; new entries are as before a first round."""
    renamed = dict(fresh)
    for key, value in state.items():
        changed = [key.removesuffix(name) + prefix + name for name in names if key.endswith(name)]
        renamed |= {name: value for name in (key, *changed) if name in fresh}
    return renamed
