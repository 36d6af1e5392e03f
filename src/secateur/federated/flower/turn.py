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
from secateur.federated.messages import messages
from secateur.federated.sampling import sampler_of
from secateur.federated.terms import Terms
from secateur.federated.turns import Turns, Update
from secateur.functional import joined, split
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import weights_of
from secateur.wire import decode


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
