"""What a federation says of itself: who was lost, and what was sent; read from the device only when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from secateur.federated.faults import WORDS, Fault
from secateur.federated.traffic import Traffic

if TYPE_CHECKING:
    from secateur.federated.observing import Arrived


@dataclass(frozen=True)
class Measure:
    """One number that a federation says of itself."""

    metric: str
    value: float
    round: int
    client: int | None = None
    note: str | None = None


class Ledger:
    """Lost clients since the last evaluation, and all bytes."""

    def __init__(self, clients: int, squares: bool) -> None:
        self.traffic = Traffic(clients, squares)
        self.turns = [0] * clients  # updates that each may have sent
        self._lost: dict[int, dict[int, Fault]] = {}  # by round
        self._unread: list[tuple[int, int, Tensor]] = []  # round, client, and () whether its update was finite

    def lose(self, number: int, client: int, fault: Fault) -> None:
        """A round goes on without a client."""
        self._lost.setdefault(number, {})[client] = fault

    def trained(self, clients: Iterable[int]) -> None:
        """These made an update in a round, whatever became of it."""
        for client in clients:
            self.turns[client] += 1

    def arrive(self, number: int, arrived: Sequence[Arrived], own_masks: bool) -> None:
        """A round's updates."""
        clients = [one.client for one in arrived]
        sizes = [one.size for one in arrived if one.size is not None]
        self.traffic.upload(clients, sizes or None, own_masks)
        self._unread += [(number, one.client, one.alive) for one in arrived if one.alive is not None]

    def read(self) -> None:
        """Take over what the device knows of finished rounds."""
        self.traffic.read()
        flags = torch.stack([alive for *_, alive in self._unread]).tolist() if self._unread else []
        for (number, client, _), fine in zip(self._unread, flags, strict=True):
            if not fine:
                self.lose(number, client, "nan")
        self._unread.clear()

    def measures(self, number: int, judged: Mapping[str, float], last: bool) -> list[Measure]:
        """What an evaluation says; the last one also of every client."""
        self.read()
        found = [Measure(name, value, number) for name, value in judged.items()]
        for at, clients in sorted(self._lost.items()):
            told = "; ".join(f"client {client} {WORDS[fault]}" for client, fault in clients.items())
            found.append(Measure("lost_clients", len(clients), at, note=f"the round went on without them: {told}"))
        self._lost.clear()
        for name, each in (("bytes_up", self.traffic.up), ("bytes_down", self.traffic.down)):
            found.append(Measure(name, sum(each), number, note="of all clients since the first round"))
            found += [Measure(name, value, number, client) for client, value in enumerate(each)] if last else []
        return found

    def state(self) -> dict[str, Any]:
        """Plain values, for a checkpoint."""
        self.read()
        lost = {str(number): {str(c): fault for c, fault in who.items()} for number, who in self._lost.items()}
        return {"lost": lost, "traffic": self.traffic.state(), "turns": self.turns}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        self._lost = {int(n): {int(c): fault for c, fault in who.items()} for n, who in state["lost"].items()}
        self.traffic.load(state["traffic"])
        self.turns = list(state["turns"])
