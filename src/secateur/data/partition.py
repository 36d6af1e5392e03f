"""Row indices: partitions of a data set among clients, and splits among a victim and the attacker's models.

The parts of a partition are disjoint and complete, and none is empty; those of `draw_shared` alone overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput, check_number, check_whole

MANY = 100_000  # clients: so many shares are counted before they are made
SMALLEST = 8  # rows of a split: with fewer, a half's training part is empty
ADVICE = "train_size is the number of members, which come first"
FEMNIST_GROUPS = tuple(range(3, 28, 3))  # writers per client in MaPP-FL; a tenth client gets all others


class Shares(Sequence[Tensor]):
    """The rows of many clients in one tensor; a client's share is a view, made when it is asked for.

    Example:
        >>> shares = Shares(torch.arange(5), [3, 2])
        >>> shares[-1].tolist(), count_rows(shares)
        ([3, 4], [3, 2])
    """

    def __init__(self, rows: Tensor, sizes: Sequence[int]) -> None:
        self.rows, self.sizes = rows, list(sizes)
        self._ends: list[int] = np.cumsum(self.sizes).tolist()

    @overload
    def __getitem__(self, client: int) -> Tensor: ...

    @overload
    def __getitem__(self, client: slice) -> list[Tensor]: ...

    def __getitem__(self, client: int | slice) -> Tensor | list[Tensor]:
        if isinstance(client, slice):
            return [self[index] for index in range(len(self))[client]]
        end = self._ends[client]
        return self.rows[end - self.sizes[client] : end]

    def __len__(self) -> int:
        return len(self.sizes)


def count_rows(shares: Sequence[Tensor]) -> list[int]:
    """Return the number of rows of each client."""
    return shares.sizes if isinstance(shares, Shares) else [len(rows) for rows in shares]


def iid(n: int, clients: int, rng: Generator) -> Shares:
    """Return equal shares of n shuffled rows."""
    _check_clients(clients, n)
    sizes = [n // clients + (client < n % clients) for client in range(clients)]
    _check_sizes(sizes)
    return Shares(torch.randperm(n, generator=rng), sizes)


def draw_shared(n: int, clients: int, size: int, rng: Generator) -> Shares:
    """Return shares of `size` rows that other clients may have too, for more clients than rows.

    Clients take their rows in passes over all rows, each in a new order. So a client has different rows.
    """
    check_whole("clients", clients)
    check_number("client_rows", size, f"[1, {n}]")
    in_pass = n // size
    passes = [torch.randperm(n, generator=rng)[: in_pass * size] for _ in range(-(-clients // in_pass))]
    return Shares(torch.cat(passes)[: clients * size], [size] * clients)


def dirichlet_labels(labels: Tensor, clients: int, alpha: float, rng: Generator) -> list[Tensor]:
    """Return shares with label skew: every class is divided by a draw from Dir(alpha).

    A small alpha gives clients few classes.
    """
    _check_clients(clients, len(labels))
    check_number("alpha", alpha, "(0, inf)")
    numpy_rng = np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))
    dealt = []
    for rows in _group_by_value(labels):
        shares = numpy_rng.dirichlet([alpha] * clients)
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        dealt.append(_shuffle(rows, numpy_rng).tensor_split(cuts.tolist()))
    return _join_classes(dealt)


def dirichlet_sizes(
    labels: Tensor, clients: int, alpha: float = 0.85, seed: int = 41, deal: int | None = None
) -> list[Tensor]:
    """Return shares of unequal sizes and equal class balance, biggest first (MaPP-FL, Section 5.3 and Table 2).

    One draw of shares from Dir(alpha) serves every class. Seed 41 gives ten clients of CIFAR-10 the paper's sizes.
    `deal` is the seed for the assignment of rows to clients; None continues the generator that drew the shares.
    """
    _check_clients(clients, len(labels))
    check_number("alpha", alpha, "(0, inf)")
    numpy_rng = np.random.default_rng(seed)
    shares = np.sort(numpy_rng.dirichlet([alpha] * clients))[::-1]
    numpy_rng = numpy_rng if deal is None else np.random.default_rng(deal)
    dealt = []
    for rows in _group_by_value(labels):
        counts = _counts(shares, len(rows))
        dealt.append(_shuffle(rows, numpy_rng).split_with_sizes(counts))
    return sorted(_join_classes(dealt), key=len, reverse=True)


def _check_clients(clients: int, rows: int) -> None:
    """Refuse so many more clients than rows that their empty shares would fill the memory."""
    check_whole("clients", clients)
    if clients > max(rows, MANY):
        raise _explain_empty(str(rows), clients)


def _counts(shares: np.ndarray, n: int) -> list[int]:
    """Divide n rows by rounded shares.

    Rows in excess are taken from the biggest shares; missing rows are added to the last share.

    Example:
        >>> _counts(np.array([0.5, 0.25, 0.25]), 6), _counts(np.array([0.5, 0.25, 0.25]), 5)
        ([2, 2, 2], [2, 1, 2])
    """
    counts: list[int] = np.rint(shares * n).astype(int).tolist()
    over = sum(counts) - n
    for client, count in enumerate(counts):  # beyond the first only if a class has fewer rows than clients
        reduction = max(0, min(count, over))
        counts[client] -= reduction
        over -= reduction
    counts[-1] -= over
    return counts


def by_writer(writers: Tensor) -> list[Tensor]:
    """Return one client per writer, in the order of the writers' numbers."""
    return _group_by_value(writers)


