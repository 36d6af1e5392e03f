"""Local: clients that would rather not take part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.federated.submodels.rules import Place, Rule


@method("submodel", "local", "mapp_fl")
@dataclass(frozen=True)
class Local(Rule):
    """Every client trains a model of its size alone, with early stopping on a part of its data (mapp_fl Section 5.3).

    Stops after `patience` epochs without a lower loss on the part `validation`, and keeps the best epoch's model.
    """

    patience: int = 5
    validation: float = 0.1

    alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise WrongInput("patience", f"{self.patience} is not allowed; give a whole number from 1")
        if not 0 < self.validation < 1:
            raise WrongInput("validation", f"{self.validation} is not allowed; give a number between 0 and 1")

    def __call__(self, at: Place) -> np.ndarray:
        """The first channels: a model of the size, whose start is the server's."""
        return np.arange(at.keep)
