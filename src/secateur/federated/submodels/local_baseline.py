"""The baseline Local: every client trains a model of its width by itself, until its validation loss stops falling.

The baseline has the interface of a federation: a round is an epoch of all clients that still train. Adam keeps its
moments from epoch to epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from secateur import tree
from secateur.errors import WrongInput
from secateur.federated.checkpoint import Resumable, check_state
from secateur.federated.spec import SubmodelSpec
from secateur.federated.submodels import networks
from secateur.federated.submodels.clients import AdamMoments, SubmodelTurn
from secateur.federated.submodels.federation import SubmodelFederation, SubmodelView
from secateur.federated.submodels.networks import mean_of
from secateur.federated.submodels.rules import LocalRule
from secateur.federated.submodels.structure import ClientAndRound, params_of
from secateur.federated.traffic import Measure, Round
from secateur.interfaces import Params
from secateur.seeding import derive


@dataclass
class _Client:
    """The training state of one client."""

    flat: Tensor
    best: Tensor  # the model of the epoch with the lowest validation loss
    moments: AdamMoments | None = None
    lowest: float = float("inf")
    waited: int = 0  # epochs since the lowest validation loss
    epochs: int = 0


class LocalBaseline(Resumable):
    """Clients that share nothing; replaces a federation, and uses its data, widths and trainer."""

    terms: SubmodelSpec

    def __init__(self, federation: SubmodelFederation) -> None:
        rule = federation.terms.rule
        if not isinstance(rule, LocalRule):
            raise WrongInput("submodels", f"{type(rule).__name__} is no rule for clients alone; use local")
        self.federation, self.rule, self.terms, self.net = federation, rule, federation.terms, federation.net
        self.seed, self.device = federation.seed, federation.device
        self.parts = [self._split(client, rows) for client, rows in enumerate(self.terms.shares)]
        starts = [federation.broadcast(0, client) for client in range(len(self.terms.shares))]
        self.clients = [_Client(turn.received.clone(), turn.received.clone()) for turn in starts]

    def model(self) -> Params:
        """Return no tensors, because there is no server's model."""
        return {}

    def was_observed(self, number: int) -> bool:
        """Return True in the last round if there are observers."""
        return bool(self.federation.panel.observers) and number == self.terms.rounds

    def _split(self, client: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return a client's rows for training and for validation, at least two of each."""
        held = min(max(2, round(self.rule.validation * len(rows))), len(rows) - 2)
        order = rows[torch.randperm(len(rows), generator=derive(self.seed, "validation", client))]
        return order[held:], order[:held]

    def run_round(self, number: int) -> Round:
        """Train all clients for an epoch that have not stopped; the last epoch is the one in which all have."""
        training = [c for c, state in enumerate(self.clients) if state.waited < self.rule.patience]
        trained = self.federation.trainer([self._job(number, client) for client in training])
        for client, (flat, moments) in zip(training, trained, strict=True):
            state = self.clients[client]
            state.flat, state.moments, state.epochs = flat, moments, number
            loss = self._validate(client)
            if loss < state.lowest:
                state.best, state.lowest, state.waited = flat.clone(), loss, 0
            else:
                state.waited += 1
        done = number == self.terms.rounds or all(state.waited >= self.rule.patience for state in self.clients)
        self.number = self.terms.rounds if done else number
        return Round(self.number, self._measures() if done else [])

    def _job(self, number: int, client: int) -> SubmodelTurn:
        state, rows = self.clients[client], self.parts[client][0]
        return self.federation.job(number, client, rows, state.flat, epochs=1)._replace(moments=state.moments)

    def _validate(self, client: int) -> float:
        narrow, held = self.federation.narrow(client), self.parts[client][1].to(self.device)
        params = params_of(self.clients[client].flat, narrow.shapes) | narrow.others
        return float(
            networks.losses(narrow.net, params, self.federation.train.take(held), self.terms.test_batch).mean()
        )

    def _measures(self) -> list[Measure]:
        measures: list[Measure] = []
        for client, state in enumerate(self.clients):
            rows, narrow = self.terms.shares[client], self.federation.narrow(client)
            metrics = self.federation.judge(narrow, state.best, [rows])
            metrics |= {"parameters": len(state.best), "client_rows": len(rows), "epochs": state.epochs}
            measures += [Measure(name, float(value), self.terms.rounds, client) for name, value in metrics.items()]
            self._observe(client, tree.clone(params_of(state.best, narrow.shapes)))
        return measures + mean_of(measures, self.terms.rounds)

    def _observe(self, client: int, params: Params) -> None:
        """Show the client's model to the observers, as the model that an attacker would get; nothing is sent."""
        fed, number = self.federation, self.terms.rounds
        cut = fed.structure.cut(self.rule, ClientAndRound(client, len(self.clients), number), fed.rates[client])
        rows, rate, net = self.parts[client][0], fed.rates[client], fed.narrow(client).net  # no validation
        for observer in fed.panel.observers:
            observer(SubmodelView(number, client, rate, net, params, params, cut.channels, rows))

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next epoch depends on, for `load`."""
        tensors: Params = {}
        for client, state in enumerate(self.clients):
            tensors |= {f"{client}.flat": state.flat, f"{client}.best": state.best}
            if state.moments is not None:
                tensors |= {f"{client}.first": state.moments.first, f"{client}.second": state.moments.second}
        plain = [
            [one.lowest if one.epochs else None, one.waited, one.epochs, one.moments.steps if one.moments else 0]
            for one in self.clients
        ]
        return tensors, {"round": self.number, "seed": self.seed, "clients": plain}

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`."""
        check_state(data["seed"] == self.seed and len(data["clients"]) == len(self.clients))
        moved = tree.to(tensors, self.device)
        for client, (lowest, waited, epochs, steps) in enumerate(data["clients"]):
            saved = tree.part(moved, client)
            moments = AdamMoments(saved["first"], saved["second"], steps) if epochs else None
            lowest = float("inf") if lowest is None else lowest
            self.clients[client] = _Client(saved["flat"], saved["best"], moments, lowest, waited, epochs)
        self.number = data["round"]
