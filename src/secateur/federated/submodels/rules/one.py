"""One set of channels for everybody, another one in every round (mapp_fl Section 5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Random, Rule, block, squared
from secateur.pruning.masks import one_of


@method("submodel", "osr", "mapp_fl")
@dataclass(frozen=True)
class OneResampledRandom(Random):
    """One random set of channels for all clients, drawn anew in every round (OSR; mapp_fl Section 5.4)."""

    def set_of(self, at: Place) -> int:
        """The round's."""
        return at.round


@method("submodel", "osm", "mapp_fl")
@dataclass(frozen=True)
class OneResampledBlock(Rule):
    """One group's block of each layer, another group in every round (OSM; mapp_fl Section 5.4).

    Its two readings: in the authors' code all clients train the block of group t % 4; the paper says that one is
    selected at random for each client in each round.
    """

    reading: Literal["code", "paper"] = "code"
    groups: int = 4

    def __post_init__(self) -> None:
        one_of("reading", self.reading, ("code", "paper"))
        squared(self.groups)

    @property
    def most_groups(self) -> int:
        """Groups that no layer may have fewer channels than."""
        return self.groups

    def __call__(self, at: Place) -> np.ndarray:
        """The block of the round's group, or of the client's."""
        drawn = np.random.RandomState(at.round).randint(self.groups, size=at.clients)[at.client]
        return block(at, at.round % self.groups if self.reading == "code" else int(drawn), self.groups)
