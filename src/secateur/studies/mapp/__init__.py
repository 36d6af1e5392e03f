"""The figures and tables of "Addressing Membership Inference Attack in Federated Learning with Model Compression".

Each study is a number of federations on one data set, and a table. `--data` selects the paper's other data sets, and
`--set rounds=60 --set large=0+1+2` other sizes. `--set augment=false` omits the crops and flips on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable

from secateur.catalogue import method
from secateur.studies.mapp.exposure_tables import attackers, complexity, correlations, joined
from secateur.studies.mapp.method_tables import INDEPENDENT, by_client, by_large, coupled, methods, methods_and_clients
from secateur.studies.mapp.paper_numbers import RIVALS
from secateur.studies.mapp.results import MappResults, Tabulated
from secateur.studies.mapp.runner import MappStudy
from secateur.studies.mapp.scale import SCALES, Case, MappScale

SIZES = tuple(SCALES)
PAPER = "mapp_fl"
RULES = ("osr", "osm", "heterofl-r", "heterofl", "gsr", "mapp-fl", "mapp-fl-r", "ufr", "fdropout")  # Table 5's order
ATTACKERS = ("yeom", "yeom:threshold=tuned", "yeom:threshold=class", "lira", "rmia:gamma=1")
FEDAVG = (Case("none"), Case("none", 8))


def _widths(scale: MappScale) -> list[Case]:
    return [Case("none", unit, fresh=True) for unit in scale.units]


def _rules(scale: MappScale) -> list[Case]:
    return [*FEDAVG, *(Case(name) for name in RULES), Case("osm:reading=paper"), Case("local")]


def _large(scale: MappScale) -> list[Case]:
    keep_uncovered = [Case(name, large=0, uncovered="keep") for name in RIVALS] if 0 in scale.large else []
    return [*(Case(name, large=large) for large in scale.large for name in RIVALS), *keep_uncovered]


@method("study", "mapp-fig1", PAPER, scales=SIZES)
def fig1() -> MappStudy:
    """Advantage against dataset size by model size, and accuracy against advantage (mapp_fl, Fig. 1)."""
    return MappStudy(_widths, lambda results, scale: complexity(results, scale.smallest))


@method("study", "mapp-fig3", PAPER, scales=SIZES)
def fig3() -> MappStudy:
    """Client accuracy against advantage by rule and number of large clients (mapp_fl, Fig. 3)."""
    return MappStudy(_large, _of(by_large))


@method("study", "mapp-fig4", PAPER, scales=SIZES)
def fig4() -> MappStudy:
    """Client accuracy against advantage of nine channel rules, two large clients (mapp_fl, Fig. 4)."""
    return MappStudy(lambda scale: [Case(name) for name in RULES], _of(methods))


@method("study", "mapp-table2", PAPER, scales=SIZES)
def table2() -> MappStudy:
    """Every client's accuracy and advantage under FedAvg, alone and with MaPP-FL (mapp_fl, Table 2)."""
    return MappStudy(lambda scale: [*FEDAVG, Case("local"), Case("mapp-fl")], _of(by_client))


@method("study", "mapp-table3", PAPER, scales=SIZES)
def table3() -> MappStudy:
    """Correlation of dataset size and advantage by model size, over fresh draws of sizes (mapp_fl, Table 3)."""
    return MappStudy(_widths, lambda results, scale: correlations(results, scale.smallest))


@method("study", "mapp-table4", PAPER, scales=SIZES)
def table4() -> MappStudy:
    """Server and average client of FDropout, HeteroFL and MaPP-FL, 0 to 9 large clients (mapp_fl, Table 4)."""
    return MappStudy(_large, _of(by_large))


@method("study", "mapp-table5", PAPER, scales=SIZES)
def table5() -> MappStudy:
    """Every channel rule and baseline with two large clients, and Table 2's client by client (mapp_fl, Table 5)."""
    return MappStudy(_rules, _of(methods_and_clients))


@method("study", "mapp-table6", PAPER, scales=SIZES)
def table6() -> MappStudy:
    """Channels coupled layer by layer against independent ones, two large clients (mapp_fl, Table 6)."""
    names = [name + end for name in ("fdropout", "mapp-fl-r") for end in (INDEPENDENT, "")]
    return MappStudy(lambda scale: [Case(name) for name in names], _of(coupled))


@method("study", "mapp-attackers", PAPER, scales=SIZES)
def stronger() -> MappStudy:
    """FedAvg, HeteroFL and MaPP-FL against Yeom, LiRA and RMIA: does the ranking hold (not in mapp_fl).

    RMIA runs with gamma=1: one local training changes its ratio by less than the usual gamma of 2, so that all scores
    would be equal.
    """
    cases = [*FEDAVG, Case("heterofl"), Case("mapp-fl")]
    return MappStudy(lambda scale: cases, _of(attackers), ATTACKERS)


@method("study", "mapp-joined", PAPER, scales=SIZES)
def with_defenses() -> MappStudy:
    """MaPP-FL joined with DGP's pruned upload and with withheld weights: what they add (not in mapp_fl)."""
    defenses = ("none", "dgp", "pseudo-largest")
    return MappStudy(lambda scale: [Case("mapp-fl", defense=defense) for defense in defenses], _of(joined))


def _of(tabulate: Callable[[MappResults], Tabulated]) -> Callable[[MappResults, MappScale], Tabulated]:
    return lambda results, scale: tabulate(results)
