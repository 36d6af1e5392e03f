"""FedAvg: everybody trains the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from secateur.catalogue import method
from secateur.federated.submodels.rules import Place, Rule


@method("submodel", "none", "mapp_fl")
@dataclass(frozen=True)
class NoSubmodels(Rule):
    """Every client trains the whole model (FedAvg; McMahan et al. 2017, mapp_fl Eq. 3)."""

    whole: ClassVar[bool] = True

    def __call__(self, at: Place) -> np.ndarray:
        """All channels."""
        return np.arange(at.of)
