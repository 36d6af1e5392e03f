"""Several groups whose channels are drawn anew in every round."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Random, squared, turn


@method("submodel", "gsr", "mapp_fl")
@dataclass(frozen=True)
class GroupsResampledRandom(Random):
    """Clients are dealt into groups with new random channels in every round (GSR; mapp_fl Section 5.4)."""

    groups: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        squared(self.groups)

    @property
    def most_groups(self) -> int:
        """Groups that no layer may have fewer channels than."""
        return self.groups

    def set_of(self, at: Place) -> int:
        """The group's in this round."""
        return turn(at) % self.groups + at.clients * at.round
