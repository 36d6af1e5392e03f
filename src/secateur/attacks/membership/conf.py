"""Conf: how sure is the model of the true label?"""

from __future__ import annotations

from torch import Tensor

from secateur.attacks.membership.thresholds import ThresholdAttack
from secateur.catalogue import method


def true_probability(probabilities: Tensor, labels: Tensor) -> Tensor:
    """p_y."""
    return probabilities.gather(1, labels[:, None]).squeeze(1)


@method("attack", "conf", "samia_ppb", sees="probabilities", shadows="needed")
def conf() -> ThresholdAttack:
    """Member where the true label's probability reaches its class's threshold (samia_ppb 5.1, Conf)."""
    return ThresholdAttack(true_probability)
