"""Federated Dropout."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Random, turn


@method("submodel", "fdropout", "mapp_fl")
@dataclass(frozen=True)
class FederatedDropout(Random):
    """Random channels of a client's own, new in every round (FDropout, USR; Caldas et al. 2018, mapp_fl Eq. 6)."""

    def set_of(self, at: Place) -> int:
        """Unique to the client and the round."""
        return turn(at) + at.clients * at.round
