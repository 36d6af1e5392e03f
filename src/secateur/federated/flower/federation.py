"""Federations over Flower's Grid: the rounds of `Federation`, with clients in other processes or on other machines.

Bytes are counted on the messages themselves. An answer may hold anything: it is checked before it is averaged.
In a sub-model federation every client receives only its channels, and returns them trained.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from torch import Tensor, nn

from secateur import tree
from secateur.data.dataset import Dataset
from secateur.defenses.withholding import Rates
from secateur.errors import WrongInput
from secateur.federated.client_training import Rows
from secateur.federated.client_turn import ClientUpdate
from secateur.federated.faults import NO_ANSWER, Fault, Refused, read_update
from secateur.federated.federation import Federation
from secateur.federated.flower.client import (
    KnownPanel,
    apply_reported_sizes,
    describe_data,
    load_state,
    reset_if_other,
    save_state,
)
from secateur.federated.flower.link import SLACK, Link, pack, size_of, unpack
from secateur.federated.sampling import SampledClients
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels.clients import SubmodelSent, SubmodelTurn
from secateur.federated.submodels.federation import SubmodelFederation, Turn
from secateur.federated.submodels.structure import SubmodelIndex, flat_of, params_of
from secateur.federated.traffic import Ledger, Measure, Round, Traffic
from secateur.interfaces import Mask, Params
from secateur.wire import decode, decode_mask, encode, encode_mask

log = logging.getLogger(__name__)

OWN = "it trains on data of its own, of which the server has nothing: its updates are averaged, and not attacked"


class OverLink:
    """A federation whose clients answer over a Link and keep their own states: mixed into a class of federations.

    Each message names the client's last turn that the server took. So a client whose update was refused or late goes on
    from its state before that turn.
    """

    exact = True

    def connect(self, link: Link, task: str, clients: int, keeps: bool) -> None:
        """Use a link to so many clients; `keeps`: they have a state between rounds."""
        self.link, self.task, link.clients = link, task, clients
        self.key = hashlib.sha256(task.encode()).hexdigest()
        self.taken: dict[int, int] = {}  # by client: the round of the last turn that the server took
        if link.deployed:
            self.every: float | None = 0.0
        elif keeps:
            self.every = math.inf  # the states of virtual clients are lost with the process

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything of the server; clients keep their own states."""
        tensors, data = super().state()  # type: ignore[misc]
        return tensors, data | {"taken": {str(client): number for client, number in self.taken.items()}}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`."""
        super().load(tensors, data)  # type: ignore[misc]
        self.taken = {int(client): number for client, number in data["taken"].items()}


class FlowerFederation(OverLink, Federation):
    """A federation over a Link.

    Updates are added in float64 as they arrive, and let go, so the server holds a few at a time. The order of arrival
    changes nothing that float32 shows.
    """

    def __init__(self, link: Link, task: str, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.connect(link, task, len(self.terms.shares), keeps=bool(self.turns.init()))
        self.waits = True  # on a GPU too an update is checked before the next message calls it taken
        self.ledger = Ledger(self.server.base.wants_squares)
        self.ledger.traffic = Counted(self.server.base.wants_squares)
        self.panel = KnownPanel(self.panel.observers, self, link.examples)
        self.said = describe_data(arguments[1], link.clients)
        self._shares = self.terms.shares  # shares of the server's own data
        whole = [*self.server.weights.values(), *self.server.buffers.values()]
        self._dense = sum(value.numel() * value.element_size() for value in whole)

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`; clients may have lost their masks."""
        super().load(tensors, data)
        self.ledger.traffic.known.clear()

    def run_round(self, number: int) -> Round:
        """Run a round with the clients that are online and the numbers of examples that they report."""
        self.link.greet_nodes()
        sizes = self.link.examples  # of clients with data of their own
        self.terms = replace(self.terms, shares=apply_reported_sizes(self._shares, sizes))
        done = super().run_round(number)
        if number < self.terms.rounds:
            return done
        measures = [Measure("own_examples", size, number, client, note=OWN) for client, size in sorted(sizes.items())]
        return replace(done, measures=done.measures + measures)

    def _updates(
        self, number: int, drawn: SampledClients, faults: dict[int, Fault]
    ) -> Iterator[tuple[int, Rows, ClientUpdate]]:
        """Yield (client, rows, update) of every client that answers before the deadline, in the order of arrival."""
        rows = dict(zip(drawn.clients, drawn.rows, strict=True))
        asked = [client for client in drawn.clients if faults.get(client) not in NO_ANSWER]
        own_masks = self.turns.choice_of_masks(number) is not None  # True: clients choose their own masks
        for client, answer in self.link.ask(MessageType.TRAIN, self._questions(number, asked)):
            try:
                update = self._read(answer, client, own_masks)
            except Refused as refused:
                self.ledger.lose(number, client, refused.fault)
                self.ledger.traffic.known.pop(client, None)  # the client may have lost its mask
                continue
            yield client, rows[client], update

    def _questions(self, number: int, clients: list[int]) -> Iterator[tuple[int, RecordDict]]:
        """Yield a message for each client: the same model for all, with the mask as bits where a client lacks it."""
        server, traffic = self.server, self.ledger.traffic
        mask = server.model.mask
        inside = bool(mask) and self.terms.broadcast != "dense"
        model = pack(model=encode(server.received, inside=mask if inside else None))
        with_mask = ArrayRecord({**model, **pack(mask=encode_mask(mask))}) if mask else model
        for client in clients:
            outdated = bool(mask) and traffic.known.get(client) != traffic.version
            record = with_mask if outdated else model
            traffic.known[client] = traffic.version
            traffic.down[client] += size_of(record)
            turn: dict[str, Any] = {"round": number, "client": client, "taken": self.taken.get(client, 0)}
            turn |= {"inside": inside, "version": traffic.version if mask else -1}
            turn |= {"key": self.key, "task": self.task, "said": self.said}
            yield client, RecordDict({"model": record, "turn": ConfigRecord(turn)})

    def _read(self, answer: RecordDict | Fault, client: int, own_masks: bool) -> ClientUpdate:
        """Return the update out of an answer; nothing in the answer is trusted."""
        if isinstance(answer, str):
            raise Refused(answer)
        with refusing(client):
            update = self._decode(answer.array_records["update"], client, own_masks)
            withheld = answer.metric_records.get("withheld")
            if not withheld:
                return update
            shares = [torch.tensor(float(str(withheld[name])), dtype=torch.float64) for name in Rates._fields]
            if not all(bool(share.isfinite()) for share in shares):
                raise Refused("damaged", "a withheld share is not finite")
            return update._replace(rates=Rates(*shares))

    def _decode(self, record: ArrayRecord, client: int, own_masks: bool) -> ClientUpdate:
        """Return the update out of a record; of its gradients the squares alone are known, so no sign is right."""
        size, server = size_of(record), self.server
        self.ledger.traffic.up[client] += size
        if size > (2 if server.squares else 1) * self._dense + self._dense // 8 + SLACK:
            raise Refused("size")
        messages, mask = unpack(record), server.model.mask
        values = self._tensors(messages.get("values", b""), server.weights, mask if mask and not own_masks else None)
        buffers = self._tensors(messages["buffers"], server.buffers) if "buffers" in messages else {}
        squares = self._tensors(messages.get("squares", b""), server.weights) if server.squares else {}
        chosen = self._mask(messages, "mask", mask) if own_masks else None
        if chosen is not None and chosen.keys() != mask.keys():
            raise Refused("damaged")
        sent = self._mask(messages, "sent", chosen or mask) if self.terms.counts_sent else None
        summed = {name: value.sqrt() for name, value in squares.items()}
        return ClientUpdate(values, buffers, sent, chosen, summed, {}, {})

    def _tensors(self, data: bytes, like: Params, inside: Mask | None = None) -> Params:
        """Return the tensors of a message, which must have the shapes and precision of `like`."""
        return tree.to(read_update(data, like, inside), self.device)

    def _mask(self, messages: Mapping[str, bytes], name: str, usual: Mask) -> Mask:
        """Return the mask of a message, or `usual` where the message has none."""
        if name not in messages:
            return dict(usual)
        return tree.to(decode_mask(messages[name], _shapes(self.server.weights)), self.device)

    def _keep(self, client: int, state: Params, alive: Tensor | None) -> None:
        """Note that the server took this client's turn."""
        self.taken[client] = self.number + 1