def writer_groups(writers: Tensor, sizes: Sequence[int], rng: Generator) -> list[Tensor]:
    """Return clients of `sizes` shuffled writers and one client of all other writers, biggest first.

    MaPP-FL divides FEMNIST so.
    """
    rows = _group_by_value(writers)
    for size in sizes:
        check_whole("sizes", size)
    if sum(sizes) >= len(rows):
        problem = f"its {len(rows)} writers are too few for clients of {', '.join(map(str, sizes))} and all others"
        raise WrongInput("data", f"{problem}; use data of at least {sum(sizes) + 1} writers")
    order = torch.randperm(len(rows), generator=rng).split_with_sizes([*sizes, len(rows) - sum(sizes)])
    parts = [torch.cat([rows[writer] for writer in group]) for group in order]
    return sorted(parts, key=len, reverse=True)


def _group_by_value(values: Tensor) -> list[Tensor]:
    """Return the rows of each distinct value, in the order of the values."""
    _, counts = torch.unique(values, return_counts=True)
    return list(values.argsort(stable=True).split_with_sizes(counts.tolist()))


def _shuffle(rows: Tensor, rng: np.random.Generator) -> Tensor:
    return rows[torch.from_numpy(rng.permutation(len(rows)))]


def _join_classes(dealt: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each client's rows over all classes."""
    return _check_parts([torch.cat(parts) for parts in zip(*dealt, strict=True)])


def _check_parts(parts: list[Tensor]) -> list[Tensor]:
    _check_sizes([len(rows) for rows in parts])
    return parts


def _check_sizes(sizes: Sequence[int]) -> None:
    empty = [str(client) for client, size in enumerate(sizes) if size == 0]
    if empty:
        listed = ", ".join(empty[:3]) + (" and others" if len(empty) > 3 else "")
        raise _explain_empty(listed, len(sizes))


def _explain_empty(listed: str, clients: int) -> WrongInput:
    advice = "use more rows, fewer clients, a larger alpha or the partition shared"
    return WrongInput("clients", f"no rows are left for client {listed} of {clients}; {advice}")


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


def victim_shadow(n: int, shadows: int, rng: Generator, population: Tensor | None = None) -> Split:
    """Split a pool of n rows as SAMIA does (USENIX Security 2022, Section 5.1.1).

    One half is for the victim and one for the shadows; each half is split 45/10/45. Every shadow splits the shadow half
    anew. The attacker's population (P,) joins the shadow half.
    """
    if n < SMALLEST:
        raise WrongInput("data", f"{n} rows cannot be split for a victim and its shadows; use at least {SMALLEST}")
    check_whole("shadows", shadows, least=0)
    order = torch.randperm(n, generator=rng)
    victim, pool = order[: n // 2], order[n // 2 :]
    if population is None:
        return Split(_part(victim), _draw(pool, shadows, rng))
    part = _part(victim)
    return Split(part, _draw(torch.cat([pool, population]), shadows, rng, most=len(part.train)))


def _draw(pool: Tensor, shadows: int, rng: Generator, most: int | None = None) -> tuple[Part, ...]:
    """Return the parts of the shadows, each a new split of the attacker's rows."""
    return tuple(_part(pool[torch.randperm(len(pool), generator=rng)], most) for _ in range(shadows))


def split_trained(n: int, members: int, shadows: int, rng: Generator, population: Tensor | None = None) -> Split:
    """Return the split for a victim that is already trained: the first `members` rows are its members.

    A tenth of the other rows is for early stopping. The remainder is halved: non-members to attack, and the attacker's
    data. Without shadows, or with a population (P,) of the attacker's, all of it are non-members to attack.
    """
    if members == n:
        raise WrongInput("data", f"all {n} rows are members, as if train_size were missing; set it: {ADVICE}")
    outside = members + torch.randperm(n - members, generator=rng)
    tenth = len(outside) // 10
    if not shadows or population is not None:
        if len(outside) < SMALLEST + 2:  # with fewer, no row is left for early stopping
            raise WrongInput(
                "data", f"{len(outside)} rows lie outside the members; use at least {SMALLEST + 2}; {ADVICE}"
            )
        drawn = () if population is None else _draw(population, shadows, rng, most=members)
        return Split(Part(torch.arange(members), outside[:tenth], outside[tenth:]), drawn)
    nonmembers, attacker_rows = outside[tenth:].tensor_split(2)
    if len(attacker_rows) < SMALLEST:
        raise WrongInput(
            "data", f"{len(outside)} rows lie outside the members; use at least {2 * SMALLEST + 4}; {ADVICE}"
        )
    return Split(Part(torch.arange(members), outside[:tenth], nonmembers), _draw(attacker_rows, shadows, rng))


def _part(rows: Tensor, most: int | None = None) -> Part:
    """Split shuffled rows 45/10/45: test and validation are rounded up, train gets the remainder.

    At most `most` rows are for training, and test gets the others: a shadow is trained on no more rows than the victim.
    """
    test = -(-len(rows) * 45 // 100)
    validation = -(-len(rows) // 10)
    train = len(rows) - validation - test
    train = train if most is None else min(train, most)
    return Part(*rows.split_with_sizes([train, validation, len(rows) - train - validation]))


def halve(part: Part, rng: Generator) -> tuple[Part, Part]:
    """Split the members and the non-members of a part at random: one half to choose on, one to confirm on.

    Both halves keep all rows for early stopping, which are neither. An odd row goes to the second half.
    """
    if min(len(part.train), len(part.test)) < 2:
        sizes = f"{len(part.train)} members and {len(part.test)} non-members"
        raise WrongInput("data", f"{sizes} cannot be halved; use more rows")
    sides = []
    for rows in (part.train, part.test):
        shuffled = rows[torch.randperm(len(rows), generator=rng)]
        sides.append((shuffled[: len(rows) // 2], shuffled[len(rows) // 2 :]))
    (members, more_members), (others, more_others) = sides
    return Part(members, part.validation, others), Part(more_members, part.validation, more_others)


def in_out_pool(victim: Part, population: Tensor, rng: Generator) -> Tensor:
    """Return the rows of in-out models: members, non-members, and rows of the attacker's population (P,), shuffled.

    Half of them train a model. As many rows join as give it the victim's number of rows, and at least a tenth.
    """
    pool = torch.cat([victim.train, victim.test])
    joined = min(len(population), max(2 * len(victim.train) - len(pool), len(pool) // 10))
    return torch.cat([pool, population[torch.randperm(len(population), generator=rng)[:joined]]])


def in_out(n: int, models: int, rng: Generator) -> Tensor:
    """Return a (models, n) bool matrix, True if the row trains the model; every row trains exactly half of the models.

    Online LiRA and RMIA use this design.
    """
    check_whole("models", models, least=2, even=True)
    ranks = torch.rand(models, n, generator=rng).argsort(dim=0)  # a random order of the models for every row
    return ranks < models // 2
