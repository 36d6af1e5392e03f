"""The figures and tables of "Addressing Membership Inference Attack in Federated Learning with Model Compression".

Each study is a number of federations on one data set, and a table. `--data` selects the paper's other data sets, and
`--set rounds=60 --set large=0+1+2` other sizes. `--set augment=false` omits the crops and flips on CIFAR-10. Every
table ends with the effect of scoring batches and of more updates on Yeom's attack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.config import Federate, read
from secateur.config.methods import choice
from secateur.errors import WrongInput
from secateur.evaluation.setup import device_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.mapp import tables
from secateur.studies.mapp.federations import SCALES, Case, MappRunner, MappScale, load_data, with_augmentation
from secateur.studies.mapp.results import MappResults
from secateur.studies.study import Request, StudyPlan, register, run_steps, scale_of
from secateur.studies.table import Tabulated

RULES = ("osr", "osm", "heterofl-r", "heterofl", "gsr", "mapp-fl", "mapp-fl-r", "ufr", "fdropout")  # Table 5's order
RIVALS = ("fdropout", "heterofl", "mapp-fl")  # Table 4
# RMIA runs with gamma=1: one local training changes its ratio by less than the usual gamma of 2.
ATTACKERS = ("yeom", "yeom:threshold=tuned", "yeom:threshold=class", "lira", "rmia:gamma=1")
FEDAVG = (Case("none"), Case("none", 8))
ONE = "Intervals (95 %) are over the examples asked about and who is known, of one repeat; another may differ by more."
MANY = "Values are means over repeats, with Student's 95 % intervals over them."


@dataclass(frozen=True)
class MappStudy:
    """A figure or table of the paper: its federations at a scale, and the function from their rows to the table."""

    cases: Callable[[MappScale], Sequence[Case]]
    tabulate: Callable[[MappResults, MappScale], Tabulated]
    attacks: tuple[str, ...] = ("yeom",)

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of all federations for every seed."""
        scale, options = scale_of(SCALES, request.scale, request.overrides), request.options
        if options.get("model") is not None:
            raise WrongInput("model", "studies of mapp_fl have networks of their own widths; leave it out")
        cases = self.cases(scale)
        fields = {"seeds": options.get("seeds") or (scale.draws if cases[0].fresh else scale.repeats)}
        fields |= {} if options.get("device") is None else {"device": options["device"]}
        config = read(Federate, None, fields)
        device, data = device_of(config), load_data(scale, options)
        scale = with_augmentation(scale, data)
        attacks = [choice("attack", name) for name in self.attacks]
        facts: dict[str, Any] = {"data": data.name, "rounds": scale.rounds}
        facts |= {} if scale.examples is None else {"examples": scale.examples}
        facts |= {"augmentation": "crop and flip" if scale.augment else "none"}
        facts |= {"attacks": list(self.attacks), "seeds": config.seeds}

        def measure(run: Run) -> None:
            MappRunner(run, scale, data, device, attacks).run_all(cases, config.seeds)

        def tabulate(rows: Sequence[Row]) -> Tabulated:
            results = MappResults(rows)
            lines, findings = self.tabulate(results, scale)
            return [*lines, *tables.by_query(results)], findings

        return StudyPlan(
            run=lambda: run_steps(request, scale, device, config.seeds, measure, attacks=self.attacks),
            tabulate=tabulate,
            facts=lambda rows: facts,
            intervals=ONE if len(config.seeds) == 1 else MANY,
        )


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
    "mapp-table6": _study(tables.couple_channels, *map(Case, COUPLINGS)),
    "mapp-attackers": _study(tables.attackers, *STRONGER, attacks=ATTACKERS),
    "mapp-joined": _study(tables.add_defenses, *DEFENDED),
}
register("mapp_fl", "mapp", STUDIES)
