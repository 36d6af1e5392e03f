"""The attacker's memory of clients' earlier rounds, saved with the run.

`Memory` keeps a client's last rounds whole, for attacks with a history. `SentMaskMemory` keeps the weights that a
client withheld last, for attacks that follow a client.

A client that withholds a weight and keeps it (pseudo-, priprune) begins its next turn at its own value, not at the
server's. When the client sends the weight again, the difference from the broadcast holds all earlier changes. The
difference is no gradient of this round and, divided by the learning rate, is larger than everything else. An attacker
that saw the client's last update knows these weights: their values were 0 then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.federated.attacks.observer import ClientView, RoundView
from secateur.federated.spec import FederationSpec
from secateur.interfaces import Gradient, Mask, Params, ServerView, Weights

_PREFIX = "lacking"


class Past(NamedTuple):
    """One earlier round of a client."""

    round: int
    view: ServerView
    rows: Tensor  # evaluator only


class Memory:
    """The last rounds of each client before the attacked round."""

    def __init__(self, depth: int, kept: Mapping[int, set[int]]) -> None:
        self.depth = depth  # rounds of each client
        self.kept = kept  # by round: the clients that are remembered
        self.past: dict[int, list[Past]] = {}  # by client, the latest first

    def of(self, client: int | None) -> list[Past]:
        """Return a client's remembered rounds, the latest first."""
        return [] if client is None else self.past.get(client, [])

    def add(self, look: RoundView) -> None:
        """Remember the updates that a later attack will use."""
        for seen in look.seen:
            if seen.client is not None and seen.client in self.kept.get(look.round, ()):
                past = [Past(look.round, seen.view, seen.rows), *self.of(seen.client)]
                self.past[seen.client] = past[: self.depth]

    def state(self) -> tuple[Params, Any]:
        """Return tensors by client, age, part and name, and by client [round, is a gradient] of each round."""
        tensors: Params = {}
        for client, past in self.past.items():
            for age, one in enumerate(past):
                parts = {"sent": one.view.sent, "update": one.view.update.values, "rows": {"": one.rows}}
                for part, values in parts.items():
                    tensors |= {f"{client}/{age}/{part}/{name}": value for name, value in values.items()}
        kinds = {
            str(client): [[one.round, isinstance(one.view.update, Gradient)] for one in past]
            for client, past in self.past.items()
        }
        return tensors, kinds

    def load(self, tensors: Params, data: Any) -> None:
        """Restore the result of `state`."""

        def part(*names: object) -> Params:
            prefix = "/".join(map(str, names)) + "/"
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        self.past = {}
        for client, rounds in data.items():
            for age, (number, gradient) in enumerate(rounds):
                update = (Gradient if gradient else Weights)(part(client, age, "update"))
                view = ServerView(part(client, age, "sent"), update)
                past = Past(number, view, part(client, age, "rows")[""])
                self.past.setdefault(int(client), []).append(past)


class SentMaskMemory:
    """The entries of each client that were 0 in its last update."""

    def __init__(self, kept: Mapping[int, set[int]]) -> None:
        self.kept = kept  # by round: the clients that a later attack follows
        self.lacking: dict[int, Mask] = {}  # by client: True where the last update was 0

    def add(self, look: RoundView) -> None:
        """Remember the zeros that a later attack will use."""
        for seen in look.seen:
            if seen.client is not None and seen.client in self.kept.get(look.round, ()):
                self.lacking[seen.client] = {name: value == 0 for name, value in seen.view.update.values.items()}

    def knows(self, seen: ClientView) -> bool:
        """Return True if the client's last update was seen."""
        return seen.client in self.lacking

    def view(self, seen: ClientView) -> ServerView:
        """Return the update with 0 for weights that were 0 the last time, as if the client had withheld them."""
        late, update = {} if seen.client is None else self.lacking.get(seen.client, {}), seen.view.update
        if not late or not isinstance(update, Weights):
            return seen.view
        values = {name: torch.where(late[name], 0, value) for name, value in update.values.items()}
        return replace(seen.view, update=Weights(values))

    def state(self) -> Params:
        """Return masks by client and name."""
        return {f"{_PREFIX}/{client}/{name}": v for client, late in self.lacking.items() for name, v in late.items()}

    def load(self, tensors: Params) -> None:
        """Restore the result of `state`; ignore other tensors."""
        self.lacking = {}
        for name, value in tensors.items():
            if name.startswith(f"{_PREFIX}/"):
                _, client, weight = name.split("/", 2)
                self.lacking.setdefault(int(client), {})[weight] = value


def follows(attack: Any) -> bool:
    """Return True if an attack takes only the weights that a client sent in its last turn too."""
    return bool(getattr(attack, "follows", False))


def turns_back(terms: FederationSpec) -> int:
    """Return the number of a client's earlier turns to watch: one, or all if the last may not have arrived."""
    return terms.rounds if terms.faults.any else 1
