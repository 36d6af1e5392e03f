"""NNcls: a network that sees the probabilities and the true label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot

from secateur.attacks.membership.networks import NetworkAttack
from secateur.catalogue import method
from secateur.interfaces import Batch, BlackBox
from secateur.queries import probabilities


@method("attack", "nn-cls", "samia_ppb", sees="probabilities", shadows="needed")
@dataclass(frozen=True)
class NnCls(NetworkAttack):
    """An MLP tells members by all probabilities and the true label (Nasr et al. 2018; samia_ppb 5.1, NNcls)."""

    def features(self, box: BlackBox, batch: Batch, rng: Generator) -> Tensor:
        """(N, 2K) p and the one-hot label."""
        p = probabilities(box, batch.inputs)
        return torch.cat([p, one_hot(batch.labels, p.shape[1]).to(p)], 1)
