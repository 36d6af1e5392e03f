"""Who takes part in a round, and with which of its rows: drawn ahead for many rounds, so that a GPU never waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput
from secateur.federated.client_training import Local
from secateur.federated.spec import Terms
from secateur.seeding import derive

AHEAD = 64  # rounds that are drawn at once, or fewer:
TURNS = 1024  # of so many clients in all: what is drawn is held, and a client elsewhere draws it for every message


@dataclass(frozen=True, eq=False)
class Drawn:
    """One round's clients and their batches."""

    clients: list[int]
    rows: list[Tensor | list[Tensor]]  # a client each: (steps, B), or batches of several sizes

    @property
    def steps(self) -> list[int]:
        """How many local steps each takes."""
        return [len(rows) for rows in self.rows]


class Sampler:
    """Clients without replacement, and their rows reshuffled for every round.

    With local steps every batch is full: a client that has run through its rows reshuffles them and goes on, also
    within a batch. With local epochs the last batch of each is what is left. The draws of a round depend on the seed
    and the round's number alone, so that nothing of chance has to be kept between two. With `fixed` batches a client
    takes the same rows in the same order in every round.
    """

    def __init__(
        self,
        shares: Sequence[Tensor],
        per_round: int,
        local: Local,
        seed: int,
        device: torch.device | str = "cpu",
        fixed: bool = False,
    ) -> None:
        if not 1 <= per_round <= len(shares):
            allowed = f"give 1 to {len(shares)}, as many as there are"
            raise WrongInput("per_round", f"{per_round} clients a round are not allowed; {allowed}")
        self.shares, self.per_round, self.local, self.seed = list(shares), per_round, local, seed
        self.device, self.fixed = torch.device(device), fixed
        self._at_once = max(1, min(AHEAD, TURNS // per_round))
        self._ahead: dict[int, Drawn] = {}

    def __call__(self, number: int) -> Drawn:
        """A round's draws; rounds count from 1."""
        if number not in self._ahead:
            first = (number - 1) // self._at_once * self._at_once + 1
            drawn = [self._draw(derive(self.seed, "round", each)) for each in range(first, first + self._at_once)]
            self._ahead = dict(enumerate(self._moved(drawn), start=first))
        return self._ahead[number]

    def clients(self, number: int) -> list[int]:
        """Who takes part in a round, without drawing its batches."""
        return self._clients(derive(self.seed, "round", number))

    def _clients(self, rng: Generator) -> list[int]:
        return torch.randperm(len(self.shares), generator=rng)[: self.per_round].tolist()

    def _draw(self, rng: Generator) -> Drawn:
        clients = self._clients(rng)
        rngs = [derive(self.seed, "rows", client) if self.fixed else rng for client in clients]
        return Drawn(clients, [self._rows(self.shares[c], own) for c, own in zip(clients, rngs, strict=True)])

    def _rows(self, share: Tensor, rng: Generator) -> Tensor | list[Tensor]:
        size = self.local.batch_size
        if self.local.steps is None:
            passes = range(self.local.epochs or 1)
            return [part for _ in passes for part in torch.split(_shuffled(share, rng), size)]
        needed = self.local.steps * size
        passes = range(-(-needed // len(share)))
        return torch.cat([_shuffled(share, rng) for _ in passes])[:needed].view(self.local.steps, size)

    def _moved(self, drawn: list[Drawn]) -> list[Drawn]:
        """On a GPU the rows of all rounds in one copy."""
        if self.device.type != "cuda" or self.local.steps is None:
            return drawn
        whole = torch.stack([torch.stack(each.rows) for each in drawn])  # type: ignore[arg-type]
        moved = whole.pin_memory().to(self.device, non_blocking=True)
        return [Drawn(each.clients, list(rows)) for each, rows in zip(drawn, moved, strict=True)]


def sampler_of(terms: Terms, seed: int, device: torch.device | str = "cpu") -> Sampler:
    """The one of a federation."""
    return Sampler(terms.shares, terms.per_round, terms.local, seed, device, terms.fixed_batches)


def _shuffled(share: Tensor, rng: Generator) -> Tensor:
    return share[torch.randperm(len(share), generator=rng)]
