"""Channel rules: the channels of each layer that a client with a smaller model trains (mapp_fl Table 1b, Section 5.4).

A rule has three letters. O, G, U: one group, several groups, unique sets. F, S: fixed, or resampled in every round.
M, R: blocks of neighbouring channels, or random ones. All random draws are numpy's RandomState with the seeds of the
paper's code. So channel sets are the paper's, and do not depend on a run's seed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple, get_args

import numpy as np

from secateur.catalogue import method
from secateur.errors import WrongInput, check_numbers, check_wholes
from secateur.pruning.masks import check_name

Coupling = Literal["layer-wise", "independent"]


class RuleContext(NamedTuple):
    """The argument of a rule: a client, a round, and a layer of which the client keeps some channels."""

    client: int
    clients: int  # of the whole federation, including those with the whole model
    round: int  # from 1
    layer: int  # the number of layers before it
    depth: int  # steps from the input, which alternate between blocks; in a chain equal to `layer`
    keep: int  # channels that the client keeps
    of: int  # channels that the server has


@dataclass(frozen=True)
class Rule(ABC):
    """A choice of channels: a frozen dataclass whose fields are its hyper-parameters."""

    whole: ClassVar[bool] = False  # True: every client trains the whole model
    alone: ClassVar[bool] = False  # True: every client trains alone

    @abstractmethod
    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return the channels that the client trains, sorted."""

    def __post_init__(self) -> None:
        check_name("coupling", getattr(self, "coupling", "layer-wise"), get_args(Coupling))
        if getattr(self, "groups", 4) not in (4, 9, 16):  # squares: as many blocks of inputs as of outputs
            raise WrongInput("groups", f"{self.most_groups} is not allowed; must be 4, 9 or 16")

    @property
    def independent(self) -> bool:
        """True if a layer's inputs are drawn apart from the outputs of the layer before."""
        return getattr(self, "coupling", None) == "independent"

    @property
    def most_groups(self) -> int:
        """The number of groups; no layer may have fewer channels."""
        return getattr(self, "groups", 1)


@dataclass(frozen=True)
class RandomRule(Rule):
    """Random channels: coupled through the layers, or inputs and outputs apart (mapp_fl Table 6)."""

    coupling: Coupling = "layer-wise"

    @abstractmethod
    def set_of(self, at: RuleContext) -> int:
        """Return the number of the set that the client trains in this round."""

    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return the set's channels: the first of a permutation that depends on the set and the layer alone, sorted."""
        order = np.random.RandomState((self.set_of(at) + 1) * (at.layer + 1)).permutation(at.of)
        return np.sort(order[: at.keep])


@dataclass(frozen=True)
class GroupedRandom(RandomRule):
    """Random channels by groups of clients."""

    groups: int = 4


@method("submodel", "fdropout", "mapp_fl")
@dataclass(frozen=True)
class FederatedDropout(RandomRule):
    """Random channels of a client's own, new in every round (FDropout, USR; Caldas et al. 2018, mapp_fl Eq. 6).

    Equation: `S(client, round) = k random channels of K`.
    """

    def set_of(self, at: RuleContext) -> int:
        """Return a number unique to the client and the round."""
        return turn(at) + at.clients * at.round


@method("submodel", "heterofl", "mapp_fl")
@dataclass(frozen=True)
class HeteroFL(Rule):
    """The first channels of every layer (HeteroFL, OFM; Diao et al. 2021, mapp_fl Eq. 7).

    Equation: `S = {1, ..., k}, for all clients and rounds`.
    """

    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return the first channels: the top left of every weight matrix."""
        return np.arange(at.keep)


@method("submodel", "heterofl-r", "mapp_fl")
@dataclass(frozen=True)
class HeteroFLRandom(RandomRule):
    """One random set of channels for all clients and rounds (HeteroFL (R), OFR; mapp_fl Section 5.4).

    Equation: `S = k random channels of K, the same for all clients and rounds`.
    """

    def set_of(self, at: RuleContext) -> int:
        """Return 0: one set for all clients and rounds."""
        return 0


@method("submodel", "local", "mapp_fl")
@dataclass(frozen=True)
class LocalRule(Rule):
    """Every client trains a model of its size alone, with early stopping on a part of its data (mapp_fl Section 5.3).

    Stops after `patience` epochs without a lower loss on the part `validation`, and keeps the best epoch's model.

    Equation: `w_client = argmin of its own loss; nothing is averaged`.
    """

    patience: int = 5
    validation: float = 0.1

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_wholes(self, "patience")
        check_numbers(self, "(0, 1)", "validation")

    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return the first channels: a model of the client's size, whose start is the server's."""
        return np.arange(at.keep)


