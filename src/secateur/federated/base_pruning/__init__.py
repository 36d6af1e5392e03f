"""Base prunings of a federation (priprune Table 1): the server, and in some methods the clients, prune to save bytes.

A mask names every Conv and Linear weight and nothing else: biases and BatchNorm are never pruned. `rate` is removed /
total over these weights. Exactly int(rate * total) weights are removed, at the start and after every adjustment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from secateur.errors import check_numbers, check_wholes
from secateur.interfaces import Batch, Mask, Params


@dataclass(frozen=True)
class BasePruning(ABC):
    """Base class with defaults that a pruning rule overrides. Rounds count from 1; arguments are never modified."""

    rate: float = 0.3

    wants_squares: ClassVar[bool] = False  # True: clients also send the squares of their dense gradients
    # True: the server keeps the last value of a dropped weight, to resume from it; otherwise the value is 0. A client
    # never receives these values, because the model sent to clients is masked.
    keeps_dropped: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_numbers(self, "[0, 1)", "rate")
        check_wholes(self, *(["every"] if hasattr(self, "every") else []))

    def bound(self, net: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """Return this rule adapted to the network that it will prune; called once, before `start`."""
        return self

    @abstractmethod
    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """Return the server's mask of round 1, for the model `state`."""

    def adjusts(self, round: int) -> bool:
        """Return True if this round changes the mask; otherwise `adjust` and `local` return their arguments.

        A rule with a field `every` adjusts in every `every`-th round, any other one never.
        """
        every: int | None = getattr(self, "every", None)
        return every is not None and round % every == 0

    @property
    def spares_withheld(self) -> bool:
        """True if the squares are 0 at weights that a client withholds; otherwise they leak those weights."""
        return False

    def adjust(
        self, weights: Params, mask: Mask, squares: Params | None, round: int, rng: Generator
    ) -> tuple[Params, Mask]:
        """Return the server's weights and mask after a round's aggregation."""
        return weights, mask

    def local(self, weights: Params, gradient: Params, mask: Mask, round: int, rng: Generator | None = None) -> Mask:
        """Return the mask that a client continues with; `gradient` is dense. Must also run under vmap."""
        return mask


def count_removed(rate: float, total: int) -> int:
    """Return the number of weights that a rate removes of `total`.

    Example:
        >>> count_removed(0.3, 99)
        29
    """
    return int(rate * total)


def total_of(mask: Mask) -> int:
    """Return the number of prunable weights."""
    return sum(keep.numel() for keep in mask.values())


def draw_uniform(mask: Mask, rng: Generator) -> dict[str, Tensor]:
    """Return uniform draws for every weight of a mask; float64, so that ties do not occur."""
    return {
        name: torch.rand(keep.shape, generator=rng, device=rng.device, dtype=torch.float64).to(keep.device)
        for name, keep in mask.items()
    }
