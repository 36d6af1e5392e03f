"""Our federations over Flower's Grid: the same rounds, with clients that are other processes on other machines.

The bytes of a federation over Flower.
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
from torch import Tensor

from secateur import tree
from secateur.defenses.withholding import Rates
from secateur.errors import WrongInput
from secateur.federated.averaging import alive_of
from secateur.federated.client_training import Rows
from secateur.federated.client_turn import Update
from secateur.federated.faults import NO_ANSWER, Fault
from secateur.federated.federation import Federation, Round
from secateur.federated.flower.link import Link, packed, size_of, unpacked
from secateur.federated.flower.node_data import KnownPanel, believed, said_of
from secateur.federated.sampling import Drawn
from secateur.federated.traffic import Ledger, Measure, Traffic
from secateur.interfaces import Mask, Params
from secateur.wire import decode, decode_mask, encode, encode_mask

log = logging.getLogger(__name__)

OWN = "it trains on data of its own, of which the server has nothing: its updates are averaged, and not attacked"
SLACK = 1 << 16  # bytes that an update may have beyond all of its values: tables and positions


class Counted(Traffic):
    """Bytes as they are in the messages, not as they are estimated."""

    def due(self, own_masks: bool, evaluating: bool) -> bool:
        """There is nothing to estimate."""
        return False

    def broadcast(self, clients: Sequence[int]) -> None:
        """Counted message by message."""

    def upload(self, clients: list[int], values: list[Tensor] | None, own_masks: bool) -> None:
        """Counted message by message."""


class FlowerFederation(Federation):
    """A federation whose clients answer over a Link; what they keep stays with them.

    Updates are added up as they come, in float64, and let go: the server holds a few at a time, and the order in which
    they come changes nothing that float32 shows. Each message tells a client which of its turns was taken last, so
    that one whose update was refused or late goes on from where it was before.
    """

    exact = True

    def __init__(self, link: Link, task: str, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.link, self.task, link.clients = link, task, len(self.terms.shares)
        self.waits = True  # on a GPU too an update is looked at before its client is told that it was taken
        if link.deployed:
            self.every = 0.0
        elif self.turns.init():
            self.every = math.inf  # what virtual clients keep is gone with the process
        self.key = hashlib.sha256(task.encode()).hexdigest()
        self.ledger = Ledger(len(self.terms.shares), self.server.base.wants_squares)
        self.ledger.traffic = Counted(len(self.terms.shares), self.server.base.wants_squares)
        self.panel, self.said = KnownPanel(self.panel.observers, self, link.examples), said_of(given[1], link.clients)
        self._shares = self.terms.shares  # of the server's own data
        self.taken: dict[int, int] = {}  # the round of the last turn that was taken, by client
        whole = [*self.server.weights.values(), *self.server.buffers.values()]
        self._dense = sum(value.numel() * value.element_size() for value in whole)

    def _round(self, number: int) -> Round:
        """With clients that may have come, and the examples that they say they have."""
        self.link.meet()
        own = self.link.examples
        self.terms = replace(self.terms, shares=believed(self._shares, own))
        done = super()._round(number)
        if number < self.terms.rounds:
            return done
        told = [Measure("own_examples", size, number, client, note=OWN) for client, size in sorted(own.items())]
        return replace(done, measures=done.measures + told)

    def _updates(self, number: int, drawn: Drawn, faults: dict[int, Fault]) -> Iterator[tuple[int, Rows, Update]]:
        """What comes back from every client that answers before the deadline, as it comes."""
        rows = dict(zip(drawn.clients, drawn.rows, strict=True))
        asked = [client for client in drawn.clients if faults.get(client) not in NO_ANSWER]
        own = self.turns.choosing(number) is not None  # whether clients choose masks of their own
        for client, answer in self.link.ask(MessageType.TRAIN, self._questions(number, asked)):
            try:
                update, squares = self._read(answer, client, own)
            except Refused as refused:
                self.ledger.lose(number, client, refused.fault)
                self.ledger.traffic.known[client] = -1  # it may have lost its mask
                continue
            yield client, rows[client], update
            if squares and self.taken.get(client) == number:
                self.server.add_squares(squares, len(self.terms.shares[client]))

    def _questions(self, number: int, clients: list[int]) -> Iterator[tuple[int, RecordDict]]:
        """Everybody gets the same model, and the mask as bits who does not have it."""
        server, traffic = self.server, self.ledger.traffic
        mask = server.model.mask
        inside = bool(mask) and self.terms.broadcast != "dense"
        model = packed(model=encode(server.received, inside=mask if inside else None))
        both = ArrayRecord({**model, **packed(mask=encode_mask(mask))}) if mask else model
        for client in clients:
            whole = bool(mask) and traffic.known[client] != traffic.version
            record = both if whole else model
            traffic.known[client] = traffic.version
            traffic.down[client] += size_of(record)
            told: dict[str, Any] = {
                "round": number,
                "client": client,
                "taken": self.taken.get(client, 0),
                "inside": inside,
            }
            told |= {"version": traffic.version if mask else -1, "key": self.key, "task": self.task, "said": self.said}
            yield client, RecordDict({"model": record, "turn": ConfigRecord(told)})

    def _read(self, answer: RecordDict | Fault, client: int, own: bool) -> tuple[Update, Params]:
        """An update and its squares out of an answer, of which nothing is believed."""
        if isinstance(answer, str):
            raise Refused(answer)
        with why_refused(client):
            update, squares = self._decoded(answer.array_records["update"], client, own)
            told = answer.metric_records.get("withheld")
            shares = (
                [torch.tensor(float(str(told[name])), dtype=torch.float64) for name in Rates._fields] if told else []
            )
            return update._replace(rates=Rates(*shares) if shares else None), squares

    def _decoded(self, record: ArrayRecord, client: int, own: bool) -> tuple[Update, Params]:
        """Whether its numbers are finite is seen where an update is added; squares are seen to here."""
        size, server = size_of(record), self.server
        self.ledger.traffic.up[client] += size
        if size > (2 if server.squares else 1) * self._dense + self._dense // 8 + SLACK:
            raise Refused("size")
        given, mask = unpacked(record), server.model.mask
        values = self._tensors(given.get("values", b""), server.weights, mask if mask and not own else None)
        buffers = self._tensors(given["buffers"], server.buffers) if "buffers" in given else {}
        squares = self._tensors(given.get("squares", b""), server.weights) if server.squares else {}
        if squares and not bool(alive_of(squares)):
            raise Refused("nan")
        chosen = self._mask(given, "mask", mask) if own else None
        if chosen is not None and chosen.keys() != mask.keys():
            raise Refused("damaged")
        sent = self._mask(given, "sent", chosen or mask) if self.terms.counts_sent else None
        return Update(values, buffers, sent, chosen, {}, {}, {}), squares

    def _mask(self, given: Mapping[str, bytes], name: str, usual: Mask) -> Mask:
        """The mask of a message; another where it says none."""
        if name not in given:
            return dict(usual)
        return tree.to(decode_mask(given[name], _shapes(self.server.weights)), self.device)

    def _tensors(self, data: bytes, like: Params, inside: Mask | None = None) -> Params:
        """The tensors of a message, which must be like these in shape and precision."""
        found = decode(data, _shapes(like), inside=inside)
        if any(value.dtype != like[name].dtype for name, value in found.items()):
            raise Refused("damaged")
        return tree.to(found, self.device)

    def _keep(self, client: int, state: Params, alive: Tensor | None) -> None:
        """The server took this client's turn."""
        self.taken[client] = self.number + 1

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Everything of the server; clients keep their own."""
        tensors, data = super().state()
        return tensors, data | {"taken": {str(client): number for client, number in self.taken.items()}}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        super().load(tensors, data)
        self.taken = {int(client): number for client, number in data["taken"].items()}
        self.ledger.traffic.known = [-1] * len(self.terms.shares)


def _shapes(tensors: Params) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


@contextmanager
def why_refused(client: int) -> Iterator[None]:
    """Make of whatever is wrong with a message the fault that a row names."""
    try:
        yield
    except (KeyError, ValueError):
        raise Refused("damaged") from None
    except WrongInput as error:
        log.warning("the update of client %s is left out: %s", client, error)
        raise Refused("shape" if "shape" in error.message else "damaged") from error


class Refused(Exception):
    """An update that is left out."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault)
        self.fault = fault