class Counted(Traffic):
    """Traffic counted on the messages themselves instead of estimated."""

    def due(self, own_masks: bool, evaluating: bool) -> bool:
        """Return False: no size is estimated."""
        return False

    def broadcast(self, clients: Sequence[int]) -> None:
        """Do nothing: each message is counted where it is built."""

    def upload(self, clients: list[int], values: list[Tensor] | None, own_masks: bool) -> None:
        """Do nothing: each message is counted where it is decoded."""


@contextmanager
def refusing(client: int) -> Iterator[None]:
    """Turn any error in a message into `Refused` with the fault that a row names, and log the reason."""
    try:
        yield
    except Refused as refused:
        log.warning("ignoring the update of client %s (%s)", client, refused)
        raise
    except (KeyError, ValueError):
        raise Refused("damaged") from None
    except WrongInput as error:
        log.warning("ignoring the update of client %s (%s)", client, error)
        raise Refused("shape" if "shape" in error.message else "damaged") from error


def _shapes(tensors: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


class NarrowClients:
    """The clients' side: a federation that knows only the channels of one client, and only while that client trains."""

    def __init__(self, net: nn.Module, data: Dataset, terms: SubmodelSpec, seed: int, device: torch.device) -> None:
        self.federation = SubmodelFederation(net, data, terms, seed, device, execution="sequential")

    def answer(self, content: RecordDict, home: RecordDict) -> RecordDict:
        """Return a client's answer to a message, and update the client's state in its context, `home`."""
        request, fed = content.config_records["turn"], self.federation
        number, client, taken = (int(str(request[name])) for name in ("round", "client", "taken"))
        reset_if_other(home, str(request["key"]))
        cut = fed.broadcast(number, client).cut
        dtypes = dict.fromkeys(cut.shapes, fed.flat.dtype)
        received = decode(unpack(content.array_records["model"])["model"], cut.shapes, dtypes=dtypes)
        fed.flat = torch.zeros_like(fed.flat).index_copy(0, cut.index.to(fed.device), flat_of(received).to(fed.flat))
        state = load_state(home, taken, fed.device)
        fed.states = {} if state is None else {client: state}
        turn = fed.broadcast(number, client)
        (trained,) = fed.trainer([fed._job(number, turn)])
        sent = fed._upload(number, turn, trained)
        if sent.state:
            save_state(home, number, sent.state)
        values = params_of(sent.flat, cut.shapes) if sent.message is None else sent.message
        messages = {"values": encode(values)}
        if sent.covered is not None:
            messages["sent"] = encode_mask(params_of(sent.covered > 0, cut.shapes))
        return RecordDict({"update": pack(**messages)})


class FlowerSubmodels(OverLink, SubmodelFederation):
    """A sub-model federation over a Link."""

    def __init__(self, link: Link, task: str, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.terms.rule.alone:
            raise WrongInput("submodels", "local sends nothing over flower; use engine here")
        self.connect(link, task, len(self.terms.shares), keeps=self.sender.keeps)

    def run_round(self, number: int) -> Round:
        """Run one round with the clients behind the link."""
        self.begin(number)
        return self._average(number, self._answers(number))

    def _job(self, number: int, turn: Turn) -> SubmodelTurn:
        """Return an empty job, because the server does not train."""
        return SubmodelTurn("", turn.received, [], torch.Generator(), None)

    def _answers(self, number: int) -> Iterator[tuple[Turn, SubmodelSent]]:
        turns = {turn.client: turn for turn in self._turns}
        self.link.greet_nodes()
        for client, answer in self.link.ask(MessageType.TRAIN, self._questions(number, list(turns.values()))):
            try:
                yield turns[client], self._read(answer, turns[client])
            except Refused as refused:
                self.ledger.lose(number, client, refused.fault)

    def _questions(self, number: int, turns: list[Turn]) -> Iterator[tuple[int, RecordDict]]:
        for turn in turns:
            model = pack(model=encode(params_of(turn.received, turn.cut.shapes)))
            request: dict[str, Any] = {"round": number, "client": turn.client, "taken": self.taken.get(turn.client, 0)}
            request |= {"key": self.key, "task": self.task}
            yield turn.client, RecordDict({"model": model, "turn": ConfigRecord(request)})

    def _read(self, answer: RecordDict | Fault, turn: Turn) -> SubmodelSent:
        """Decode and check a client's answer, which is not trusted; raise Refused for a fault."""
        if isinstance(answer, str):
            raise Refused(answer)
        with refusing(turn.client):
            record, cut = answer.array_records["update"], turn.cut
            if size_of(record) > 2 * turn.received.nbytes + SLACK:
                raise Refused("size")
            messages = unpack(record)
            values = read_update(messages.get("values", b""), params_of(turn.received, cut.shapes))
            return self._build_upload(turn, tree.to(values, self.device), self._decode_covered(messages, cut))

    def _decode_covered(self, messages: dict[str, bytes], cut: SubmodelIndex) -> Tensor | None:
        if self.terms.withholding is None:
            return None
        sent = decode_mask(messages.get("sent", b""), cut.shapes)
        cells = {name: torch.ones(shape, dtype=torch.bool) for name, shape in cut.shapes.items()} | sent
        return flat_of(cells).to(self.flat)

    def _build_upload(self, turn: Turn, values: Params, covered: Tensor | None) -> SubmodelSent:
        if self.terms.upload is None:
            return SubmodelSent(flat_of(values), covered, None if covered is None else values, {})
        rate = self.terms.local.learning_rate
        return SubmodelSent(turn.received - rate * flat_of(values), None, values, {})

    def _keep(self, client: int, state: Params) -> None:
        """Record that the server accepted this client's turn; the client itself keeps the state."""
        self.taken[client] = self.number + 1
