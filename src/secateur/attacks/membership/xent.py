"""Xent: the cross-entropy of the true label."""

from __future__ import annotations

from torch import Tensor

from secateur.attacks.membership.mentr import FLOOR
from secateur.attacks.membership.thresholds import ThresholdAttack
from secateur.catalogue import method


def negative_cross_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Log p_y: the loss with its sign turned, so that high means member."""
    return probabilities.double().gather(1, labels[:, None]).squeeze(1).clamp_min(FLOOR).log()


@method("attack", "xent", "samia_ppb", sees="probabilities", shadows="needed")
def xent() -> ThresholdAttack:
    """Member where the cross-entropy of the true label is at most its class's threshold (samia_ppb 5.1, Xent).

    It rises as p_y falls, so it ranks and decides as Conf does.
    """
    return ThresholdAttack(negative_cross_entropy)
