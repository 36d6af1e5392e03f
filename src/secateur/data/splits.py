"""Splits of a data set among models: the victim's and the shadows' parts, and the in/out design of online attacks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput

SMALLEST = 8  # rows: with fewer, a half's training part is empty


@dataclass(frozen=True)
class Part:
    """The rows of one model: members (train), rows for early stopping (validation), non-members (test)."""

    train: Tensor  # int64 indices, as the other two
    validation: Tensor
    test: Tensor


@dataclass(frozen=True)
class Split:
    """The victim's part and the parts of the attacker's shadow models, which share no row with the victim's."""

    victim: Part
    shadows: tuple[Part, ...]


def victim_shadow(n: int, shadows: int, rng: Generator) -> Split:
    """Split a pool of n rows as SAMIA does (USENIX Security 2022, Section 5.1.1).

    One half is for the victim and one for the shadows; each half is split 45/10/45. Every shadow splits the shadow half
    anew.
    """
    if n < SMALLEST:
        raise WrongInput("data", f"{n} rows cannot be split for a victim and its shadows; give at least {SMALLEST}")
    if shadows < 0:
        raise WrongInput("shadows", f"{shadows} is not allowed; give 0 or more")
    order = torch.randperm(n, generator=rng)
    victim, pool = order[: n // 2], order[n // 2 :]
    drawn = [_part(pool[torch.randperm(len(pool), generator=rng)]) for _ in range(shadows)]
    return Split(_part(victim), tuple(drawn))


def trained_split(n: int, members: int, shadows: int, rng: Generator) -> Split:
    """Return the split for a victim that is already trained: the first `members` rows are its members.

    A tenth of the other rows is for early stopping. The remainder is halved: non-members to attack, and the attacker's
    data.
    """
    outside = members + torch.randperm(n - members, generator=rng)
    tenth = len(outside) // 10
    nonmembers, attacker_rows = outside[tenth:].tensor_split(2)
    if len(attacker_rows) < SMALLEST:
        raise WrongInput("data", f"{len(outside)} rows lie outside the members; give at least {2 * SMALLEST + 4}")
    drawn = [_part(attacker_rows[torch.randperm(len(attacker_rows), generator=rng)]) for _ in range(shadows)]
    return Split(Part(torch.arange(members), outside[:tenth], nonmembers), tuple(drawn))


def _part(rows: Tensor) -> Part:
    """Split shuffled rows 45/10/45: test and validation are rounded up, train gets the remainder."""
    test = -(-len(rows) * 45 // 100)
    validation = -(-len(rows) // 10)
    train = len(rows) - validation - test
    return Part(*rows.split_with_sizes([train, validation, test]))


def in_out(n: int, models: int, rng: Generator) -> Tensor:
    """Return a (models, n) bool matrix, True if the row trains the model; every row trains exactly half of the models.

    Online LiRA and RMIA use this design.
    """
    if models < 2 or models % 2:
        raise WrongInput("models", f"{models} is not allowed; give an even number, so that each row is in half of them")
    ranks = torch.rand(models, n, generator=rng).argsort(dim=0)  # a random order of the models for every row
    return ranks < models // 2
