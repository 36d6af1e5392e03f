"""Top1-Conf: how sure is the model of its own answer?"""

from __future__ import annotations

from torch import Tensor

from secateur.attacks.membership.conf import true_probability
from secateur.attacks.membership.thresholds import ThresholdAttack
from secateur.catalogue import method
from secateur.errors import unknown


def top_probability(probabilities: Tensor, labels: Tensor) -> Tensor:
    """The largest p_k; the label is not used."""
    return probabilities.amax(1)


FORMS = {"paper": top_probability, "code": true_probability}


@method("attack", "top1-conf", "samia_ppb", sees="probabilities", shadows="needed")
def top1_conf(form: str = "paper") -> ThresholdAttack:
    """Member where the largest probability reaches one threshold for all classes (samia_ppb 5.1, Top1-Conf).

    `form` is `paper`, or `code`: the authors' code compares the true label's probability instead.
    """
    if form not in FORMS:
        raise unknown("attack top1-conf form", form, FORMS)
    return ThresholdAttack(FORMS[form], per_class=False)
