"""The figures and tables of "Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks".

Each study is a sequence of steps and a table. Networks and data sets are the paper's. At smaller scales others stand
in for them (scales.json), and the table names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from secateur.config import Invert, read
from secateur.errors import unknown
from secateur.evaluation.setup import device_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.dgp import cost, extensions, tables, theory
from secateur.studies.dgp.cost import CostStep
from secateur.studies.dgp.extensions import BroadcastStep, MembershipStep, ResidualStep, Silence
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.steps import (
    ADAPTIVE,
    CIFAR10,
    CIFAR100,
    NETWORKS,
    SCALES,
    AttackStep,
    DgpScale,
    DgpSetting,
    Step,
    TrainingStep,
    load_datasets,
    stand_in,
)
from secateur.studies.dgp.theory import BoundStep, DistanceStep
from secateur.studies.study import Request, StudyPlan, register, run_steps, scale_of, select_steps
from secateur.studies.table import Tabulated

BATCH = 9  # the batch size attacked by Rob
SIZES = (4, BATCH, 16)  # of Fig. 9; the paper does not print them
DEFENSES = ("none", "ats", "soteria", "precode", "noise", "top-k", "outpost", "dgp")
TOP_K, DGP, ADGP = (f"{name}+error-feedback" for name in ("top-k", "dgp", "adgp"))
TRAINED = ("none", "ats", "soteria", "precode", "noise", TOP_K, "outpost", DGP)
TOTALS = tuple(f"dgp:k1={k1:g}:k2={k2:g}" for k1, k2 in ((0.03, 0.45), (0.05, 0.75), (0.06, 0.9)))
RATIOS = tuple(f"dgp:k1={k1:g}:k2={k2:g}" for k1, k2 in ((0.05, 0.75), (0.1, 0.7), (0.2, 0.6)))
FOLLOWER = "adgp:chosen=false"  # a user that uses the positions broadcast by another user
HARD_TOP_K = "top-k:keep=0.05"
SOME = ("none", "top-k", HARD_TOP_K, "dgp")  # Figs. 6 and 7
PLAIN = ("none", "dgp")
ALIGNED = (*PLAIN, "adgp", FOLLOWER)
RELEASING = "dgp:release=10+error-feedback"  # sends starved entries after ten rounds
PARTS = {"steps": "name", "defenses": "defenses"}  # what `--set` can select from, and the field of a step
NEAR_TO_FAR = ("none", "top-k:keep=0.5", "top-k", HARD_TOP_K, "dgp:k1=0.01:k2=0.79", *RATIOS, "noise")


@dataclass(frozen=True)
class UpdateStudy:
    """The study of one figure or table: steps that measure, and a function that makes the table of their rows."""

    tabulate: Callable[[DgpResults], Tabulated]
    steps: tuple[Step, ...]
    intervals: str = ""  # describes the table's intervals; empty: they are over examples or seeds

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of all steps for every seed."""
        selected, overrides = select_attackers(*select_steps(self.steps, request.overrides, PARTS))
        scale, options = scale_of(SCALES, request.scale, overrides), request.options
        steps = merge_steps(selected, scale, options)
        config = read(Invert, None, {name: options.get(name) for name in ("seeds", "device")})
        device, datasets = device_of(config), load_datasets(steps, scale, options)
        more = {} if steps == self.steps else {"steps": [repr(step) for step in steps]}

        def measure(run: Run) -> None:
            for seed in config.seeds:
                setting = DgpSetting(run, scale, options, datasets, seed)
                for step in steps:
                    step(setting)

        def tabulate(rows: Sequence[Row]) -> Tabulated:
            results = DgpResults(rows)
            lines, findings = self.tabulate(results)
            return lines + tables.left_out_lines(results), findings

        return StudyPlan(
            run=lambda: run_steps(request, scale, device, config.seeds, measure, **more),
            tabulate=tabulate,
            facts=lambda rows: _facts(scale, rows) | {"seeds": config.seeds},
            intervals=self.intervals,
        )


def merge_steps(steps: Sequence[Step], scale: DgpScale, options: Mapping[str, Any]) -> tuple[Step, ...]:
    """Return the steps without duplicates: steps whose stand-in network and data set are equal are one step."""
    kept: dict[str, Step] = {}
    for step in steps:
        model, data = stand_in(step.model, scale, options), options.get("data") or scale.data[step.data]
        kept.setdefault(repr(replace(step, model=model, data=data)), step)  # type: ignore[arg-type]
    return tuple(kept.values())


def select_attackers(steps: Sequence[Step], overrides: Sequence[str]) -> tuple[list[Step], list[str]]:
    """Select adaptive attackers, such as `adaptive=support,mask`, besides the plain one; `none` is the plain one alone.

    Return the steps and the remaining overrides.
    """
    others = [text for text in overrides if text.partition("=")[0] != "adaptive"]
    wanted = [name.strip() for text in overrides if text not in others for name in text.partition("=")[2].split(",")]
    if unknown_names := [name for name in wanted if name not in (*ADAPTIVE, "none")]:
        raise unknown("adaptive", unknown_names[0], (*ADAPTIVE, "none"))
    selected = [
        replace(step, adaptive=tuple(name for name in step.adaptive if name in wanted))
        if wanted and isinstance(step, AttackStep | ResidualStep)
        else step
        for step in steps
    ]
    return selected, others


