"""Deep Leakage from Gradients (DLG) and iDLG, which reads the label from the gradient first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from secateur.attacks.inversion.gradient_matching import GradientMatching
from secateur.attacks.inversion.label_inference import Rule
from secateur.attacks.inversion.problem import Distance
from secateur.catalogue import method


@method(
    "inversion",
    "dlg",
    "priprune",
    threat="an honest-but-curious server that knows the network, the batch size and how BatchNorm normalised",
    active=False,
    demo={"iterations": 8},
)
@dataclass(frozen=True)
class DLG(GradientMatching):
    """DLG (Zhu et al. 2019; in PriPrune, 2024): picture and soft label whose gradient is nearest, by L-BFGS.

    Minimises the sum over parameters of ||g - g*||^2 from N(0, 1): 300 steps of up to 20 moves, learning rate 1,
    history 100. The network's activation must be differentiable twice (LeNet-Zhu). DLG diverges often: restarts help.

    Equation: `min over x, y of the sum over parameters of |g(x, softmax(y)) - g*|^2`.
    """

    iterations: int = 300
    learning_rate: float = 1.0
    distance: Distance = "euclidean"
    labels: Rule = "joint"
    optimizer: Literal["adam", "lbfgs"] = "lbfgs"
    box: bool = False


@method(
    "inversion",
    "idlg",
    "priprune",
    threat="an honest-but-curious server that knows the network, the batch size and how BatchNorm normalised; its rule "
    "for labels is exact for one example an update",
    active=False,
    demo={"iterations": 8},
)
@dataclass(frozen=True)
class IDLG(DLG):
    """iDLG (Zhao et al. 2020; in PriPrune, 2024): DLG with the label read from the last layer's gradient first.

    Equation: `label = argmin over c of the sum over j of dL/dW[c, j], W of the last layer`.
    """

    labels: Rule = "idlg"
