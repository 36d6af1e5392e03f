"""Base prunings of a federation (priprune Table 1): what its server, and in some its clients, remove to save bytes.

A mask names every Conv and Linear weight and nothing else: biases and BatchNorm are never pruned. `rate` is removed /
total over these weights, and exactly int(rate * total) are removed, at the start and after every adjustment.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

import torch
from torch import Generator, Tensor, nn

from secateur.errors import WrongInput
from secateur.interfaces import Batch, Mask, Params, Pruner


@dataclass(frozen=True)
class BasePruning(ABC):
    """What all have; a rule of its own overrides what it does. Rounds count from 1, and nothing given is changed."""

    rate: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.rate < 1:
            raise WrongInput("rate", f"{self.rate} is not allowed; give a number from 0 up to, not including, 1")

    def bound(self, net: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """The same, told of the network it will prune; asked for once, before `start`."""
        return self

    @abstractmethod
    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """The mask of round 1, at the server, of the model `state`."""

    def adjusts(self, round: int) -> bool:
        """Whether this round changes the mask; where not, `adjust` and `local` give back what they are given."""
        return False

    @property
    def wants_squares(self) -> bool:
        """Whether clients also send the squares of their dense gradients."""
        return False

    @property
    def spares_withheld(self) -> bool:
        """Whether these squares are 0 where a client withholds a weight; else they tell of it."""
        return False

    @property
    def keeps_dropped(self) -> bool:
        """Whether the server keeps the last value of a weight that the mask drops, so that it resumes it; else it is 0.

        A client never sees these: what is sent to it is masked.
        """
        return False

    def adjust(
        self, weights: Params, mask: Mask, squares: Params | None, round: int, rng: Generator
    ) -> tuple[Params, Mask]:
        """The server's weights and mask after a round's aggregation."""
        return weights, mask

    def local(self, weights: Params, gradient: Params, mask: Mask, round: int, rng: Generator | None = None) -> Mask:
        """The mask that a client goes on with; `gradient` is dense. Runs alone and under vmap."""
        return mask


def removed(rate: float, total: int) -> int:
    """How many of so many weights a rate removes.

    Example:
        >>> removed(0.3, 99)
        29
    """
    return int(rate * total)


def pruned_once(pruner: Pruner, net: nn.Module, state: Params, batch: Batch, rate: float, rng: Generator) -> Mask:
    """What a pruner keeps of the model `state`, whose structure `net` is."""
    twin = copy.deepcopy(net).to(next(iter(state.values())).device)
    twin.load_state_dict(state)
    return pruner(twin, batch, rate, rng)


def every_so_often(field: str, every: int) -> None:
    """Refuse an interval that is none."""
    if every < 1:
        raise WrongInput(field, f"{every} is not allowed; give a whole number from 1")


def total_of(mask: Mask) -> int:
    """How many weights may be pruned."""
    return sum(keep.numel() for keep in mask.values())


def drawn(mask: Mask, rng: Generator) -> dict[str, Tensor]:
    """Uniform draws for every weight of a mask, in float64, where equal ones do not occur."""
    return {
        name: torch.rand(keep.shape, generator=rng, device=rng.device, dtype=torch.float64).to(keep.device)
        for name, keep in mask.items()
    }