def _facts(scale: DgpScale, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the settings that the numbers hold for; they show where a run is smaller than the paper's."""
    facts: dict[str, Any] = {"data": list(dict.fromkeys(row.dataset for row in rows))}
    facts |= {"model": list(dict.fromkeys(row.model for row in rows))}
    facts |= {} if scale.examples is None else {"examples": scale.examples}
    if any("target" in row.extra for row in rows):
        facts |= {"targets": scale.targets, "iterations": scale.iterations}
    if any(row.metric == "test_accuracy" for row in rows):
        facts |= {"users": scale.users, "epochs": scale.epochs or "as in the paper"}
        facts |= {"augmentation": scale.augmentation}
    return facts


# All defenses on stand-in networks, and pruning defenses on the paper's large networks.
COSTS = (
    *(CostStep((*DEFENSES, "adgp", "dp"), model) for model in NETWORKS),
    *(CostStep(("none", "top-k", "dgp", "adgp"), model, exact=True) for model in ("resnet18", "vgg11-bn")),
)
IG, GI = AttackStep, partial(AttackStep, attack="gi")
ROB, R_GAP = partial(AttackStep, attack="rob", batch_size=BATCH), partial(AttackStep, model="cnn6", attack="r-gap")
TABLE_1 = (
    R_GAP(DEFENSES),
    IG(DEFENSES),
    IG(("none", "top-k", "dgp"), labels="oracle", adaptive=()),
    GI(DEFENSES),
    ROB(DEFENSES),
    TrainingStep(TRAINED),
)
ADGP_STEPS = (
    *(attack(ALIGNED) for attack in (R_GAP, IG, GI, ROB)),
    BroadcastStep(("adgp",)),
    TrainingStep(("none", DGP, ADGP)),
    TrainingStep((ADGP,), liar=Silence()),
)


def _on_networks(data: str) -> tuple[AttackStep, ...]:
    """Return Rob and IG with and without DGP on every network."""
    return tuple(attack(PLAIN, model, data) for attack in (ROB, IG) for model in NETWORKS)


def _train_networks(defenses: tuple[str, ...], *data: str) -> tuple[TrainingStep, ...]:
    """Return the training of every network on data sets."""
    return tuple(TrainingStep(defenses, model, name) for name in data for model in NETWORKS)


TABLE_2 = tuple(f"{defense}+error-feedback" for defense in dict.fromkeys((*TOTALS, *RATIOS)))
COUNTED = "Bytes are counted, not estimated."
TIMED = "Medians; in brackets the fastest and the slowest call, on this machine."
ONE_RUN = "One run is what it is: there are no intervals; K is the largest met, so bounds are flattered."
STUDIES = {
    "dgp-table1": UpdateStudy(tables.table1, TABLE_1),
    "dgp-table2": UpdateStudy(tables.table2, (ROB(TOTALS), IG(RATIOS), TrainingStep(TABLE_2))),
    "dgp-table3": UpdateStudy(cost.table3, COSTS, COUNTED),
    "dgp-table4": UpdateStudy(cost.table4, COSTS, TIMED),
    "dgp-table5": UpdateStudy(tables.table5, _on_networks(CIFAR10)),
    "dgp-table6": UpdateStudy(tables.table6, _on_networks(CIFAR100)),
    "dgp-table7": UpdateStudy(tables.table7, _train_networks((f"{HARD_TOP_K}+error-feedback", DGP), CIFAR100)),
    "dgp-fig1": UpdateStudy(theory.fig1, (DistanceStep(NEAR_TO_FAR),)),
    "dgp-fig2": UpdateStudy(tables.fig2, (IG(("none", "top-k", "dgp")), TrainingStep(("none", TOP_K, DGP)))),
    "dgp-fig3": UpdateStudy(tables.fig3, tuple(attack(DEFENSES, adaptive=()) for attack in (IG, GI, R_GAP, ROB))),
    "dgp-fig4": UpdateStudy(tables.fig4, _train_networks(("none", DGP, "dgp", ADGP), CIFAR10, CIFAR100)),
    "dgp-fig5": UpdateStudy(tables.gallery, (AttackStep(DEFENSES, attack="ggl"),)),
    "dgp-fig6": UpdateStudy(tables.gallery, (IG(SOME, data=CIFAR100),)),
    "dgp-fig7": UpdateStudy(tables.gallery, (ROB(SOME, data=CIFAR100),)),
    "dgp-fig8": UpdateStudy(tables.gallery, tuple(IG(DEFENSES, batch_size=size, adaptive=()) for size in (2, 4))),
    "dgp-fig9": UpdateStudy(tables.gallery, tuple(ROB(DEFENSES, batch_size=size) for size in SIZES)),
    "dgp-adgp": UpdateStudy(extensions.align, ADGP_STEPS),
    "dgp-residual": UpdateStudy(extensions.residual, (IG(PLAIN), ResidualStep((DGP, RELEASING, TOP_K)))),
    "dgp-convergence": UpdateStudy(theory.convergence, (BoundStep(("none", TOP_K, DGP, RELEASING)),), ONE_RUN),
    "dgp-membership": UpdateStudy(extensions.membership, (MembershipStep((*TRAINED, ADGP, "dp")),)),
}
register("dgp", "dgp", STUDIES)
