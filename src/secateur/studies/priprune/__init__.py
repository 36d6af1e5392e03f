"""The figures and tables of "PriPrune: Quantifying and Preserving Privacy in Pruned Federated Learning".

Each study is a number of federations and a table; Figs. 2, 4 and 5 are in theory.py. Networks and data sets are the
paper's. At smaller scales others stand in for them (settings.py), and every row names them.
"""

from __future__ import annotations

from itertools import product

from secateur.catalogue import method
from secateur.studies.priprune import attack_tables, defense_tables
from secateur.studies.priprune.attack_tables import GI, SGI
from secateur.studies.priprune.runner import FederatedStudy
from secateur.studies.priprune.scale import CIFAR10, FEMNIST, SCALES, PripruneScale
from secateur.studies.priprune.settings import Federations

SIZES = tuple(SCALES)
PAPER = "priprune"
FIVE = ("random", "snip", "synflow", "feddst", "prunefl")  # Fig. 3
WITHHOLDING = tuple(f"{form}{name}" for form in ("", "pseudo-") for name in ("largest", "random", "mix"))
UPLOADS = ("dgp+error-feedback", "top-k+error-feedback", "noise", "dp", "pseudo-largest+dp", "priprune+dp")
SUMMED = ("none", "pseudo-largest", "priprune")  # run under secure aggregation too
MIXES = ("0", "0.3333333333", "0.6666666667", "1")  # shares of the 30 % withheld: 0, 10, 20 and 30 % largest gradients
BOTH = (GI, SGI)  # also where one attack would do: studies in one folder then share the federations of Fig. 3
REMEMBERING = (SGI, f"{SGI}:follows=true")  # the paper's attack, and one that knows the client's last update
ALPHAS = ("alpha=0.1", "alpha=0.5", "alpha=0.9", "step=0.001", "step=0.1", "temperature=1", "temperature=20")
EQ_17 = "normalise=global"  # the other reading of Eq. 17, which is illegible in the paper


@method("study", "priprune-fig3", PAPER, scales=SIZES)
def fig3() -> FederatedStudy:
    """GI and SGI by base pruning and its rate, broadcast dense and masked (priprune, Fig. 3)."""
    return FederatedStudy(
        attack_tables.fig3,
        lambda scale: [
            Federations(_rates(FIVE, scale), attacks=BOTH, broadcast="dense", brief=True),
            Federations(_rates(FIVE, scale), attacks=BOTH, broadcast="masked", brief=True),
        ],
    )


@method("study", "priprune-fig6", PAPER, scales=SIZES)
def fig6() -> FederatedStudy:
    """Largest, Random and Mix on PruneFL, as real and as pseudo-pruning (priprune, Fig. 6)."""
    return FederatedStudy(
        defense_tables.fig6, lambda scale: [Federations(defenses=("none", *WITHHOLDING), attacks=REMEMBERING)]
    )


@method("study", "priprune-fig8", PAPER, scales=SIZES)
def fig8() -> FederatedStudy:
    """Fixed defense rates and PriPrune on PruneFL, over the rounds (priprune, Fig. 8)."""
    return FederatedStudy(
        defense_tables.fig8,
        lambda scale: [
            Federations(defenses=("none", "priprune", *_at("pseudo-largest", scale.defense_rates)), attacks=REMEMBERING)
        ],
    )


@method("study", "priprune-fig9", PAPER, scales=SIZES)
def fig9() -> FederatedStudy:
    """Accuracy and NMI of four base prunings with and without PriPrune, two data sets (priprune, Fig. 9)."""
    return FederatedStudy(defense_tables.fig9, _both)


@method("study", "priprune-table2", PAPER, scales=SIZES)
def table2() -> FederatedStudy:
    """NMI of four base prunings with and without PriPrune, two data sets (priprune, Table 2)."""
    return FederatedStudy(defense_tables.table2, _both)


