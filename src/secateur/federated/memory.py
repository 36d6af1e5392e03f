"""What an attacker keeps of a client's earlier rounds, saved with the run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from secateur.federated.observing import Look
from secateur.interfaces import Gradient, Params, ServerView, Weights


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
