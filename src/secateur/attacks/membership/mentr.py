"""Mentr: modified prediction entropy."""

from __future__ import annotations

from torch import Tensor

from secateur.attacks.membership.thresholds import ThresholdAttack
from secateur.catalogue import method

FLOOR = 1e-30  # keeps log finite; needs double precision


def negative_modified_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(1-p_y) log p_y + sum over t != y of p_t log(1-p_t): Mentr with its sign turned, so that high means member."""
    p = probabilities.double()
    p_true = p.gather(1, labels[:, None]).squeeze(1)
    others = p * (1 - p).clamp_min(FLOOR).log()
    others = others.scatter(1, labels[:, None], 0).sum(1)
    return (1 - p_true) * p_true.clamp_min(FLOOR).log() + others


@method("attack", "mentr", "samia_ppb", sees="probabilities", shadows="needed")
def mentr() -> ThresholdAttack:
    """Member where the modified entropy is at most its class's threshold (samia_ppb 5.1, Mentr)."""
    return ThresholdAttack(negative_modified_entropy)
