"""A client's turn on its own machine: what it is sent, what it keeps at home, and what it sends."""

from __future__ import annotations

import torch
from flwr.app import MetricRecord, RecordDict
from torch import Generator, nn

from secateur import tree
from secateur.chance import derive
from secateur.defenses.withholding import rates
from secateur.federated.base import BasePruning
from secateur.federated.crowd import Given, Model
from secateur.federated.flower.home import last, mask_of, remember, settle
from secateur.federated.flower.records import packed, unpacked
from secateur.federated.sampling import sampler_of
from secateur.federated.terms import Terms
from secateur.federated.turns import Turns, Update
from secateur.functional import joined, split
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import weights_of
from secateur.wire import decode, encode, encode_mask


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
        found = RecordDict({"update": packed(**self._messages(update, mask))})
        if update.withheld:
            shares = rates(update.withheld, mask)._asdict()
            found["withheld"] = MetricRecord({name: float(value) for name, value in shares.items()})
        return found

    def _messages(self, update: Update, mask: Mask) -> dict[str, bytes]:
        """An update as bytes; which entries were sent only where the server counts them and could not know."""
        inside = mask if mask and update.own_mask is None else None
        found = {"values": encode(update.values, inside=inside)}
        if update.buffers:
            found["buffers"] = encode(update.buffers)
        covers = bool(update.withheld) and self.terms.averaging == "coverage"
        if update.own_mask is not None:
            found["mask"] = encode_mask(update.own_mask)
        if update.sent is not None and covers:
            found["sent"] = encode_mask(update.sent)
        if self.base.wants_squares:
            found["squares"] = encode({name: value.square() for name, value in update.summed.items()})
        return found