@method("submodel", "mapp-fl", "mapp_fl")
@dataclass(frozen=True)
class MappFL(Rule):
    """Clients are dealt into groups in every round, and a group trains its block of each layer (GFM; mapp_fl Eq. 8).

    Equation: `S(client, round) = block g of the channels; g(client) is dealt anew in every round`.
    """

    groups: int = 4

    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return the block of the client's group."""
        return block(at, turn(at) % self.groups, self.groups)


@method("submodel", "mapp-fl-r", "mapp_fl")
@dataclass(frozen=True)
class MappFLRandom(GroupedRandom):
    """Clients are dealt into groups in every round, whose channels are random and fixed (GFR; mapp_fl Section 5.4).

    Equation: `S(client, round) = R_g, k random channels, fixed; g(client) is dealt anew in every round`.
    """

    def set_of(self, at: RuleContext) -> int:
        """Return the client's group."""
        return turn(at) % self.groups


@method("submodel", "gsr", "mapp_fl")
@dataclass(frozen=True)
class GroupsResampledRandom(GroupedRandom):
    """Clients are dealt into groups with new random channels in every round (GSR; mapp_fl Section 5.4).

    Equation: `S(client, round) = R_g(round), k random channels; g(client) is dealt anew in every round`.
    """

    def set_of(self, at: RuleContext) -> int:
        """Return a number unique to the client's group and the round."""
        return turn(at) % self.groups + at.clients * at.round


@method("submodel", "none", "mapp_fl")
@dataclass(frozen=True)
class NoSubmodels(Rule):
    """Every client trains the whole model (FedAvg; McMahan et al. 2017, mapp_fl Eq. 3).

    Equation: `S = all channels; w = sum n w_client / sum n`.
    """

    whole: ClassVar[bool] = True

    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return all channels."""
        return np.arange(at.of)


@method("submodel", "osr", "mapp_fl")
@dataclass(frozen=True)
class OneResampledRandom(RandomRule):
    """One random set of channels for all clients, drawn anew in every round (OSR; mapp_fl Section 5.4).

    Equation: `S(round) = k random channels of K, for all clients`.
    """

    def set_of(self, at: RuleContext) -> int:
        """Return the round's number."""
        return at.round


@method("submodel", "osm", "mapp_fl")
@dataclass(frozen=True)
class OneResampledBlock(Rule):
    """One group's block of each layer, another group in every round (OSM; mapp_fl Section 5.4).

    There are two readings. In the authors' code all clients train the block of group t % 4. In the paper one group is
    selected at random for each client in each round.

    Equation: `S(round) = block (round mod 4) of the channels, for all clients`.
    """

    reading: Literal["code", "paper"] = "code"
    groups: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("reading", self.reading, ("code", "paper"))

    def __call__(self, at: RuleContext) -> np.ndarray:
        """Return the block of the round's group, or of the client's."""
        drawn = np.random.RandomState(at.round).randint(self.groups, size=at.clients)[at.client]
        return block(at, at.round % self.groups if self.reading == "code" else int(drawn), self.groups)


@method("submodel", "ufr", "mapp_fl")
@dataclass(frozen=True)
class UniqueFixedRandom(RandomRule):
    """Fixed random sets, one for each client, assigned anew in every round (UFR; mapp_fl Section 5.4).

    Equation: `S(client, round) = R_c, k random channels, fixed; c is dealt anew in every round`.
    """

    def set_of(self, at: RuleContext) -> int:
        """Return the set that the client was dealt."""
        return turn(at)


def turn(at: RuleContext) -> int:
    """Return the client's place in the round's permutation of all clients."""
    return _order(at.round, at.clients)[at.client]


@lru_cache(maxsize=16)  # called for every client and layer
def _order(number: int, clients: int) -> list[int]:
    order: list[int] = np.random.RandomState(number).permutation(clients).tolist()
    return order


def block(at: RuleContext, group: int, groups: int) -> np.ndarray:
    """Return a group's block of neighbouring channels: of k blocks `group % k` on even depths, `group // k` on odd.

    With k^2 groups every pair of an input and an output block is one group's (mapp_fl Eq. 8 for k = 2).

    Example:
        >>> at = RuleContext(client=0, clients=10, round=1, layer=0, depth=0, keep=2, of=4)
        >>> [block(at, group, 4).tolist() for group in range(4)]
        [[0, 1], [2, 3], [0, 1], [2, 3]]
        >>> [block(at._replace(depth=1), group, 4).tolist() for group in range(4)]
        [[0, 1], [0, 1], [2, 3], [2, 3]]
    """
    k = math.isqrt(groups)
    number = group // k if at.depth % 2 else group % k
    start = number * (at.of - at.keep) // max(1, k - 1)
    return np.arange(start, start + at.keep)
