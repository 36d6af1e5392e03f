"""The server's average, cell by cell: over those clients that trained a cell and sent it (HeteroFL; mapp_fl Fig. 2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from secateur.federated.submodels.cutting import Cut, flat_of


class Cells:
    """Adds up what clients send, where it belongs in the server's flat vector.

    Example:
        >>> cells = Cells(torch.tensor([5.0, 6.0, 7.0]))
        >>> cells.add(torch.tensor([0, 2]), torch.tensor([1.0, 2.0]), 1.0)
        >>> cells.add(torch.tensor([2]), torch.tensor([8.0]), 1.0)
        >>> cells.average("keep").tolist(), cells.average("zero").tolist()
        ([1.0, 6.0, 5.0], [1.0, 0.0, 5.0])
    """

    def __init__(self, before: Tensor, exact: bool = False) -> None:
        self.before = before
        dtype = torch.float64 if exact else before.dtype  # then the order of adding changes nothing that is seen
        self.total, self.count = (torch.zeros_like(before, dtype=dtype) for _ in range(2))

    def add(self, index: Tensor, flat: Tensor, weight: float, covered: Tensor | None = None) -> None:
        """One client's numbers and their places; `covered` is 1 where one counts, else 0 (None: all count)."""
        flat = flat.to(self.total.dtype)
        counted = torch.ones_like(flat) if covered is None else covered.to(flat.dtype)
        self.total.index_add_(0, index, flat * counted, alpha=weight)
        self.count.index_add_(0, index, counted, alpha=weight)

    def average(self, uncovered: str) -> Tensor:
        """The mean of each cell; what nobody trained keeps its value, or becomes zero."""
        missing = self.before if uncovered == "keep" else torch.zeros_like(self.before)
        return torch.where(self.count > 0, self.total / self.count, missing).to(self.before.dtype)

    @property
    def share(self) -> float:
        """Of all cells those that somebody trained."""
        return float((self.count > 0).double().mean())


def of_own_labels(owned: Tensor, outputs: Sequence[str], cut: Cut) -> Tensor:
    """(P_c,) 1 where a client's cell counts: of the classifier `outputs` the rows of the labels that it owns alone."""
    ends = {f"{name}.{part}" for name in outputs for part in ("weight", "bias")}
    found = {name: owned.new_ones(shape) for name, shape in cut.shapes.items()}
    for name in ends & found.keys():
        found[name] *= owned.view(-1, *(1 for _ in cut.shapes[name][1:]))
    return flat_of(found)
