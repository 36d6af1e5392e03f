"""MaPP-FL: groups of clients train different parts, which together are the whole."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Random, Rule, block, squared, turn


@method("submodel", "mapp-fl", "mapp_fl")
@dataclass(frozen=True)
class MappFL(Rule):
    """Clients are dealt into groups in every round, and a group trains its block of each layer (GFM; mapp_fl Eq. 8)."""

    groups: int = 4

    def __post_init__(self) -> None:
        squared(self.groups)

    @property
    def most_groups(self) -> int:
        """Groups that no layer may have fewer channels than."""
        return self.groups

    def __call__(self, at: Place) -> np.ndarray:
        """The group's block."""
        return block(at, turn(at) % self.groups, self.groups)


@dataclass(frozen=True)
class GroupedRandom(Random):
    """Groups of clients with random channels."""

    groups: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        squared(self.groups)

    @property
    def most_groups(self) -> int:
        """Groups that no layer may have fewer channels than."""
        return self.groups


@method("submodel", "mapp-fl-r", "mapp_fl")
@dataclass(frozen=True)
class MappFLRandom(GroupedRandom):
    """Clients are dealt into groups in every round, whose channels are random and fixed (GFR; mapp_fl Section 5.4)."""

    def set_of(self, at: Place) -> int:
        """The group's."""
        return turn(at) % self.groups
