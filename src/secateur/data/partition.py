"""Partitions of a data set among clients: lists of row indices, disjoint, complete, none of them empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput

FEMNIST_GROUPS = tuple(range(3, 28, 3))  # writers per client in MaPP-FL; a tenth client gets all others


def iid(n: int, clients: int, rng: Generator) -> list[Tensor]:
    """Return equal shares of n shuffled rows."""
    _positive(clients)
    return _none_empty(list(torch.randperm(n, generator=rng).tensor_split(clients)))


def dirichlet_labels(labels: Tensor, clients: int, alpha: float, rng: Generator) -> list[Tensor]:
    """Return shares with label skew: every class is divided by a draw from Dir(alpha).

    A small alpha gives clients few classes.
    """
    _positive(clients, alpha)
    numpy_rng = _numpy(rng)
    dealt = []
    for rows in _by_value(labels):
        shares = numpy_rng.dirichlet([alpha] * clients)
        cuts = np.rint(np.cumsum(shares)[:-1] * len(rows)).astype(int)
        dealt.append(_shuffled(rows, numpy_rng).tensor_split(cuts.tolist()))
    return _joined(dealt)


def dirichlet_sizes(
    labels: Tensor, clients: int, alpha: float = 0.85, seed: int = 41, deal: int | None = None
) -> list[Tensor]:
    """Return shares of unequal sizes and equal class balance, biggest first (MaPP-FL, Section 5.3 and Table 2).

    One draw of shares from Dir(alpha) serves every class. Seed 41 gives ten clients of CIFAR-10 the paper's sizes.
    `deal` is the seed for the assignment of rows to clients; None continues the generator that drew the shares.
    """
    _positive(clients, alpha)
    numpy_rng = np.random.default_rng(seed)
    shares = np.sort(numpy_rng.dirichlet([alpha] * clients))[::-1]
    numpy_rng = numpy_rng if deal is None else np.random.default_rng(deal)
    dealt = []
    for rows in _by_value(labels):
        counts = _counts(shares, len(rows))
        dealt.append(_shuffled(rows, numpy_rng).split_with_sizes(counts))
    return _biggest_first(_joined(dealt))


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
    return _by_value(writers)


def writer_groups(writers: Tensor, sizes: Sequence[int], rng: Generator) -> list[Tensor]:
    """Return clients of `sizes` shuffled writers and one client of all other writers, biggest first.

    MaPP-FL divides FEMNIST so.
    """
    rows = _by_value(writers)
    if min(sizes, default=1) < 1:
        raise WrongInput("sizes", f"{min(sizes)} is not allowed; give whole numbers from 1")
    if sum(sizes) >= len(rows):
        problem = f"its {len(rows)} writers are too few for clients of {', '.join(map(str, sizes))} and all others"
        raise WrongInput("data", f"{problem}; give at least {sum(sizes) + 1}")
    order = torch.randperm(len(rows), generator=rng).split_with_sizes([*sizes, len(rows) - sum(sizes)])
    return _biggest_first([torch.cat([rows[writer] for writer in group]) for group in order])


def _by_value(values: Tensor) -> list[Tensor]:
    """Return the rows of each distinct value, in the order of the values."""
    _, counts = torch.unique(values, return_counts=True)
    return list(values.argsort(stable=True).split_with_sizes(counts.tolist()))


def _numpy(rng: Generator) -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**31, (), generator=rng)))


def _shuffled(rows: Tensor, rng: np.random.Generator) -> Tensor:
    return rows[torch.from_numpy(rng.permutation(len(rows)))]


def _joined(dealt: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return each client's rows over all classes."""
    return _none_empty([torch.cat(parts) for parts in zip(*dealt, strict=True)])


def _biggest_first(parts: list[Tensor]) -> list[Tensor]:
    return sorted(parts, key=len, reverse=True)


def _none_empty(parts: list[Tensor]) -> list[Tensor]:
    empty = [str(client) for client, rows in enumerate(parts) if len(rows) == 0]
    if empty:
        few = "more rows, fewer clients or, where there is one, a bigger alpha"
        listed = ", ".join(empty[:3]) + (" and others" if len(empty) > 3 else "")
        raise WrongInput("clients", f"no rows are left for client {listed} of {len(parts)}; give {few}")
    return parts


def _positive(clients: int, alpha: float = 1.0) -> None:
    if clients < 1:
        raise WrongInput("clients", f"{clients} is not allowed; give 1 or more")
    if not 0 < alpha < float("inf"):
        raise WrongInput("alpha", f"{alpha} is not allowed; give a number above 0")
