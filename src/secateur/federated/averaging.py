"""How a server makes one update of many: over those who sent an entry, data-weighted as PriPrune prints it, or uniform.

| name     | average of values v_k, of clients with n_k examples, that sent the entries m_k                         |
|----------|--------------------------------------------------------------------------------------------------------|
| coverage | sum n_k m_k v_k / sum n_k m_k: over those who sent it; what nobody sent stays as it was                 |
| weighted | sum n_k v_k / sum n_k: an entry that a client withheld counts as its zero (PriPrune, Algorithm 1)       |
| uniform  | sum v_k / K: likewise                                                                                   |

Where nothing is withheld the first two are one.

Where clients chose masks m_k of their own (FedDST), an entry is of those whose mask keeps it, in all three: weighted is
sum n_k m_k v_k / sum n_k m_k, which is FedDST's, and what is withheld inside of m_k still counts as its zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.errors import unknown
from secateur.gpu.client_ops import add_weighted
from secateur.interfaces import Mask, Params

AVERAGINGS = ("coverage", "weighted", "uniform")


class Average:
    """Adds up updates as they come, on their device and without waiting for it.

    `exact` adds in float64, so that the order in which they come changes nothing that float32 shows. `by_entry` divides
    each entry by the weight of those whose it is, as coverage does.

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
    def add(self, values: Params, size: int, own: Mask | None = None, alive: Tensor | None = None) -> None:
        """One client's values; `own` tells which entries are its own (names absent: all), `alive` () whether it counts.

        Where `alive` is false nothing of the values is added, whatever they are.
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
            where = None if own is None else own.get(name)
            total.add_(counted if where is None else where * counted)

    @torch.no_grad()
    def add_stacked(self, values: Params, sizes: Tensor, own: Mask | None, alive: Tensor) -> None:
        """The same of many clients at once, everything (clients, ...)."""
        weights = torch.where(alive, torch.ones_like(sizes) if self.how == "uniform" else sizes, 0)
        for name, total in self.total.items():
            add_weighted(total, values[name], weights)
        self.weight = self.weight + weights.sum()
        for name, total in self.covered.items():
            where = None if own is None else own.get(name)
            if where is None:
                total.add_(weights.sum())
            else:
                add_weighted(total, where, weights)

    @torch.no_grad()
    def result(self, before: Params) -> Params:
        """The average; `before` where nobody sent anything."""
        if self.covered:
            return {
                name: torch.where(self.covered[name] > 0, total / self.covered[name], before[name])
                for name, total in self.total.items()
            }
        if isinstance(self.weight, Tensor):  # the device knows whether anybody counted, and is not asked
            anybody, weight = self.weight > 0, self.weight.clamp_min(1)
            return {n: torch.where(anybody, total / weight, before[n]) for n, total in self.total.items()}
        if not self.weight or not self.total:
            return dict(before)
        return dict(zip(self.total, torch._foreach_div(list(self.total.values()), self.weight), strict=True))


def zeros(like: Params, exact: bool = False) -> Params:
    """Where sums begin; in float64 where they are to be exact."""
    return {name: torch.zeros_like(value, dtype=torch.float64 if exact else None) for name, value in like.items()}


def alive_of(values: Params) -> Tensor:
    """() whether an update is finite, from its sums: a NaN or an infinity does not leave a sum."""
    return torch.stack([value.sum() for value in values.values()]).sum().isfinite()
