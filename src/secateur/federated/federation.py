"""Rounds of a federation: sample, broadcast, train, send, average, adjust (PriPrune Algorithm 1 around any rule).

Read `Federation._round` first. Chance depends on the seed and the round's number alone, so that a federation can be put
down between any two rounds and goes on with the same numbers. On a GPU a round asks the device for nothing: who sent
NaN and how many values were sent is read when somebody evaluates or saves.

BatchNorm's running statistics are sent with the weights, in the clear, and averaged as they are. A client that never
answered has not taken its turn. One whose numbers are not finite counts as lost, and its state stays what it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.chance import derive
from secateur.data.dataset import Dataset
from secateur.defenses.withholding import Rates, rates
from secateur.errors import WrongInput
from secateur.federated.averaging import Average, alive_of
from secateur.federated.crowd import Crowd, Given
from secateur.federated.faults import NO_ANSWER, Fault, refusal, spoilt
from secateur.federated.judge import Judge
from secateur.federated.ledger import Ledger, Measure
from secateur.federated.observing import Arrived, Observer, Panel, flat
from secateur.federated.sampling import Drawn, sampler_of
from secateur.federated.server import Server
from secateur.federated.spending import spent
from secateur.federated.terms import Terms
from secateur.federated.traffic import value_bytes
from secateur.federated.turns import Rows, Turns, Update
from secateur.functional import joined
from secateur.interfaces import Batch, Params
from secateur.models.create import check


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
        self.crowd = Crowd(net, self.train, self.server.model, terms.local, terms.own, way)
        self.sampler = sampler_of(terms, seed, self.device)
        self.turns = Turns(net, terms, self.server, self.examples)
        self.ledger = Ledger(len(terms.shares), self.server.base.wants_squares)
        self.states: dict[int, Params] = {}  # of clients that have been sampled; never the server's to see
        self.number = 0  # rounds that are done
        self.waits = self.device.type != "cuda"  # whether a round may ask for numbers

    def rounds(self) -> Iterator[Round]:
        """From where it stands to the last one."""
        while self.number < self.terms.rounds:
            yield self._round(self.number + 1)

    def model(self) -> Params:
        """The server's model as it is now: a state_dict of copies, exactly 0 where the mask drops."""
        return joined(self.net, tree.masked(self.server.weights, self.server.mask) | self.server.buffers)

    def _round(self, number: int) -> Round:
        terms, server, traffic, drawn = self.terms, self.server, self.ledger.traffic, self.sampler(number)
        evaluating = number % terms.evaluate_every == 0 or number == terms.rounds
        sizing = number == 1 or (evaluating and not traffic.fresh)
        server.broadcast()
        if sizing:
            traffic.measure_model(server.received, server.model.mask, terms.broadcast == "dense")
        traffic.broadcast(drawn.clients)
        average, withheld = self._gathered(number, drawn, sizing, evaluating)
        server.step(average)
        if server.adjust(number, derive(self.seed, "adjust", number)):
            traffic.changed()
        if self.turns.varies:
            traffic.fresh = False
        self.number = number
        if not evaluating:
            return Round(number)
        judged = self.judge(self.model()) | {"density": server.density} | withheld
        last = number == terms.rounds
        told = self.ledger.measures(number, judged, last) + spent(terms, self.ledger.turns, number, last)
        return Round(number, told)

    def _gathered(self, number: int, drawn: Drawn, sizing: bool, evaluating: bool) -> tuple[Average, dict[str, float]]:
        """The average of what arrives whole, the others are noted as lost; and, to evaluate, how much was withheld."""
        terms, server, faults = self.terms, self.server, self._faults(number, drawn)
        average = server.average(own_masks=self.turns.choosing(number, self.seed) is not None)
        waits, looked = self.waits, self.panel.looks(number)
        arrived: list[Arrived] = []
        alive: list[Tensor] = []
        sizes: list[Tensor] = []
        shares: list[Rates] = []
        for client, rows, update in self._updates(number, drawn, faults):
            values = spoilt(update.values, faults.get(client))
            if (fault := refusal(values, server.weights)) is not None:
                self.ledger.lose(number, client, fault)
                continue
            whole = values | update.buffers
            fine = alive_of(whole)
            if server.squares and update.summed:  # dense, so of what is withheld or pruned too
                fine = fine & alive_of(update.summed)
            if waits and not bool(fine):
                self.ledger.lose(number, client, "nan")
                continue
            server.add(average, values, update, len(terms.shares[client]), None if waits else fine)
            self._keep(client, update.state, None if waits else fine)
            if sizing and not arrived:
                inside = {} if update.own_mask is not None else server.model.mask
                self.ledger.traffic.measure_update(whole, server.weights, inside)
            held = (values, update.buffers) if looked else ({}, {})  # else it is let go: a round is a stream
            arrived.append(Arrived(client, rows, *held))
            alive += [] if waits else [fine]
            sizes += [value_bytes(whole)] if self.turns.varies else []
            if evaluating and (update.withheld or update.rates):
                shares.append(update.rates or rates(update.withheld, server.mask))
        self.panel.show(number, drawn, faults, arrived, average)
        self.ledger.arrive(number, [one.client for one in arrived], alive, sizes if self.turns.varies else None)
        means = [float(torch.stack(each).mean()) for each in zip(*shares, strict=True)]
        return average, dict(zip(("withheld_of_kept", "withheld_of_all"), means, strict=False))

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
        given = self._given(number, drawn)
        # In a graph of fixed shapes the silent train too, and are not heard.
        heard = [self.crowd.stacks or faults.get(client) not in NO_ANSWER for client in drawn.clients]
        asked = [one for one, there in zip(given, heard, strict=True) if there]
        clients = [client for client, there in zip(drawn.clients, heard, strict=True) if there]
        choose = self.turns.choosing(number, self.seed)
        self.crowd.summing = self.turns.sums
        plain = ((made, None) for made in self.crowd(asked))
        turned = plain if choose is None else self.crowd.readjusted(asked, choose)
        for client, one, (made, mask) in zip(clients, asked, turned, strict=True):
            if faults.get(client) not in NO_ANSWER:
                rng = derive(self.seed, "defense", number, client)
                yield client, one.rows, self.turns.update(made, mask, one, number, rng)

    def _given(self, number: int, drawn: Drawn) -> list[Given]:
        """What each client begins with; chance is drawn for all, so that it does not depend on who answers."""
        own, found = self.terms.own, []
        for client, rows in zip(drawn.clients, drawn.rows, strict=True):
            state = self.states[client] if client in self.states else self.turns.init()
            rng = Generator(self.device).manual_seed(derive(self.seed, "noise", number, client).initial_seed())
            chance = {} if own is None else own.noise(self.server.weights, len(rows), rng)
            noise = self.crowd.noise(rows, rng) if own is None else []
            found.append(Given(rows, self.turns.start(state), state, noise, chance))
        return found

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
        """Whether somebody looks at a round's updates."""
        return self.panel.looks(number)

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
        kept = {n.removeprefix("observer."): v.to(self.device) for n, v in tensors.items() if n.startswith("observer.")}
        self.panel.load(kept, data["observers"])
        self.states = {}
        for name, value in tensors.items():
            if name.startswith("client."):
                _, client, key = name.split(".", 2)
                self.states.setdefault(int(client), {})[key] = value.to(self.device)
        self.number = data["round"]
        self.ledger.load(data["ledger"])
