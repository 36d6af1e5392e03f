"""Several groups whose channels are drawn anew in every round."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, turn
from secateur.federated.submodels.rules.mapp_fl import GroupedRandom


@method("submodel", "gsr", "mapp_fl")
@dataclass(frozen=True)
class GroupsResampledRandom(GroupedRandom):
    """Clients are dealt into groups with new random channels in every round (GSR; mapp_fl Section 5.4)."""

    def set_of(self, at: Place) -> int:
        """The group's in this round."""
        return turn(at) % self.groups + at.clients * at.round
