"""Averages of client updates: over the clients that sent an entry, weighted by data (PriPrune), or uniform.

| name     | average of values v_k, of clients with n_k examples, that sent the entries m_k                         |
|----------|--------------------------------------------------------------------------------------------------------|
| coverage | sum n_k m_k v_k / sum n_k m_k: over the clients that sent it; an entry that nobody sent is unchanged    |
| weighted | sum n_k v_k / sum n_k: an entry that a client withheld counts as its zero (PriPrune, Algorithm 1)       |
| uniform  | sum v_k / K: a withheld entry counts as 0 here too                                                      |

If nothing is withheld, the first two are equal.

If clients choose their own masks m_k (FedDST), all three average an entry over the clients whose mask keeps it. Then
weighted is sum n_k m_k v_k / sum n_k m_k, as in FedDST. An entry that is withheld inside m_k still counts as 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.errors import unknown
from secateur.gpu.client_ops import add_weighted
from secateur.interfaces import Mask, Params

AVERAGINGS = ("coverage", "weighted", "uniform")


class Average:
    """Running average of updates, summed on their device without synchronising with it.

    `exact` sums in float64, so that the order of arrival does not change the float32 result. `by_entry` divides each
    entry by the weight of the clients that own it, as coverage does.

    Example:
        >>> average = Average("weighted", {"w": torch.zeros(2)})
        >>> average.add({"w": torch.tensor([1.0, 1.0])}, 1)
        >>> average.add({"w": torch.tensor([3.0, 0.0])}, 3)
        >>> average.result({"w": torch.zeros(2)})["w"].tolist()
        [2.5, 0.25]
    """

    def __init__(self, how: str, like: Params, exact: bool = False, by_entry: bool = False) -> None:
        if how not in AVERAGINGS:
            raise unknown("averaging", how, AVERAGINGS)
        self.how = how
        self.total = zeros(like, exact)
        self.covered = zeros(like, exact) if by_entry or how == "coverage" else {}
        self.weight: Tensor | float = 0.0

    @torch.no_grad()
    def add(self, values: Params, size: int, mask: Mask | None = None, alive: Tensor | None = None) -> None:
        """Add the values of one client.

        Args:
            values: weights or gradients by name.
            size: number of the client's examples.
            mask: entries that belong to the client; all entries of a name that is absent.
            alive: () False if the client does not count; then nothing is added, even if the values are not finite.
        """
        weight = 1.0 if self.how == "uniform" else float(size)
        flat = [values[name] for name in self.total]
        if alive is not None:
            flat = [torch.where(alive, value, 0) for value in flat]
        if flat:
            torch._foreach_add_(list(self.total.values()), flat, alpha=weight)
        counted: Tensor | float = weight if alive is None else weight * alive
        self.weight = self.weight + counted
        for name, total in self.covered.items():
            owned = None if mask is None else mask.get(name)
            total.add_(counted if owned is None else owned * counted)

    @torch.no_grad()
    def add_stacked(self, values: Params, sizes: Tensor, mask: Mask | None, alive: Tensor) -> None:
        """Add the values of many clients at once; every tensor is (clients, ...)."""
        weights = torch.where(alive, torch.ones_like(sizes) if self.how == "uniform" else sizes, 0)
        for name, total in self.total.items():
            add_weighted(total, values[name], weights)
        self.weight = self.weight + weights.sum()
        for name, total in self.covered.items():
            owned = None if mask is None else mask.get(name)
            if owned is None:
                total.add_(weights.sum())
            else:
                add_weighted(total, owned, weights)

    @torch.no_grad()
    def result(self, before: Params) -> Params:
        """Return the average; entries that nobody sent are taken from `before`."""
        if self.covered:
            return {
                name: torch.where(self.covered[name] > 0, total / self.covered[name], before[name])
                for name, total in self.total.items()
            }
        if isinstance(self.weight, Tensor):  # only the device knows if any client counted; reading it would block
            counted, weight = self.weight > 0, self.weight.clamp_min(1)
            return {n: torch.where(counted, total / weight, before[n]) for n, total in self.total.items()}
        if not self.weight or not self.total:
            return dict(before)
        return dict(zip(self.total, torch._foreach_div(list(self.total.values()), self.weight), strict=True))


def zeros(like: Params, exact: bool = False) -> Params:
    """Return zeros to start sums from; in float64 if they must be exact."""
    return {name: torch.zeros_like(value, dtype=torch.float64 if exact else None) for name, value in like.items()}


def alive_of(values: Params) -> Tensor:
    """Return a bool () that is True if an update is finite; a NaN or an infinity always survives in its sums."""
    return torch.stack([value.sum() for value in values.values()]).sum().isfinite()
