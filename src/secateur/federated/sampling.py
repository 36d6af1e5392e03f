"""Sampling of a round's clients and their rows; many rounds are drawn ahead, so that a GPU never waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.data.partition import count_rows
from secateur.errors import WrongInput, check_number
from secateur.federated.client_training import LocalTraining
from secateur.federated.spec import FederationSpec
from secateur.seeding import derive

AHEAD = 64  # most rounds that are drawn at once
DRAWN = 2**27  # most rows of one turn, and of the rounds that are drawn at once: 1 GiB of indices
REPEATED = 1024  # largest batch of clients that must repeat rows to fill it
TURNS = 1024  # most client turns drawn at once: they stay in memory, and a remote client redraws them every message


@dataclass(frozen=True, eq=False)
class SampledClients:
    """The clients of a round and their batches."""

    clients: list[int]
    rows: list[Tensor | list[Tensor]]  # one entry a client: (steps, B), or batches of several sizes

    @property
    def steps(self) -> list[int]:
        """The number of local steps of each client."""
        return [len(rows) for rows in self.rows]


class Sampler:
    """Sampler of clients, without replacement, and of their rows, reshuffled for every round.

    With local steps every batch is full: a client that has used all its rows reshuffles them and continues, even
    within a batch. With local epochs the last batch of an epoch has the remaining rows. The draws of a round depend
    only on the seed and the round's number, so no random state is kept between rounds. With `fixed` batches a client
    takes the same rows in the same order in every round.
    """

    def __init__(
        self,
        shares: Sequence[Tensor],
        per_round: int,
        local: LocalTraining,
        seed: int,
        device: torch.device | str = "cpu",
        fixed: bool = False,
    ) -> None:
        check_number("per_round", per_round, f"[1, {len(shares)}]")
        self.shares, self.per_round, self.local, self.seed = shares, per_round, local, seed
        self.device, self.fixed = torch.device(device), fixed
        rows = sum(count_rows(shares))
        if local.batch_size > max(rows, REPEATED):
            raise WrongInput("batch_size", f"{local.batch_size} is not allowed; all clients have {rows} rows together")
        drawn = (local.steps or 1) * local.batch_size
        if drawn > DRAWN:
            problem = f"{local.steps} steps of {local.batch_size} rows are too many for one turn"
            raise WrongInput("local_steps", f"{problem}; steps times batch_size must be at most {DRAWN}")
        ahead = max(1, min(AHEAD, TURNS // per_round, DRAWN // (drawn * per_round)))
        self._at_once = ahead if self.device.type == "cuda" else 1  # only a GPU gains by one copy of many rounds
        self._ahead: dict[int, SampledClients] = {}

    def __call__(self, number: int) -> SampledClients:
        """Return a round's draws; rounds count from 1."""
        if number not in self._ahead:
            first = (number - 1) // self._at_once * self._at_once + 1
            drawn = [
                self._draw(derive(self.seed, "round", round_number))
                for round_number in range(first, first + self._at_once)
            ]
            self._ahead = dict(enumerate(self._move_rows(drawn), start=first))
        return self._ahead[number]

    def clients(self, number: int) -> list[int]:
        """Return the clients of a round, without drawing their batches."""
        return self._clients(derive(self.seed, "round", number))

    def _clients(self, rng: Generator) -> list[int]:
        return torch.randperm(len(self.shares), generator=rng)[: self.per_round].tolist()

    def _draw(self, rng: Generator) -> SampledClients:
        clients = self._clients(rng)
        rngs = [derive(self.seed, "rows", client) if self.fixed else rng for client in clients]
        return SampledClients(
            clients, [self._rows(self.shares[c], client_rng) for c, client_rng in zip(clients, rngs, strict=True)]
        )

    def _rows(self, share: Tensor, rng: Generator) -> Tensor | list[Tensor]:
        size = self.local.batch_size
        if self.local.steps is None:
            passes = range(self.local.epochs or 1)
            return [part for _ in passes for part in torch.split(_shuffle(share, rng), size)]
        needed = self.local.steps * size
        passes = range(-(-needed // len(share)))
        return torch.cat([_shuffle(share, rng) for _ in passes])[:needed].view(self.local.steps, size)

    def _move_rows(self, drawn: list[SampledClients]) -> list[SampledClients]:
        """Copy the rows of all rounds to a GPU at once; elsewhere return them unchanged."""
        if self.device.type != "cuda" or self.local.steps is None:
            return drawn
        stacked = torch.stack([torch.stack(sample.rows) for sample in drawn])  # type: ignore[arg-type]
        moved = stacked.pin_memory().to(self.device, non_blocking=True)
        return [SampledClients(sample.clients, list(rows)) for sample, rows in zip(drawn, moved, strict=True)]


def sampler_of(terms: FederationSpec, seed: int, device: torch.device | str = "cpu") -> Sampler:
    """Return the sampler of a federation."""
    return Sampler(terms.shares, terms.per_round, terms.local, seed, device, terms.fixed_batches)


def _shuffle(share: Tensor, rng: Generator) -> Tensor:
    return share[torch.randperm(len(share), generator=rng)]
