"""HeteroFL: all smaller clients train the same channels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Random, Rule


@method("submodel", "heterofl", "mapp_fl")
@dataclass(frozen=True)
class HeteroFL(Rule):
    """The first channels of every layer (HeteroFL, OFM; Diao et al. 2021, mapp_fl Eq. 7)."""

    def __call__(self, at: Place) -> np.ndarray:
        """The top left of every weight matrix."""
        return np.arange(at.keep)


@method("submodel", "heterofl-r", "mapp_fl")
@dataclass(frozen=True)
class HeteroFLRandom(Random):
    """One random set of channels for all clients and rounds (HeteroFL (R), OFR; mapp_fl Section 5.4)."""

    def set_of(self, at: Place) -> int:
        """The same for all."""
        return 0
