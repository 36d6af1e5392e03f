"""What an attacker keeps of a client's earlier rounds, saved with the run.

An attacker that remembers which weights a client sent last.

A client that withholds a weight and keeps it (pseudo-, priprune) begins its next turn at its own value, not at the one
that it was sent. When it sends the weight again, the difference from the broadcast holds all that it saved up, which is
no gradient of this round and, divided by the learning rate, is larger than everything else. An attacker who was there
the last time knows which weights these are: those that were 0 then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from secateur.federated.attacks.observer import Look, Seen
from secateur.federated.spec import Terms
from secateur.interfaces import Gradient, Mask, Params, ServerView, Weights

_NAME = "lacking"


class Past(NamedTuple):
    """One earlier round of a client."""

    round: int
    view: ServerView
    rows: Tensor  # evaluator only


class Memory:
    """By client its last rounds before the one that is attacked."""

    def __init__(self, depth: int, kept: Mapping[int, set[int]]) -> None:
        self.depth = depth  # rounds of each client
        self.kept = kept  # by round the clients that are to be remembered
        self.past: dict[int, list[Past]] = {}  # the latest first

    def of(self, client: int | None) -> list[Past]:
        """What there is of a client, the latest first."""
        return [] if client is None else self.past.get(client, [])

    def add(self, look: Look) -> None:
        """Remember what a later attack will use."""
        for seen in look.seen:
            if seen.client is not None and seen.client in self.kept.get(look.round, ()):
                past = [Past(look.round, seen.view, seen.rows), *self.of(seen.client)]
                self.past[seen.client] = past[: self.depth]

    def state(self) -> tuple[Params, Any]:
        """Tensors by client, place, part and name; and of each the round, and whether it is a gradient."""
        tensors: Params = {}
        for client, past in self.past.items():
            for place, one in enumerate(past):
                parts = {"sent": one.view.sent, "update": one.view.update.values, "rows": {"": one.rows}}
                for part, values in parts.items():
                    tensors |= {f"{client}/{place}/{part}/{name}": value for name, value in values.items()}
        kinds = {
            str(client): [[one.round, isinstance(one.view.update, Gradient)] for one in past]
            for client, past in self.past.items()
        }
        return tensors, kinds

    def load(self, tensors: Params, data: Any) -> None:
        """Go on from what `state` gave."""

        def part(*names: object) -> Params:
            prefix = "/".join(map(str, names)) + "/"
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        self.past = {}
        for client, rounds in data.items():
            for place, (number, gradient) in enumerate(rounds):
                update = (Gradient if gradient else Weights)(part(client, place, "update"))
                view = ServerView(part(client, place, "sent"), update)
                past = Past(number, view, part(client, place, "rows")[""])
                self.past.setdefault(int(client), []).append(past)


def follows(attack: Any) -> bool:
    """Whether an attack is to be shown only what a client sent in its last turn too."""
    return bool(getattr(attack, "follows", False))


def turns_back(terms: Terms) -> int:
    """How many of a client's earlier turns are watched: one, or all where the last one may not have arrived."""
    return terms.rounds if terms.faults.any else 1


class Following:
    """By client which entries were 0 in its last update."""

    def __init__(self, kept: Mapping[int, set[int]]) -> None:
        self.kept = kept  # by round the clients that a later attack follows
        self.lacking: dict[int, Mask] = {}

    def add(self, look: Look) -> None:
        """Remember what a later attack will use."""
        for seen in look.seen:
            if seen.client is not None and seen.client in self.kept.get(look.round, ()):
                self.lacking[seen.client] = {name: value == 0 for name, value in seen.view.update.values.items()}

    def knows(self, seen: Seen) -> bool:
        """Whether the client's last update was seen."""
        return seen.client in self.lacking

    def view(self, seen: Seen) -> ServerView:
        """The update with 0 for weights that were 0 the last time, as if they had not been sent."""
        late, update = {} if seen.client is None else self.lacking.get(seen.client, {}), seen.view.update
        if not late or not isinstance(update, Weights):
            return seen.view
        values = {name: torch.where(late[name], 0, value) for name, value in update.values.items()}
        return replace(seen.view, update=Weights(values))

    def state(self) -> Params:
        """Bools, by client and name."""
        return {f"{_NAME}/{client}/{name}": v for client, late in self.lacking.items() for name, v in late.items()}

    def load(self, tensors: Params) -> None:
        """Go on from what `state` gave; other tensors are left alone."""
        self.lacking = {}
        for name, value in tensors.items():
            if name.startswith(f"{_NAME}/"):
                _, client, own = name.split("/", 2)
                self.lacking.setdefault(int(client), {})[own] = value
