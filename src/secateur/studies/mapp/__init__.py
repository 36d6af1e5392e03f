"""The figures and tables of "Addressing Membership Inference Attack in Federated Learning with Model Compression".

Each study is a number of federations on one data set, and a table. `--data` selects the paper's other data sets, and
`--set rounds=60 --set large=0+1+2` other sizes. `--set augment=false` omits the crops and flips on CIFAR-10.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from secateur.studies.mapp import tables
from secateur.studies.mapp.results import MappResults
from secateur.studies.mapp.runner import MappStudy
from secateur.studies.mapp.scale import Case, MappScale
from secateur.studies.study import register
from secateur.studies.table import Tabulated

RULES = ("osr", "osm", "heterofl-r", "heterofl", "gsr", "mapp-fl", "mapp-fl-r", "ufr", "fdropout")  # Table 5's order
RIVALS = ("fdropout", "heterofl", "mapp-fl")  # Table 4
# RMIA runs with gamma=1: one local training changes its ratio by less than the usual gamma of 2.
ATTACKERS = ("yeom", "yeom:threshold=tuned", "yeom:threshold=class", "lira", "rmia:gamma=1")
FEDAVG = (Case("none"), Case("none", 8))


def _widths(scale: MappScale) -> list[Case]:
    return [Case("none", unit, fresh=True) for unit in scale.units]


def _large(scale: MappScale) -> list[Case]:
    keep_uncovered = [Case(name, large=0, uncovered="keep") for name in RIVALS] if 0 in scale.large else []
    return [*(Case(name, large=large) for large in scale.large for name in RIVALS), *keep_uncovered]


def _study(tabulate: Callable[[MappResults], Tabulated], *cases: Case, **more: Any) -> MappStudy:
    """Return a study of the same federations at every scale."""
    return MappStudy(lambda scale: cases, lambda results, scale: tabulate(results), **more)


COUPLINGS = [name + end for name in ("fdropout", "mapp-fl-r") for end in (tables.INDEPENDENT, "")]
STRONGER = (*FEDAVG, Case("heterofl"), Case("mapp-fl"))
DEFENDED = [Case("mapp-fl", defense=defense) for defense in ("none", "dgp", "pseudo-largest")]
BY_LARGE = MappStudy(_large, lambda results, scale: tables.by_large(results))
STUDIES = {
    "mapp-fig1": MappStudy(_widths, lambda results, scale: tables.complexity(results, scale.smallest)),
    "mapp-fig3": BY_LARGE,
    "mapp-fig4": _study(tables.rules, *map(Case, RULES)),
    "mapp-table2": _study(tables.by_client, *FEDAVG, Case("local"), Case("mapp-fl")),
    "mapp-table3": MappStudy(_widths, lambda results, scale: tables.correlations(results, scale.smallest)),
    "mapp-table4": BY_LARGE,
    "mapp-table5": _study(
        tables.rules_and_clients, *FEDAVG, *map(Case, RULES), Case("osm:reading=paper"), Case("local")
    ),
    "mapp-table6": _study(tables.coupled, *map(Case, COUPLINGS)),
    "mapp-attackers": _study(tables.attackers, *STRONGER, attacks=ATTACKERS),
    "mapp-joined": _study(tables.joined, *DEFENDED),
}
register("mapp_fl", "mapp", STUDIES)
