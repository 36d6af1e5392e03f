"""NN: a network that sees the probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from secateur.attacks.membership.networks import NetworkAttack
from secateur.catalogue import method
from secateur.interfaces import Batch, BlackBox
from secateur.queries import probabilities


@method("attack", "nn", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Nn(NetworkAttack):
    """An MLP tells members by all probabilities (Shokri et al. 2017; samia_ppb 5.1, NN)."""

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """(N, K) p."""
        return probabilities(box, batch.inputs)
