"""A client's turn on its own machine: what it is sent, what it keeps at home, and what it sends.

What a client keeps in its Context between two rounds: its state, and the server's mask.
"""

from __future__ import annotations

from typing import Any

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from torch import Generator, nn

from secateur import tree
from secateur.defenses.withholding import rates
from secateur.errors import WrongInput
from secateur.federated.base_pruning import BasePruning
from secateur.federated.client_training import Given, Model
from secateur.federated.client_turn import Turns, Update
from secateur.federated.flower.link import keep, kept, packed, unpacked
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import Terms
from secateur.federated.traffic import messages
from secateur.functional import joined, split
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import weights_of
from secateur.seeding import derive
from secateur.wire import decode, decode_mask

HOME = "secateur.home"  # of the records in a client's context: whose state it is, and of which rounds
STATE, BEFORE, MASK = "secateur.state", "secateur.before", "secateur.mask"


def settle(home: RecordDict, key: str) -> None:
    """Forget what was kept for another federation."""
    if HOME not in home.config_records or home.config_records[HOME]["key"] != key:
        for name in list(home):
            del home[name]
        home[HOME] = ConfigRecord({"key": key, STATE: 0, BEFORE: 0, MASK: -1})


def mask_of(home: RecordDict, sent: bytes | None, version: int, shapes: dict[str, tuple[int, ...]]) -> Mask:
    """The mask of a version: sent with the message, or kept from an earlier one."""
    if version < 0:
        return {}
    told: Any = home.config_records[HOME]
    if sent is not None:
        home[MASK] = packed(mask=sent)
        told[MASK] = version
    if told[MASK] != version:
        raise WrongInput("mask", "of this round was never received here")
    return decode_mask(unpacked(home.array_records[MASK])["mask"], shapes)


def last(home: RecordDict, taken: int, device: torch.device) -> Params | None:
    """The state after the round whose update the server took last; a turn that it did not take never was."""
    told = home.config_records[HOME]
    for name in (STATE, BEFORE):
        if told[name] == taken and taken:
            found = kept(home, name)
            return None if found is None else tree.to(found, device)
    return None


def remember(home: RecordDict, number: int, state: Params) -> None:
    """Keep the state after this round, and the one before it, in case that the server does not take this turn."""
    told: Any = home.config_records[HOME]
    if told[STATE] != number and STATE in home:
        home[BEFORE] = home.array_records[STATE]
        told[BEFORE] = told[STATE]
    keep(home, STATE, state)
    told[STATE] = number


class Received:
    """What a client knows of the server: the model that it was sent, and how it prunes."""

    def __init__(self, net: nn.Module, base: BasePruning, device: torch.device) -> None:
        self.net, self.base, self.prunes = net, base, base.rate > 0
        params, buffers = split(net, tree.state_of(net))
        self.weights = tree.to(tree.clone(params), device)
        whole = {name: torch.ones_like(self.weights[name], dtype=torch.bool) for name in weights_of(net)}
        self.mask: Mask = whole
        self.model = Model(self.weights, tree.to(tree.clone(buffers), device), whole if self.prunes else {})

    @property
    def received(self) -> Params:
        """Parameters and buffers."""
        return joined(self.net, self.model.params | self.model.buffers)

    def load(self, state: Params, mask: Mask) -> None:
        """Another round's model and mask, in the memory of the last."""
        for held, new in zip((self.model.params, self.model.buffers), split(self.net, state), strict=True):
            for name, value in held.items():
                value.copy_(new[name])
        for name, where in self.model.mask.items():
            where.copy_(mask[name])


class Clients:
    """The clients' side of a federation: takes the turn of whichever client it is asked for."""

    def __init__(self, net: nn.Module, train: Batch, terms: Terms, seed: int, device: torch.device) -> None:
        self.terms, self.seed, self.device = terms, seed, device
        self.train = train.to(device)
        self.base = terms.base.bound(net, tuple(train.inputs.shape[1:]))
        self.sampler = sampler_of(terms, seed, device)
        self.shapes = {name: tuple(value.shape) for name, value in tree.state_of(net).items()}
        self.server = Received(net, self.base, device)
        self.turns = Turns(net, terms, self.server, self.train, "sequential")

    def turn(self, number: int, client: int, state: Params, mask: Mask, kept: Params | None) -> Update:
        """One client's turn in a round, as it is in process: by the same draws from the same seed."""
        drawn, turns = self.sampler(number), self.turns
        rows = drawn.rows[drawn.clients.index(client)]
        self.server.load(state, mask)
        training, sending = (derive(self.seed, what, number, client) for what in ("noise", "defense"))
        own = [Generator(self.device).manual_seed(each.initial_seed()) for each in (training, sending)]
        one = Given(rows, turns.init() if kept is None else kept, *turns.draws(rows, *own))
        return next(turns([(one, sending)], number))

    def answer(self, content: RecordDict, home: RecordDict) -> RecordDict:
        """What a client answers to a message, with what it keeps at home in its context."""
        turn, sent = content.config_records["turn"], unpacked(content.array_records["model"])
        number, client, taken = (int(str(turn[name])) for name in ("round", "client", "taken"))
        settle(home, str(turn["key"]))
        mask = mask_of(home, sent.get("mask"), int(str(turn["version"])), self.shapes)
        inside = mask if turn["inside"] else None
        state = tree.to(decode(sent["model"], self.shapes, inside=inside), self.device)
        update = self.turn(number, client, state, tree.to(mask, self.device), last(home, taken, self.device))
        if update.state:
            remember(home, number, update.state)
        leaving = messages(update, mask, self.base.wants_squares)
        found = RecordDict({"update": packed(**leaving)})
        if update.withheld:
            shares = rates(update.withheld, mask)._asdict()
            found["withheld"] = MetricRecord({name: float(value) for name, value in shares.items()})
        return found
