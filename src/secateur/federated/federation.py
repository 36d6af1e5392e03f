"""Federated rounds: sample, broadcast, train, send, average, adjust (PriPrune Algorithm 1 around any rule).

Read `Federation.run_round` first. Random draws depend on the seed and the round's number alone. So a federation can
stop between any two rounds and go on with the same numbers. On a GPU a round reads nothing back from the device. Lost
clients and the counts of sent values are read at an evaluation or a checkpoint.

BatchNorm's running statistics are sent with the weights, in the clear, and averaged as they are. A client that never
answered has not taken its turn. A client whose numbers are not finite counts as lost, and keeps its earlier state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.defenses.withholding import rates
from secateur.errors import NotFinite
from secateur.federated.attacks.observer import Arrived, Observer, RoundObservers
from secateur.federated.averaging import alive_of
from secateur.federated.checkpoint import Resumable, check_state
from secateur.federated.client_training import Rows, are_even
from secateur.federated.client_turn import ClientTurn, ClientUpdate, flatten_rows
from secateur.federated.faults import NO_ANSWER, Fault, apply_fault, refusal
from secateur.federated.sampling import SampledClients, sampler_of
from secateur.federated.server import RoundSums, Server
from secateur.federated.spec import FederationSpec
from secateur.federated.stacked_rounds import ClientStateBank, Room, StackedRounds, room_for
from secateur.federated.state_file import ClientStateFile
from secateur.federated.traffic import Ledger, Round, measure_epsilon, squares_of, values_of
from secateur.functional import join_state
from secateur.gpu.memory import let_go, ran_out
from secateur.inference import logits
from secateur.interfaces import Batch, Loss, Params
from secateur.models.create import check
from secateur.seeding import derive

log = logging.getLogger(__name__)


class Federation(Resumable):
    """A federation whose clients train the whole model."""

    terms: FederationSpec
    exact = False  # True: updates are added in float64, as clients answer in any order

    def __init__(
        self,
        net: nn.Module,
        data: Dataset,
        terms: FederationSpec,
        seed: int,
        device: torch.device | str = "cpu",
        *,
        observers: Sequence[Observer] = (),
        execution: str = "auto",
    ) -> None:
        check(net, data.input_shape, data.classes)
        self.net, self.terms, self.seed, self.device = net, terms, seed, torch.device(device)
        self.panel = RoundObservers(observers, self)
        inputs, labels = data.batch.to(self.device)
        self.train = Batch(inputs[: data.train_size], labels[: data.train_size])
        self.server = Server(net, terms, self.train, derive(seed, "base"), self.device, self.exact)
        self.judge = ServerEvaluation(
            net, Batch(inputs[data.train_size :], labels[data.train_size :]), terms.local.loss
        )
        self.sampler = sampler_of(terms, seed, self.device)
        self.turns = ClientTurn(net, terms, self.server, self.train, execution)
        self.ledger = Ledger(self.server.base.wants_squares)
        self.states: MutableMapping[int, Params] = {}  # by client, of those sampled so far; hidden from the server
        self.together: StackedRounds | None = None
        fresh, clients = self.turns.init(), terms.sampled_clients
        self.room: Room | None = None  # None: the clients keep their states elsewhere
        if not self.exact:
            self.room = room_for(fresh, clients, self.device)
        if self.room is not None and self.room.on_disk:
            self.states = ClientStateFile(fresh)
        elif self.turns.stacks and self.room is not None:
            homes = ClientStateBank(fresh, clients, self.room.on_host)
            self.states, self.together = homes, StackedRounds(self.server, self.turns, homes, seed)
        self.waits = self.device.type != "cuda"  # True: a round may read numbers from the device

    def rounds(self) -> Iterator[Round]:
        """Yield the remaining rounds, then finish the attacks that observers postponed.

        A caller that stops earlier calls `state`, which finishes them too.
        """
        yield from super().rounds()
        self.panel.finish()

    def model(self) -> Params:
        """Return the server's model as it is now: a state_dict of copies, exactly 0 where the mask drops."""
        return join_state(self.net, tree.mask_tree(self.server.weights, self.server.mask) | self.server.buffers)

    def examples(self, rows: Rows) -> Batch:
        """Return the examples of all steps in their order."""
        return self.train.take(flatten_rows(rows).to(self.device))

    def was_observed(self, number: int) -> bool:
        """Return True if an observer looks at the round's updates and does not postpone its attack."""
        return bool(self.panel.select_observers(number)) and not self.panel.waits

    @property
    def puts_off(self) -> bool:
        """True if updates are kept, to be attacked together later."""
        return self.panel.waits

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next round depends on, for `load`: tensors, and plain values."""
        kept, observers = self.panel.state()
        data = {"round": self.number, "seed": self.seed, "ledger": self.ledger.state(), "observers": observers}
        states: Params = {}
        if isinstance(self.states, ClientStateFile):
            data["slots"] = self.states.mark()
        else:
            states = tree.nest(self.states)
        return tree.nest({"server": self.server.state(), "client": states, "observer": kept}), data

    def place_states(self, path: Path) -> None:
        """Keep the file of clients' states, if there is one, at this path."""
        if isinstance(self.states, ClientStateFile):
            self.states.place(path)

    def note_saved(self) -> None:
        """Let go of the states of earlier checkpoints."""
        if isinstance(self.states, ClientStateFile):
            self.states.save()

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`, in a federation of the same specification, data and seed."""
        server = tree.part(tensors, "server")
        check_state(data["seed"] == self.seed and server.keys() == self.server.state().keys())
        self.server.load(server)
        self.panel.load(tree.to(tree.part(tensors, "observer"), self.device), data["observers"])
        if isinstance(self.states, ClientStateFile):
            self.states.restore(data.get("slots", {}))
        else:
            check_state("slots" not in data)
            self.states.clear()
        for client, state in tree.parts(tree.part(tensors, "client")).items():  # one at a time: all may fill a GPU
            self.states[int(client)] = tree.to(state, self._states_device)
        self.number = data["round"]
        self.ledger.load(data["ledger"])

    def run_round(self, number: int) -> Round:
        """Run one round: sample, broadcast, train, send, average, adjust."""
        terms, server, traffic, drawn = self.terms, self.server, self.ledger.traffic, self.sampler(number)
        evaluating = number % terms.evaluate_every == 0 or number == terms.rounds
        own_masks = self.turns.choice_of_masks(number) is not None  # True: clients choose their own masks
        sizing = traffic.due(own_masks, evaluating)
        server.broadcast()
        if sizing:
            traffic.measure_model(server.received, server.model.mask, terms.broadcast == "dense")
        traffic.broadcast(drawn.clients)
        faults = self._faults(number, drawn)
        gather = self._run_stacked if self.together is not None and are_even(drawn.rows) else self._run_one_by_one
        gathered, arrived = gather(number, drawn, faults, sizing, evaluating)
        self.panel.show(number, drawn, faults, arrived, gathered)
        self.ledger.arrive(number, arrived, own_masks)
        server.step(gathered)
        if server.adjust(number, derive(self.seed, "adjust", number)):
            traffic.note_change()
        if self.turns.varies:
            traffic.measured = []
        self.number = number
        if not evaluating:
            return Round(number)
        shares = [arrival.rates for arrival in arrived if arrival.rates is not None and arrival.counts]
        mean_rates = [float(torch.stack(rates_of_kind).mean()) for rates_of_kind in zip(*shares, strict=True)]
        withheld = dict(zip(("withheld_of_kept", "withheld_of_all"), mean_rates, strict=False))
        judged = self.judge(self.model()) | {"density": server.density} | withheld
        last = number == terms.rounds
        measures = self.ledger.measures(number, judged, last) + measure_epsilon(
            terms, self.ledger.turns, number, last, self.ledger.least
        )
        return Round(number, measures)

    def _faults(self, number: int, drawn: SampledClients) -> dict[int, Fault]:
        victims = self.panel.victims(number, drawn.clients)
        faults = self.terms.faults.draw(drawn.clients, drawn.steps, self.seed, derive(self.seed, "faults", number))
        faults |= {client: "tampered" for client in drawn.clients if client in victims and client not in faults}
        self.ledger.record_trained(client for client in drawn.clients if faults.get(client) != "dropped")
        for client, fault in faults.items():
            if fault in NO_ANSWER:
                self.ledger.lose(number, client, fault)
        return faults

    def _run_stacked(
        self, number: int, drawn: SampledClients, faults: dict[int, Fault], sizing: bool, evaluating: bool
    ) -> tuple[RoundSums, list[Arrived]]:
        """Return the sum of all updates of the round, trained as one stack; single updates are read where needed."""
        assert self.together is not None
        looked = bool(self.panel.select_observers(number))
        answers = [self._answers(number, client, faults) for client in drawn.clients]
        before: Params = {}
        try:
            before = tree.clone(self.server.squares)  # memory may run out when some of them are added
            stacked = self.together(number, drawn, answers, faults)
        except Exception as error:
            if not ran_out(error):
                raise
            stacked = None
        if stacked is None:  # only here, after the error is released, are the tensors of the stack free
            self._make_room(len(drawn.clients))
            for name, value in before.items():
                self.server.squares[name].copy_(value)
            noted: dict[int, Fault] = {c: "dropped" for c, x in zip(drawn.clients, answers, strict=True) if not x}
            return self._run_one_by_one(number, drawn, faults | noted, sizing, evaluating)
        needed = looked or sizing or evaluating
        alive = list(stacked.alive.clone())  # a copy: the next round overwrites it
        sizes = [None] * len(alive) if stacked.sizes is None else list(stacked.sizes.clone())
        arrived: list[Arrived] = []
        for lane in (lane for lane, answered in enumerate(answers) if answered):
            arrival = Arrived(drawn.clients[lane], drawn.rows[lane], {}, {}, alive[lane], sizes[lane])
            if needed:
                arrival = self._strip_arrival(arrival, stacked.lane(lane), looked, sizing and not arrived, evaluating)
            arrived.append(arrival)
        return stacked.gathered, arrived

    def _make_room(self, clients: int) -> None:
        """Let go of the stack after memory ran out: clients train one by one, and the host holds their states."""
        assert self.together is not None and self.room is not None
        homes, self.room = self.together.homes, self.room.relieve()
        log.warning("memory ran out with %d clients at once; going on with one at a time", clients)
        self.together, self.turns = None, ClientTurn(self.net, self.terms, self.server, self.train, "sequential")
        if self.room.on_host and not homes.on_host:
            homes.move_to_host()
            log.warning("moved to the host: %s", self.room)
        let_go(self.device)

    def _answers(self, number: int, client: int, faults: dict[int, Fault]) -> bool:
        """Return True if the client answers with an update in the form of the server's weights; else note the loss."""
        fault = faults.get(client)
        refused = None if fault in NO_ANSWER else refusal(apply_fault(self.server.weights, fault), self.server.weights)
        if refused is not None:
            self.ledger.lose(number, client, refused)
        return fault not in NO_ANSWER and refused is None

    def _run_one_by_one(
        self, number: int, drawn: SampledClients, faults: dict[int, Fault], sizing: bool, evaluating: bool
    ) -> tuple[RoundSums, list[Arrived]]:
        """Return the sum of the updates that have the right form and are finite; note the others as lost."""
        server, waits, looked = self.server, self.waits, bool(self.panel.select_observers(number))
        gathered = server.begin_sums(own_masks=self.turns.choice_of_masks(number) is not None)
        arrived: list[Arrived] = []
        for client, rows, update in self._updates(number, drawn, faults):
            values = apply_fault(update.values, faults.get(client))  # traffic is measured before the fault
            if (fault := refusal(values, server.weights)) is not None:
                self.ledger.lose(number, client, fault)
                continue
            alive: Tensor | None = alive_of(server.numbers(update._replace(values=values)))
            if waits and bool(alive):
                alive = None  # checked: not read again
            if alive is None or not waits:
                server.add(gathered, update, len(self.terms.shares[client]), alive)
                self._keep(client, update.state, alive)
            varies = self.turns.varies or bool(server.squares) or update.own_mask is not None
            size = values_of(update, bool(server.squares)) if varies else None
            arrival = Arrived(client, rows, {}, {}, alive, size)
            arrived.append(self._strip_arrival(arrival, update, looked, sizing and not arrived, evaluating))
        return gathered, arrived

    def _updates(
        self, number: int, drawn: SampledClients, faults: dict[int, Fault]
    ) -> Iterator[tuple[int, Rows, ClientUpdate]]:
        """Yield (client, rows, update) of every client that answers, in the order of arrival."""
        sampled = zip(drawn.clients, drawn.rows, strict=True)
        asked = [(client, rows) for client, rows in sampled if faults.get(client) not in NO_ANSWER]
        starts = (self.turns.inputs(self.seed, number, client, rows, self._state_of(client)) for client, rows in asked)
        for (client, rows), update in zip(asked, self.turns(starts, number), strict=True):
            yield client, rows, update

    @torch.no_grad()
    def _keep(self, client: int, state: Params, alive: Tensor | None) -> None:
        """Keep the client's state after its turn; where the update is not finite (`alive` false), the state before."""
        if not state:
            return
        if alive is None:
            self.states[client] = tree.to(tree.clone(state), self._states_device)
            return
        before = self._state_of(client)
        kept = {name: torch.where(alive, value, before[name]) for name, value in state.items()}
        self.states[client] = tree.to(kept, self._states_device)

    def _state_of(self, client: int) -> Params:
        """Return a client's state on the federation's device."""
        return tree.to(self.states[client], self.device) if client in self.states else self.turns.init()

    @property
    def _states_device(self) -> torch.device:
        on_cpu = self.room is not None and (self.room.on_host or self.room.on_disk)
        return torch.device("cpu") if on_cpu else self.device

    def _strip_arrival(
        self, arrival: Arrived, update: ClientUpdate, looked: bool, sizing: bool, evaluating: bool
    ) -> Arrived:
        """Return the arrival with the numbers that are asked for; all others are let go, as a round is a stream."""
        if sizing:
            self.ledger.traffic.measure_update(update, self.server.model.mask)
        if evaluating and (update.withheld or update.rates):
            arrival = arrival._replace(rates=update.rates or rates(update.withheld, self.server.mask))
        if not looked:
            return arrival
        squares = squares_of(update) if self.server.squares else None
        return arrival._replace(values=update.values, buffers=update.buffers, squares=squares)


class ServerEvaluation:
    """Accuracy and loss of the server's model on the test part, which no client has."""

    def __init__(self, net: nn.Module, test: Batch, loss: Loss) -> None:
        self.net, self.test, self.loss = net, test, loss
        self.dtype = next(net.parameters()).dtype

    def __call__(self, state: Params) -> dict[str, float]:
        """Return the loss and the accuracy of one model; {} where there is no test part.

        A model whose weights or outputs are not finite has accuracy 0 and no loss.
        """
        if not self.test.size:
            return {}
        if not all(bool(value.isfinite().all()) for value in state.values()):
            return {"test_accuracy": 0.0}
        try:
            outputs = logits(self.net, state, self.test.inputs.to(self.dtype))
        except NotFinite:  # finite weights may still overflow; a federation that diverged goes on
            return {"test_accuracy": 0.0}
        right = (outputs.argmax(1) == self.test.labels).double().mean()
        return {"test_loss": float(self.loss(outputs, self.test.labels)), "test_accuracy": float(right)}
