"""GI: two attacks with one name. DGP's GI is GradInversion (Yin et al.); PriPrune's GI is IG (Geiping et al.)."""

from __future__ import annotations

from dataclasses import dataclass

from secateur.attacks.inversion.gradient_matching import GradientMatching
from secateur.attacks.inversion.ig import IG
from secateur.attacks.inversion.label_inference import Rule
from secateur.attacks.inversion.optimisation import Schedule
from secateur.attacks.inversion.problem import Distance
from secateur.catalogue import method

THREAT = (
    "an honest-but-curious server that knows the network, the batch size and its BatchNorm statistics: the running "
    "ones, or, much stronger, the batch's own where it is told them"
)
PRIPRUNE = "an honest-but-curious server that knows the network and the batch size"
DEMO = {"iterations": 90}


@method("inversion", "gi", "dgp", threat=THREAT, active=False, demo=DEMO | {"restarts": 2})
@dataclass(frozen=True)
class GI(GradientMatching):
    """GI, GradInversion (Yin et al. 2021; in DGP, AAAI 2024): Euclidean, with BatchNorm and group consistency.

    The objective is a_G ||g - g*||^2 + a_TV TV + a_l2 ||x||^2 + a_BN R_BN + a_group ||x - consensus||^2. The optimiser
    is Adam at rate .1 with 50 steps of warm-up, cosine decay and noise .2 on the pixels. The consensus is the mean of 8
    seeds, each registered to their plain mean; registration.py stands in for the authors' RANSAC-flow. None of our
    sources states a_G; the default 1 does not scale the distance.

    Equation: `min over x of a_G |g - g*|^2 + a_TV TV(x) + a_l2 |x|^2 + a_BN R_BN(x) + a_group |x - consensus|^2`.
    """

    iterations: int = 20_000
    restarts: int = 8
    distance: Distance = "euclidean"
    tv: float = 1e-4
    l2: float = 1e-6
    batchnorm: float = 0.1
    group: float = 0.01
    registers: bool = True
    labels: Rule = "gi"
    schedule: Schedule = "warmup-cosine"
    noise: float = 0.2


@method("inversion", "gi-dgp-paper", "dgp", threat=THREAT, active=False, demo=DEMO)
@dataclass(frozen=True)
class GIDGPPaper(GI):
    """GI (Yin et al. 2021) as the paper DGP (AAAI 2024) runs it: Euclidean, Adam rate .1, 2500 iterations, one seed.

    Settings that the paper does not state follow its authors' code: signed, a_BN .01, noise .02. a_G is 1.
    """

    iterations: int = 2500
    restarts: int = 1
    batchnorm: float = 0.01
    group: float = 0.0
    sign: bool = True
    noise: float = 0.02


@method("inversion", "gi-dgp", "dgp", threat=THREAT, active=False, demo=DEMO | {"scale": 1.0})
@dataclass(frozen=True)
class GIDGP(GIDGPPaper):
    """GI (Yin et al. 2021) with the numbers of the DGP authors' code: 20 000 iterations, a_G 1e-4."""

    iterations: int = 20_000
    scale: float = 1e-4


@method("inversion", "gi-priprune", "priprune", threat=PRIPRUNE, active=False, demo=DEMO | {"learning_rate": 0.1})
@dataclass(frozen=True)
class GIPriPrune(IG):
    """GI of PriPrune (2024), which is IG (Geiping et al. 2020): cosine and TV, rate .01, 10 000 iterations.

    Labels are optimised with the picture, as in its Algorithm 2; a_TV is not stated.
    """

    iterations: int = 10_000
    learning_rate: float = 0.01
    labels: Rule = "joint"
