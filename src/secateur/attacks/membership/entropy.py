"""The entropy of the prediction: Xent as the authors' code has it."""

from __future__ import annotations

from torch import Tensor

from secateur.attacks.membership.mentr import FLOOR
from secateur.attacks.membership.thresholds import ThresholdAttack
from secateur.catalogue import method


def negative_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The sum of p_k log p_k: the entropy with its sign turned, so that high means member; the label is not used."""
    p = probabilities.double()
    return (p * p.clamp_min(FLOOR).log()).sum(1)


@method("attack", "entropy", "samia_ppb", sees="probabilities", shadows="needed")
def entropy() -> ThresholdAttack:
    """Member where the prediction's entropy is at most its class's threshold (the code of samia_ppb for Xent)."""
    return ThresholdAttack(negative_entropy)
