"""As many fixed sets as there are clients."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Random, turn


@method("submodel", "ufr", "mapp_fl")
@dataclass(frozen=True)
class UniqueFixedRandom(Random):
    """As many fixed random sets as clients, dealt out anew in every round (UFR; mapp_fl Section 5.4)."""

    def set_of(self, at: Place) -> int:
        """The one that the client was dealt."""
        return turn(at)
