"""An attacker that remembers which weights a client sent last.

A client that withholds a weight and keeps it (pseudo-, priprune) begins its next turn at its own value, not at the one
that it was sent. When it sends the weight again, the difference from the broadcast holds all that it saved up, which is
no gradient of this round and, divided by the learning rate, is larger than everything else. An attacker who was there
the last time knows which weights these are: those that were 0 then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from secateur.federated.observing import Look, Seen
from secateur.federated.terms import Terms
from secateur.interfaces import Mask, Params, ServerView, Weights

_NAME = "lacking"


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
