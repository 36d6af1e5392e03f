"""The baseline Local: every client trains a model of its width by itself, until its validation loss falls no more.

Followed like a federation: a round is an epoch of all clients that still train. Adam goes on from epoch to epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.federation import Round
from secateur.federated.submodels import evaluation
from secateur.federated.submodels.clients import Job, Moments, picked
from secateur.federated.submodels.evaluation import mean_of
from secateur.federated.submodels.federation import Seen, SubmodelFederation
from secateur.federated.submodels.rules import Local
from secateur.federated.submodels.structure import Asked, params_of
from secateur.federated.traffic import Measure
from secateur.interfaces import Params
from secateur.seeding import derive


@dataclass
class _Client:
    """Where one stands."""

    flat: Tensor
    best: Tensor  # the model of the epoch with the lowest validation loss
    moments: Moments | None = None
    lowest: float = float("inf")
    waited: int = 0  # epochs since then
    epochs: int = 0


class Alone:
    """Clients that share nothing; takes the place of a federation, whose data, widths and crowd it uses."""

    def __init__(self, federation: SubmodelFederation) -> None:
        rule = federation.terms.rule
        if not isinstance(rule, Local):
            raise WrongInput("submodels", f"{type(rule).__name__} is no rule for clients alone; take local")
        self.federation, self.rule, self.terms, self.net = federation, rule, federation.terms, federation.net
        self.seed, self.device, self.number = federation.seed, federation.device, 0
        self.parts = [self._split(client, rows) for client, rows in enumerate(self.terms.shares)]
        starts = [federation.received(0, client) for client in range(len(self.terms.shares))]
        self.clients = [_Client(turn.received.clone(), turn.received.clone()) for turn in starts]

    def rounds(self) -> Iterator[Round]:
        """From where it stands to the last epoch, or to where everybody has stopped."""
        while self.number < self.terms.rounds:
            yield self._epoch(self.number + 1)

    def model(self) -> Params:
        """There is no server's model."""
        return {}

    def observed(self, number: int) -> bool:
        """Whether somebody looks at the models: at the end."""
        return bool(self.federation.observers) and number == self.terms.rounds

    puts_off = False  # attacks are made at once

    def _split(self, client: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What a client trains with, and what it stops by: two rows at least of each."""
        held = min(max(2, round(self.rule.validation * len(rows))), len(rows) - 2)
        order = rows[torch.randperm(len(rows), generator=derive(self.seed, "validation", client))]
        return order[held:], order[:held]

    def _epoch(self, number: int) -> Round:
        training = [c for c, one in enumerate(self.clients) if one.waited < self.rule.patience]
        made = self.federation.crowd([self._job(number, client) for client in training])
        for client, (flat, moments) in zip(training, made, strict=True):
            one = self.clients[client]
            one.flat, one.moments, one.epochs = flat, moments, number
            loss = self._validated(client)
            if loss < one.lowest:
                one.best, one.lowest, one.waited = flat.clone(), loss, 0
            else:
                one.waited += 1
        done = number == self.terms.rounds or all(one.waited >= self.rule.patience for one in self.clients)
        self.number = self.terms.rounds if done else number
        return Round(self.number, self._measures() if done else [])

    def _job(self, number: int, client: int) -> Job:
        one, (own, _) = self.clients[client], self.parts[client]
        rows = own[torch.randperm(len(own), generator=derive(self.seed, "rows", number, client))]
        epochs = picked([rows], self.terms.local.augment, derive(self.seed, "augment", number, client))
        noise = Generator(self.device).manual_seed(derive(self.seed, "noise", number, client).initial_seed())
        return Job(self.federation.narrow(client).key, one.flat, epochs, noise, None, one.moments)

    def _validated(self, client: int) -> float:
        narrow, held = self.federation.narrow(client), self.parts[client][1].to(self.device)
        params = params_of(self.clients[client].flat, narrow.shapes) | narrow.others
        return float(
            evaluation.losses(narrow.net, params, self.federation.train.take(held), self.terms.test_batch).mean()
        )

    def _measures(self) -> list[Measure]:
        found: list[Measure] = []
        for client, one in enumerate(self.clients):
            rows, narrow = self.terms.shares[client], self.federation.narrow(client)
            judged = self.federation.judge(narrow, one.best, [rows])
            judged |= {"parameters": len(one.best), "client_rows": len(rows), "epochs": one.epochs}
            found += [Measure(name, float(value), self.terms.rounds, client) for name, value in judged.items()]
            self._observe(client, tree.clone(params_of(one.best, narrow.shapes)))
        return found + mean_of(found, self.terms.rounds)

    def _observe(self, client: int, params: Params) -> None:
        """Nothing is sent; an observer is shown the model that the client would be attacked by."""
        fed, number = self.federation, self.terms.rounds
        cut = fed.structure.cut(self.rule, Asked(client, len(self.clients), number), fed.rates[client])
        rows, rate, net = self.parts[client][0], fed.rates[client], fed.narrow(client).net  # stopping by is no training
        for _, observer in fed.observers:
            observer(Seen(number, client, rate, net, params, params, cut.channels, rows))

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Everything that the next epoch depends on, for `load`."""
        tensors: Params = {}
        for client, one in enumerate(self.clients):
            tensors |= {f"{client}.flat": one.flat, f"{client}.best": one.best}
            if one.moments is not None:
                tensors |= {f"{client}.first": one.moments.first, f"{client}.second": one.moments.second}
        plain = [
            [one.lowest if one.epochs else None, one.waited, one.epochs, one.moments.steps if one.moments else 0]
            for one in self.clients
        ]
        return tensors, {"round": self.number, "seed": self.seed, "clients": plain}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        if data["seed"] != self.seed or len(data["clients"]) != len(self.clients):
            raise WrongInput("state", "is of another federation; give what one of these terms and this seed kept")
        own = {name: value.to(self.device) for name, value in tensors.items()}
        for client, (lowest, waited, epochs, steps) in enumerate(data["clients"]):
            moments = Moments(own[f"{client}.first"], own[f"{client}.second"], steps) if epochs else None
            lowest = float("inf") if lowest is None else lowest
            self.clients[client] = _Client(
                own[f"{client}.flat"], own[f"{client}.best"], moments, lowest, waited, epochs
            )
        self.number = data["round"]
