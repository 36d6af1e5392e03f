"""No base pruning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, nn

from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.federated.base import BasePruning
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import weights_of


@method("base-pruning", "none", "-", cycles="never", at_client=False)
@dataclass(frozen=True)
class NoPruning(BasePruning):
    """Keeps every weight: plain federated averaging."""

    rate: float = 0.0

    def __post_init__(self) -> None:
        if self.rate != 0:
            raise WrongInput("rate", f"{self.rate} is not allowed; base pruning none removes nothing")

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """All of it."""
        return {name: torch.ones_like(state[name], dtype=torch.bool) for name in weights_of(net)}
