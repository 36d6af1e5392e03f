"""The figures and tables of "Addressing Membership Inference Attack in Federated Learning with Model Compression".

Each study is a number of federations on one data set, and a table. `--data` selects the paper's other data sets, and
`--set rounds=60 --set large=0+1+2` other sizes. `--set augment=false` omits the crops and flips on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from secateur.catalogue import method
from secateur.studies.mapp import tables
from secateur.studies.mapp.results import MappResults
from secateur.studies.mapp.runner import MappStudy
from secateur.studies.mapp.scale import SCALES, Case, MappScale
from secateur.studies.table import Tabulated

register = partial(method, "study", paper="mapp_fl", scales=tuple(SCALES))
RULES = ("osr", "osm", "heterofl-r", "heterofl", "gsr", "mapp-fl", "mapp-fl-r", "ufr", "fdropout")  # Table 5's order
RIVALS = ("fdropout", "heterofl", "mapp-fl")  # Table 4
ATTACKERS = ("yeom", "yeom:threshold=tuned", "yeom:threshold=class", "lira", "rmia:gamma=1")
FEDAVG = (Case("none"), Case("none", 8))


def _widths(scale: MappScale) -> list[Case]:
    return [Case("none", unit, fresh=True) for unit in scale.units]


def _rules(scale: MappScale) -> list[Case]:
    return [*FEDAVG, *(Case(name) for name in RULES), Case("osm:reading=paper"), Case("local")]


def _large(scale: MappScale) -> list[Case]:
    keep_uncovered = [Case(name, large=0, uncovered="keep") for name in RIVALS] if 0 in scale.large else []
    return [*(Case(name, large=large) for large in scale.large for name in RIVALS), *keep_uncovered]


@register("mapp-fig1")
def fig1() -> MappStudy:
    """Advantage against dataset size by model size, and accuracy against advantage (mapp_fl, Fig. 1)."""
    return MappStudy(_widths, lambda results, scale: tables.complexity(results, scale.smallest))


@register("mapp-fig3")
def fig3() -> MappStudy:
    """Client accuracy against advantage by rule and number of large clients (mapp_fl, Fig. 3)."""
    return MappStudy(_large, _of(tables.by_large))


@register("mapp-fig4")
def fig4() -> MappStudy:
    """Client accuracy against advantage of nine channel rules, two large clients (mapp_fl, Fig. 4)."""
    return MappStudy(lambda scale: [Case(name) for name in RULES], _of(tables.rules))


@register("mapp-table2")
def table2() -> MappStudy:
    """Every client's accuracy and advantage under FedAvg, alone and with MaPP-FL (mapp_fl, Table 2)."""
    return MappStudy(lambda scale: [*FEDAVG, Case("local"), Case("mapp-fl")], _of(tables.by_client))


@register("mapp-table3")
def table3() -> MappStudy:
    """Correlation of dataset size and advantage by model size, over fresh draws of sizes (mapp_fl, Table 3)."""
    return MappStudy(_widths, lambda results, scale: tables.correlations(results, scale.smallest))


@register("mapp-table4")
def table4() -> MappStudy:
    """Server and average client of FDropout, HeteroFL and MaPP-FL, 0 to 9 large clients (mapp_fl, Table 4)."""
    return MappStudy(_large, _of(tables.by_large))


@register("mapp-table5")
def table5() -> MappStudy:
    """Every channel rule and baseline with two large clients, and Table 2's client by client (mapp_fl, Table 5)."""
    return MappStudy(_rules, _of(tables.rules_and_clients))


@register("mapp-table6")
def table6() -> MappStudy:
    """Channels coupled layer by layer against independent ones, two large clients (mapp_fl, Table 6)."""
    names = [name + end for name in ("fdropout", "mapp-fl-r") for end in (tables.INDEPENDENT, "")]
    return MappStudy(lambda scale: [Case(name) for name in names], _of(tables.coupled))


@register("mapp-attackers")
def stronger() -> MappStudy:
    """FedAvg, HeteroFL and MaPP-FL against Yeom, LiRA and RMIA: does the ranking hold (not in mapp_fl).

    RMIA runs with gamma=1: one local training changes its ratio by less than the usual gamma of 2, so that all scores
    would be equal.
    """
    cases = [*FEDAVG, Case("heterofl"), Case("mapp-fl")]
    return MappStudy(lambda scale: cases, _of(tables.attackers), ATTACKERS)


@register("mapp-joined")
def with_defenses() -> MappStudy:
    """MaPP-FL joined with DGP's pruned upload and with withheld weights: what they add (not in mapp_fl)."""
    defenses = ("none", "dgp", "pseudo-largest")
    return MappStudy(lambda scale: [Case("mapp-fl", defense=defense) for defense in defenses], _of(tables.joined))


def _of(tabulate: Callable[[MappResults], Tabulated]) -> Callable[[MappResults, MappScale], Tabulated]:
    return lambda results, scale: tabulate(results)
