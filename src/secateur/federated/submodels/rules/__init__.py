"""Channel rules: which channels of each layer a client with a smaller model trains (mapp_fl Table 1b, Section 5.4).

A rule's letters: one group, several groups or unique sets (O, G, U); fixed or resampled in every round (F, S); blocks
of neighbouring channels or random ones (M, R). All chance is numpy's RandomState with the seeds of the paper's code, so
that channel sets are the paper's; they do not depend on a run's seed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from secateur.errors import WrongInput
from secateur.pruning.masks import one_of

Coupling = Literal["layer-wise", "independent"]


class Place(NamedTuple):
    """Where a rule is asked: a client, a round, and a layer of which it keeps some channels."""

    client: int
    clients: int  # of the whole federation, those with the whole model among them
    round: int  # from 1
    layer: int  # how many layers come before it
    depth: int  # steps from the input to it, which alternate between blocks; in a chain equal to `layer`
    keep: int  # channels that the client keeps
    of: int  # channels that the server has


@dataclass(frozen=True)
class Rule(ABC):
    """Chooses channels: a frozen dataclass whose fields are its hyper-parameters."""

    whole: ClassVar[bool] = False  # everybody trains the whole model
    alone: ClassVar[bool] = False  # nobody shares anything

    @abstractmethod
    def __call__(self, at: Place) -> np.ndarray:
        """The channels that the client trains, sorted."""

    @property
    def independent(self) -> bool:
        """Whether a layer's inputs are drawn apart from the outputs of the layer before."""
        return False

    @property
    def most_groups(self) -> int:
        """Groups that no layer may have fewer channels than."""
        return 1


@dataclass(frozen=True)
class Random(Rule):
    """Random channels: coupled through the layers, or inputs and outputs apart (mapp_fl Table 6)."""

    coupling: Coupling = "layer-wise"

    def __post_init__(self) -> None:
        one_of("coupling", self.coupling, ("layer-wise", "independent"))

    @property
    def independent(self) -> bool:
        """Whether a layer's inputs are drawn apart from the outputs of the layer before."""
        return self.coupling == "independent"

    @abstractmethod
    def set_of(self, at: Place) -> int:
        """The number of the set that the client trains in this round."""

    def __call__(self, at: Place) -> np.ndarray:
        """The set's channels: sorted first of a permutation that depends on the set and the layer alone."""
        order = np.random.RandomState((self.set_of(at) + 1) * (at.layer + 1)).permutation(at.of)
        return np.sort(order[: at.keep])


def turn(at: Place) -> int:
    """The client's place in the round's permutation of all clients."""
    return _order(at.round, at.clients)[at.client]


@lru_cache(maxsize=16)  # asked by every client for every layer
def _order(number: int, clients: int) -> list[int]:
    order: list[int] = np.random.RandomState(number).permutation(clients).tolist()
    return order


def block(at: Place, group: int, groups: int) -> np.ndarray:
    """A group's block of neighbouring channels: `group % k` on even depths, `group // k` on odd ones, of k blocks.

    With k^2 groups every pair of an input and an output block is one group's (mapp_fl Eq. 8 for k = 2).

    Example:
        >>> at = Place(client=0, clients=10, round=1, layer=0, depth=0, keep=2, of=4)
        >>> [block(at, group, 4).tolist() for group in range(4)]
        [[0, 1], [2, 3], [0, 1], [2, 3]]
        >>> [block(at._replace(depth=1), group, 4).tolist() for group in range(4)]
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    k = math.isqrt(groups)
    number = group // k if at.depth % 2 else group % k
    start = number * (at.of - at.keep) // max(1, k - 1)
    return np.arange(start, start + at.keep)


def squared(groups: int) -> None:
    """Refuse a number of groups that does not make as many blocks of inputs as of outputs."""
    if groups not in (4, 9, 16):
        raise WrongInput("groups", f"{groups} is not allowed; give 4, 9 or 16")
