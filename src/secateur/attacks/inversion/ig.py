"""IG: Inverting Gradients, with the settings of each source that ran it.

a_TV (`tv`) and the number of iterations differ between sources, and results depend on both. Every result records them.
"""

from __future__ import annotations

from dataclasses import dataclass

from secateur.attacks.inversion.gradient_matching import GradientMatching
from secateur.attacks.inversion.optimisation import Schedule
from secateur.catalogue import method

THREAT = "an honest-but-curious server that knows the network, the batch size and how BatchNorm normalised"
DEMO = {"iterations": 90}


@method("inversion", "ig", "dgp", threat=THREAT, active=False, demo=DEMO, calibrated=True)
@dataclass(frozen=True)
class IG(GradientMatching):
    """IG (Geiping et al. 2020) as the paper DGP (AAAI 2024) runs it: cosine and TV, signed Adam, 2500 iterations.

    The objective is 1 - <g, g*> / (|g| |g*|) + a_TV TV(x). The rate is .1, times 0.1 at 3/8, 5/8 and 7/8 of the
    iterations; pictures are clamped to the valid range. DGP states no a_TV. Unless `tv` is set, `secateur`
    chooses it on pictures of the attacker's own; the class alone has that of ATS (Gao et al. 2021), which DGP follows.

    Equation: `min over x of 1 - <g, g*> / (|g| |g*|) + a_TV TV(x)`.
    """

    iterations: int = 2500
    tv: float = 1e-4
    sign: bool = True
    schedule: Schedule = "steps"


@method("inversion", "ig-dgp", "dgp", threat=THREAT, active=False, demo=DEMO)
@dataclass(frozen=True)
class IGDGP(IG):
    """IG (Geiping et al. 2020) with the numbers of the DGP authors' code: 12 000 iterations, a_TV .2."""

    iterations: int = 12_000
    tv: float = 0.2


@method("inversion", "ig-geiping", "-", threat=THREAT, active=False, demo=DEMO)
@dataclass(frozen=True)
class IGGeiping(IG):
    """IG (Geiping et al. 2020) with its authors' numbers for one image: 4800 iterations, a_TV .1."""

    iterations: int = 4800
    tv: float = 1e-1


@method("inversion", "ig-geiping-24k", "-", threat=THREAT, active=False, demo=DEMO)
@dataclass(frozen=True)
class IGGeiping24k(IG):
    """IG (Geiping et al. 2020) with its authors' numbers for the long run: 24 000 iterations, a_TV 1e-4."""

    iterations: int = 24_000
    tv: float = 1e-4


@method("inversion", "ig-breaching", "-", threat=THREAT, active=False, demo=DEMO)
@dataclass(frozen=True)
class IGBreaching(IG):
    """IG (Geiping et al. 2020) as the package breaching sets it: 24 000 iterations, a_TV .2 on half of dx + dy."""

    iterations: int = 24_000
    tv: float = 0.2
    tv_average: bool = True


@method("inversion", "ig-ats", "-", threat=THREAT, active=False, demo=DEMO)
@dataclass(frozen=True)
class IGATS(IG):
    """IG (Geiping et al. 2020) as ATS (Gao et al. 2021) runs it: 4800 iterations, a_TV 1e-4."""

    iterations: int = 4800
    tv: float = 1e-4


@method("inversion", "ig-precode", "-", threat=THREAT, active=False, demo=DEMO | {"learning_rate": 0.1})
@dataclass(frozen=True)
class IGPrecode(IG):
    """IG (Geiping et al. 2020) as PRECODE (Scheliga et al. 2022) runs it: rate .01, 7000 iterations, a_TV 1e-6."""

    iterations: int = 7000
    learning_rate: float = 0.01
    tv: float = 1e-6


@method(
    "inversion", "ig-smooth", "-", threat=THREAT, active=False, strong_on="adam", demo=DEMO | {"learning_rate": 0.1}
)
@dataclass(frozen=True)
class IGSmooth(IG):
    """IG (Geiping et al. 2020) against ReLU, max-pooling and Adam: a smoothed objective in natural coordinates.

    Such networks' gradients jump with the pictures. So the objective is taken at noisy pictures, with less and less
    noise e (randomised smoothing, Duchi et al. 2012). The search is in cosines whose amplitude falls as 1/f, as in
    natural pictures (`natural`); a_N weighs the mean square of these coordinates z.

    Equation: `min over x of E_e[1 - <g(x + e), g*> / (|g(x + e)| |g*|)] + a_N mean(z(x)^2)`.
    """

    learning_rate: float = 0.05
    tv: float = 0.0
    sign: bool = False
    schedule: Schedule = "warmup-cosine"
    smoothing: float = 0.35
    natural: float = 0.15
    softness: float = 1.0