@method("study", "priprune-tablea1", PAPER, scales=SIZES)
def tablea1() -> FederatedStudy:
    """NMI of PruneFL with PriPrune by its three lambdas (priprune, Table A1)."""

    def steps(scale: PripruneScale) -> list[Federations]:
        grid = [f"priprune:accuracy={a:g}:privacy={p:g}:sharing={s:g}" for a, p, s in product(*scale.grid)]
        return [Federations(defenses=tuple(grid))]

    return FederatedStudy(defense_tables.tablea1, steps)


@method("study", "priprune-figa1", PAPER, scales=SIZES)
def figa1() -> FederatedStudy:
    """The classic GI attack on PruneFL and Random by pruning rate (priprune, Fig. A1)."""
    return FederatedStudy(
        attack_tables.figa1,
        lambda scale: [
            Federations(("none", *_rates(("prunefl", "random"), scale)), attacks=BOTH, broadcast="dense", brief=True)
        ],
    )


@method("study", "priprune-figa2", PAPER, scales=SIZES)
def figa2() -> FederatedStudy:
    """NMI and PSNR of GI on PruneFL by pruning rate (priprune, Fig. A2)."""
    return FederatedStudy(
        attack_tables.figa2,
        lambda scale: [Federations(_rates(("prunefl",), scale), attacks=BOTH, broadcast="dense", brief=True)],
    )


@method("study", "priprune-figa3", PAPER, scales=SIZES)
def figa3() -> FederatedStudy:
    """Pictures under SGI by base pruning and its rate (priprune, Fig. A3)."""
    return FederatedStudy(
        attack_tables.figa3, lambda scale: [Federations(_rates(FIVE, scale), attacks=BOTH, brief=True)]
    )


@method("study", "priprune-figa4", PAPER, scales=SIZES)
def figa4() -> FederatedStudy:
    """Four mixes of largest and random gradients at 30 % on PruneFL, over the rounds (priprune, Fig. A4)."""
    mixes = tuple(f"mix:largest={share}" for share in MIXES)
    return FederatedStudy(defense_tables.figa4, lambda scale: [Federations(defenses=mixes)])


@method("study", "priprune-figa5", PAPER, scales=SIZES)
def figa5() -> FederatedStudy:
    """Largest at 0 to 50 % on PruneFL: accuracy, NMI and the attack's loss (priprune, Fig. A5)."""
    return FederatedStudy(
        defense_tables.figa5,
        lambda scale: [
            Federations(defenses=("none", *_at("largest", [rate for rate in scale.defense_rates if rate <= 0.5])))
        ],
    )


@method("study", "priprune-alpha", PAPER, scales=SIZES)
def alpha() -> FederatedStudy:
    """Effect of alpha's start and step, the temperature and Eq. 17's reading, all left open (not in priprune)."""
    settings = tuple(f"priprune:{value}" for value in (*ALPHAS, EQ_17))
    return FederatedStudy(defense_tables.alpha, lambda scale: [Federations(defenses=("none", *settings))])


@method("study", "priprune-defenses", PAPER, scales=SIZES)
def defenses() -> FederatedStudy:
    """All defenses of what a client sends on one axis: accuracy, leakage, bytes (not in priprune).

    The base pruning is SNIP: PruneFL's clients also send squared gradients, which DP does not cover. Some defenses are
    run under secure aggregation as well, where the server sees only the sum over a round's clients.
    """
    attacks = (SGI, f"{SGI}:adaptive=support")
    all_defenses = ("none", *WITHHOLDING, "priprune", *UPLOADS)
    return FederatedStudy(
        defense_tables.defenses,
        lambda scale: [
            Federations(("snip",), all_defenses, attacks=attacks),
            Federations(("snip",), SUMMED, attacks=attacks, view="sum"),
        ],
    )


def _both(scale: PripruneScale) -> list[Federations]:
    return [Federations(scale.search, ("none", "priprune"), data, REMEMBERING) for data in (FEMNIST, CIFAR10)]


def _rates(bases: tuple[str, ...], scale: PripruneScale) -> tuple[str, ...]:
    return tuple(f"{base}:rate={rate:g}" for base in bases for rate in scale.rates)


def _at(defense: str, rates: tuple[float, ...] | list[float]) -> tuple[str, ...]:
    return tuple(f"{defense}:rate={rate:g}" for rate in rates)
