"""Top3-NN: a network that sees the three largest probabilities."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator, Tensor

from secateur.attacks.membership.networks import NetworkAttack
from secateur.catalogue import method
from secateur.interfaces import Batch, BlackBox
from secateur.queries import probabilities


@method("attack", "top3-nn", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class Top3Nn(NetworkAttack):
    """An MLP tells members by the three largest probabilities (Salem et al. 2019; samia_ppb 5.1, Top3-NN)."""

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """(N, 3) the largest p, in falling order; both where there are two classes."""
        p = probabilities(box, batch.inputs)
        return p.topk(min(3, p.shape[1]), 1).values
