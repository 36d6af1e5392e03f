"""Rounds of a federation: sample, broadcast, train, send, average, adjust (PriPrune Algorithm 1 around any rule).

Read `Federation._round` first. Chance depends on the seed and the round's number alone, so that a federation can be put
down between any two rounds and goes on with the same numbers. On a GPU a round asks the device for nothing: who sent
NaN and how many values were sent is read when somebody evaluates or saves.

BatchNorm's running statistics are sent with the weights, in the clear, and averaged as they are. A client that never
answered has not taken its turn. One whose numbers are not finite counts as lost, and its state stays what it was.

How the server's model does on the test part.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.defenses.withholding import rates
from secateur.errors import NotFinite, WrongInput
from secateur.federated.attacks.observer import Arrived, Observer, Panel
from secateur.federated.averaging import alive_of
from secateur.federated.client_training import Given, Rows, even
from secateur.federated.client_turn import Turns, Update, flat
from secateur.federated.faults import NO_ANSWER, Fault, refusal, spoilt
from secateur.federated.privacy_budget import spent
from secateur.federated.sampling import Drawn, sampler_of
from secateur.federated.server import Gathered, Server
from secateur.federated.spec import Terms
from secateur.federated.stacked_rounds import Homes, Together, check_room
from secateur.federated.traffic import Ledger, Measure, values_of
from secateur.functional import joined
from secateur.inference import logits
from secateur.interfaces import Batch, Loss, Params
from secateur.models.create import check
from secateur.seeding import derive


class Judge:
    """Accuracy and loss on examples that no client has."""

    def __init__(self, net: nn.Module, test: Batch, loss: Loss) -> None:
        self.net, self.test, self.loss = net, test, loss
        self.dtype = next(net.parameters()).dtype

    def __call__(self, state: Params) -> dict[str, float]:
        """Of one model; nothing where there is no test part; none are right where weights or outputs are not finite."""
        if not self.test.size:
            return {}
        if not all(bool(value.isfinite().all()) for value in state.values()):
            return {"test_accuracy": 0.0}
        try:
            found = logits(self.net, state, self.test.inputs.to(self.dtype))
        except NotFinite:  # weights that are still finite may overflow: a federation that diverged goes on as well
            return {"test_accuracy": 0.0}
        right = (found.argmax(1) == self.test.labels).double().mean()
        return {"test_loss": float(self.loss(found, self.test.labels)), "test_accuracy": float(right)}


@dataclass(frozen=True)
class Round:
    """A finished round; what was lost in rounds that did not evaluate comes with the next one that does."""

    number: int
    measures: list[Measure] = field(default_factory=list)


class Federation:
    """A federation that can be followed round by round, and put down and taken up between two."""

    exact = False  # whether updates are added up in float64: where clients answer in any order
    every: float | None = None  # seconds between two savings; None: as checkpoint.py has it

    def __init__(
        self,
        net: nn.Module,
        data: Dataset,
        terms: Terms,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        observers: Sequence[Observer] = (),
        way: str = "auto",
    ) -> None:
        check(net, data.input_shape, data.classes)
        self.net, self.terms, self.seed, self.device = net, terms, seed, torch.device(device)
        self.panel = Panel(observers, self)
        inputs, labels = data.batch.to(self.device)
        self.train = Batch(inputs[: data.train_size], labels[: data.train_size])
        self.server = Server(net, terms, self.train, derive(seed, "base"), self.device, self.exact)
        self.judge = Judge(net, Batch(inputs[data.train_size :], labels[data.train_size :]), terms.local.loss)
        self.sampler = sampler_of(terms, seed, self.device)
        self.turns = Turns(net, terms, self.server, self.train, way)
        self.ledger = Ledger(len(terms.shares), self.server.base.wants_squares)
        self.states: MutableMapping[int, Params] = {}  # of clients that have been sampled; never the server's to see
        self.together: Together | None = None
        fresh, clients = self.turns.init(), min(len(terms.shares), terms.rounds * terms.per_round)
        if not self.exact:  # else they are kept elsewhere
            check_room(fresh, clients, self.device)
        if self.turns.stacks and not self.exact:
            homes = Homes(fresh, clients)
            self.states, self.together = homes, Together(self.server, self.turns, homes, seed)
        self.number = 0  # rounds that are done
        self.waits = self.device.type != "cuda"  # whether a round may ask for numbers

    def rounds(self) -> Iterator[Round]:
        """From where it stands to the last one, and what observers put off; of who stops before, `state` does that."""
        while self.number < self.terms.rounds:
            yield self._round(self.number + 1)
        self.panel.finish()

    def model(self) -> Params:
        """The server's model as it is now: a state_dict of copies, exactly 0 where the mask drops."""
        return joined(self.net, tree.masked(self.server.weights, self.server.mask) | self.server.buffers)

    def _round(self, number: int) -> Round:
        terms, server, traffic, drawn = self.terms, self.server, self.ledger.traffic, self.sampler(number)
        evaluating = number % terms.evaluate_every == 0 or number == terms.rounds
        own = self.turns.choosing(number) is not None  # whether clients choose masks of their own
        sizing = traffic.due(own, evaluating)
        server.broadcast()
        if sizing:
            traffic.measure_model(server.received, server.model.mask, terms.broadcast == "dense")
        traffic.broadcast(drawn.clients)
        faults = self._faults(number, drawn)
        gather = self._stacked if self.together is not None and even(drawn.rows) else self._one_by_one
        gathered, arrived = gather(number, drawn, faults, sizing, evaluating)
        self.panel.show(number, drawn, faults, arrived, gathered)
        self.ledger.arrive(number, arrived, own)
        server.step(gathered)
        if server.adjust(number, derive(self.seed, "adjust", number)):
            traffic.changed()
        if self.turns.varies:
            traffic.measured = []
        self.number = number
        if not evaluating:
            return Round(number)
        shares = [one.rates for one in arrived if one.rates is not None and one.counts]
        means = [float(torch.stack(each).mean()) for each in zip(*shares, strict=True)]
        withheld = dict(zip(("withheld_of_kept", "withheld_of_all"), means, strict=False))
        judged = self.judge(self.model()) | {"density": server.density} | withheld
        last = number == terms.rounds
        told = self.ledger.measures(number, judged, last) + spent(terms, self.ledger.turns, number, last)
        return Round(number, told)

    def _stacked(
        self, number: int, drawn: Drawn, faults: dict[int, Fault], sizing: bool, evaluating: bool
    ) -> tuple[Gathered, list[Arrived]]:
        """What all clients of the round send, added up in one go; one by one it is looked at where somebody asks."""
        assert self.together is not None
        looked, heard = self.panel.looks(number), [self._heard(number, client, faults) for client in drawn.clients]
        made = self.together(number, drawn, heard, faults)
        asked = looked or sizing or evaluating
        alive = list(made.alive.clone())  # the next round overwrites it
        sizes = [None] * len(alive) if made.sizes is None else list(made.sizes.clone())
        arrived: list[Arrived] = []
        for place in (place for place, there in enumerate(heard) if there):
            one = Arrived(drawn.clients[place], drawn.rows[place], {}, {}, alive[place], sizes[place])
            if asked:
                one = self._shown(one, made.lane(place), looked, sizing and not arrived, evaluating)
            arrived.append(one)
        return made.gathered, arrived

    def _heard(self, number: int, client: int, faults: dict[int, Fault]) -> bool:
        """Whether an update comes in that has the form of the server's weights, as those of a stack have."""
        fault = faults.get(client)
        refused = None if fault in NO_ANSWER else refusal(spoilt(self.server.weights, fault), self.server.weights)
        if refused is not None:
            self.ledger.lose(number, client, refused)
        return fault not in NO_ANSWER and refused is None

    def _one_by_one(
        self, number: int, drawn: Drawn, faults: dict[int, Fault], sizing: bool, evaluating: bool
    ) -> tuple[Gathered, list[Arrived]]:
        """The sum of what arrives in form and is finite; the others are noted as lost."""
        server, waits, looked = self.server, self.waits, self.panel.looks(number)
        gathered = server.gathering(own_masks=self.turns.choosing(number) is not None)
        arrived: list[Arrived] = []
        for client, rows, update in self._updates(number, drawn, faults):
            values = spoilt(update.values, faults.get(client))  # measured is what it had been
            if (fault := refusal(values, server.weights)) is not None:
                self.ledger.lose(number, client, fault)
                continue
            alive: Tensor | None = alive_of(server.numbers(update._replace(values=values)))
            if waits and bool(alive):
                alive = None  # nobody asks again
            if alive is None or not waits:
                server.add(gathered, update, len(self.terms.shares[client]), alive)
                self._keep(client, update.state, alive)
            varies = self.turns.varies or bool(server.squares) or update.own_mask is not None
            size = values_of(update, bool(server.squares)) if varies else None
            one = Arrived(client, rows, {}, {}, alive, size)
            arrived.append(self._shown(one, update, looked, sizing and not arrived, evaluating))
        return gathered, arrived

    def _shown(self, one: Arrived, update: Update, looked: bool, sizing: bool, evaluating: bool) -> Arrived:
        """An update with what is asked of it; else it is let go: a round is a stream."""
        if sizing:
            self.ledger.traffic.measure_update(update, self.server.model.mask)
        if evaluating and (update.withheld or update.rates):
            one = one._replace(rates=update.rates or rates(update.withheld, self.server.mask))
        return one._replace(values=update.values, buffers=update.buffers) if looked else one

    def _faults(self, number: int, drawn: Drawn) -> dict[int, Fault]:
        victims = self.panel.victims(number, drawn.clients)
        found: dict[int, Fault] = {}
        if self.terms.faults.any:
            found = self.terms.faults.draw(drawn.clients, drawn.steps, self.seed, derive(self.seed, "faults", number))
        found |= {client: "tampered" for client in drawn.clients if client in victims and client not in found}
        self.ledger.trained(client for client in drawn.clients if found.get(client) != "dropped")
        for client, fault in found.items():
            if fault in NO_ANSWER:
                self.ledger.lose(number, client, fault)
        return found

    def _updates(self, number: int, drawn: Drawn, faults: dict[int, Fault]) -> Iterator[tuple[int, Rows, Update]]:
        """What comes back from every client that answers, as it comes."""
        places = [i for i, client in enumerate(drawn.clients) if faults.get(client) not in NO_ANSWER]
        given = (self._given(number, drawn.clients[i], drawn.rows[i]) for i in places)
        for i, update in zip(places, self.turns(given, number), strict=True):
            yield drawn.clients[i], drawn.rows[i], update

    def _given(self, number: int, client: int, rows: Rows) -> tuple[Given, Generator]:
        """What a client begins with; its chance is its own, so that it does not depend on who else answers."""
        training, sending = (derive(self.seed, what, number, client) for what in ("noise", "defense"))
        state = self.states[client] if client in self.states else self.turns.init()
        own = [Generator(self.device).manual_seed(each.initial_seed()) for each in (training, sending)]
        return Given(rows, state, *self.turns.draws(rows, *own)), sending

    @torch.no_grad()
    def _keep(self, client: int, state: Params, alive: Tensor | None) -> None:
        """The client's state after its turn; where it went astray the one before."""
        if not state:
            return
        if alive is None:
            self.states[client] = tree.clone(state)
            return
        before = self.states[client] if client in self.states else self.turns.init()
        self.states[client] = {name: torch.where(alive, value, before[name]) for name, value in state.items()}

    def observed(self, number: int) -> bool:
        """Whether somebody looked at a round's updates, and did not put off what is to be done with them."""
        return self.panel.looks(number) and not self.panel.waits

    @property
    def puts_off(self) -> bool:
        """Whether updates wait for others, to be attacked together."""
        return self.panel.waits

    def examples(self, rows: Rows) -> Batch:
        """The examples of all steps in their order."""
        return self.train.take(flat(rows).to(self.device))

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Everything that the next round depends on, for `load`: tensors, and plain values."""
        tensors = {f"server.{name}": value for name, value in self.server.state().items()}
        for client, state in self.states.items():
            tensors |= {f"client.{client}.{name}": value for name, value in state.items()}
        kept, observers = self.panel.state()
        tensors |= {f"observer.{name}": value for name, value in kept.items()}
        data = {"round": self.number, "seed": self.seed, "ledger": self.ledger.state(), "observers": observers}
        return tensors, data

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Go on from what `state` gave, in a federation of the same terms, data and seed."""
        own = {name.removeprefix("server."): v for name, v in tensors.items() if name.startswith("server.")}
        if data["seed"] != self.seed or own.keys() != self.server.state().keys():
            raise WrongInput("state", "is of another federation; give what one of these terms and this seed kept")
        self.server.load(own)
        seen = {n.removeprefix("observer."): v.to(self.device) for n, v in tensors.items() if n.startswith("observer.")}
        self.panel.load(seen, data["observers"])
        kept: dict[int, Params] = {}
        for name, value in tensors.items():
            if name.startswith("client."):
                _, client, key = name.split(".", 2)
                kept.setdefault(int(client), {})[key] = value
        self.states.clear()
        for number, state in kept.items():  # one at a time: together they may fill a GPU
            self.states[number] = tree.to(state, self.device)
        self.number = data["round"]
        self.ledger.load(data["ledger"])
