"""The figures and tables of "Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks".

Each study is a sequence of steps and a table. Networks and data sets are the paper's. At smaller scales others stand
in for them (scales.json), and the table names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from secateur.config import Invert, read
from secateur.errors import WrongInput, unknown
from secateur.evaluation.setup import device_of
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.dgp import cost, extensions, tables, theory
from secateur.studies.dgp.cost import CostStep
from secateur.studies.dgp.extensions import BroadcastStep, MembershipStep, ResidualStep, Silence
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.scale import (
    CIFAR10,
    CIFAR100,
    NETWORKS,
    SCALES,
    DgpScale,
    DgpSetting,
    Step,
    load_datasets,
    stand_in,
)
from secateur.studies.dgp.steps import ADAPTIVE, AttackStep, TrainingStep
from secateur.studies.dgp.theory import BoundStep, DistanceStep
from secateur.studies.study import Request, StudyPlan, register, run_steps, scale_of
from secateur.studies.table import Tabulated

BATCH = 9  # the batch size attacked by Rob
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
NEAR_TO_FAR = ("none", "top-k:keep=0.5", "top-k", HARD_TOP_K, "dgp:k1=0.01:k2=0.79", *RATIOS, "noise")


@dataclass(frozen=True)
class UpdateStudy:
    """The study of one figure or table: steps that measure, and a function that makes the table of their rows."""

    tabulate: Callable[[DgpResults], Tabulated]
    steps: tuple[Step, ...]
    intervals: str = ""  # describes the table's intervals; empty: they are over examples or seeds

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of all steps for every seed."""
        steps, overrides = select_steps(self.steps, request.overrides)
        scale, options = scale_of(SCALES, request.scale, overrides), request.options
        steps = merge_steps(steps, scale, options)
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
        kept.setdefault(repr(replace(step, model=model, data=data)), step)  # type: ignore[type-var]
    return tuple(kept.values())


def select_steps(steps: Sequence[Step], overrides: Sequence[str]) -> tuple[tuple[Step, ...], list[str]]:
    """Select a part of a study, to run on a separate machine; return its steps and the remaining overrides.

    `steps=ig,training` selects the attacks of these names and the trainings; `defenses=none,dgp` selects defenses in
    every step. `adaptive=support,mask` selects these attackers besides the plain one, `adaptive=none` the plain one
    alone.
    """
    keys = ("steps", "defenses", "adaptive")
    texts = {key: text for key in keys for text in overrides if text.partition("=")[0] == key}
    wanted = {key: [part.strip() for part in text.partition("=")[2].split(",")] for key, text in texts.items()}
    if unknown_names := [name for name in wanted.get("adaptive", ()) if name not in (*ADAPTIVE, "none")]:
        raise unknown("adaptive", unknown_names[0], (*ADAPTIVE, "none"))
    selected: list[Any] = [step for step in steps if "steps" not in wanted or step.name in wanted["steps"]]
    for key in ("defenses", "adaptive"):
        if key in wanted:
            selected = [_with_part(step, key, wanted[key]) for step in selected]
    selected = [step for step in selected if getattr(step, "defenses", True)]
    if not selected:
        names = ", ".join(dict.fromkeys(step.name for step in steps))
        defenses = ", ".join(dict.fromkeys(name for step in steps for name in getattr(step, "defenses", ())))
        raise WrongInput("set", f"leaves nothing of this study; its steps are {names}, its defenses {defenses}")
    return tuple(selected), [text for text in overrides if text not in texts.values()]


def _with_part(step: Any, part: str, names: Sequence[str]) -> Any:
    """Return a step with the selected defenses or adaptive attackers; a step without such a field is unchanged."""
    if not hasattr(step, part):
        return step
    return replace(step, **{part: tuple(name for name in getattr(step, part) if name in names)})


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
FOUR_ATTACKS = (
    AttackStep("ig", DEFENSES, adaptive=()),
    AttackStep("gi", DEFENSES, adaptive=()),
    AttackStep("r-gap", DEFENSES, "cnn6", adaptive=()),
    AttackStep("rob", DEFENSES, batch_size=BATCH, adaptive=()),
)
TABLE_1 = (
    AttackStep("r-gap", DEFENSES, "cnn6"),
    AttackStep("ig", DEFENSES),
    AttackStep("ig", ("none", "top-k", "dgp"), labels="oracle", adaptive=()),
    AttackStep("gi", DEFENSES),
    AttackStep("rob", DEFENSES, batch_size=BATCH),
    TrainingStep(TRAINED),
)
ADGP_STEPS = (
    AttackStep("r-gap", ALIGNED, "cnn6"),
    AttackStep("ig", ALIGNED),
    AttackStep("gi", ALIGNED),
    AttackStep("rob", ALIGNED, batch_size=BATCH),
    BroadcastStep("adgp"),
    TrainingStep(("none", DGP, ADGP)),
    TrainingStep((ADGP,), liar=Silence()),
)


def _on_networks(data: str) -> tuple[AttackStep, ...]:
    """Return Rob and IG with and without DGP on every network."""
    rob = [AttackStep("rob", PLAIN, model, data, BATCH) for model in NETWORKS]
    return (*rob, *(AttackStep("ig", PLAIN, model, data) for model in NETWORKS))


def _trained(defenses: tuple[str, ...], *data: str) -> tuple[TrainingStep, ...]:
    """Return the training of every network on data sets."""
    return tuple(TrainingStep(defenses, model, name) for name in data for model in NETWORKS)


def _by_batch(attack: str, sizes: Sequence[int], **more: Any) -> tuple[AttackStep, ...]:
    return tuple(AttackStep(attack, DEFENSES, batch_size=size, **more) for size in sizes)


TABLE_2 = tuple(f"{defense}+error-feedback" for defense in dict.fromkeys((*TOTALS, *RATIOS)))
COUNTED = "Bytes are counted, not estimated."
TIMED = "Medians; in brackets the fastest and the slowest call, on this machine."
ONE_RUN = "One run is what it is: there are no intervals; K is the largest met, so bounds are flattered."
STUDIES = {
    "dgp-table1": UpdateStudy(tables.table1, TABLE_1),
    "dgp-table2": UpdateStudy(
        tables.table2, (AttackStep("rob", TOTALS, batch_size=BATCH), AttackStep("ig", RATIOS), TrainingStep(TABLE_2))
    ),
    "dgp-table3": UpdateStudy(cost.table3, COSTS, COUNTED),
    "dgp-table4": UpdateStudy(cost.table4, COSTS, TIMED),
    "dgp-table5": UpdateStudy(tables.table5, _on_networks(CIFAR10)),
    "dgp-table6": UpdateStudy(tables.table6, _on_networks(CIFAR100)),
    "dgp-table7": UpdateStudy(tables.table7, _trained((f"{HARD_TOP_K}+error-feedback", DGP), CIFAR100)),
    "dgp-fig1": UpdateStudy(theory.fig1, (DistanceStep(NEAR_TO_FAR),)),
    "dgp-fig2": UpdateStudy(
        tables.fig2, (AttackStep("ig", ("none", "top-k", "dgp")), TrainingStep(("none", TOP_K, DGP)))
    ),
    "dgp-fig3": UpdateStudy(tables.fig3, FOUR_ATTACKS),
    "dgp-fig4": UpdateStudy(tables.fig4, _trained(("none", DGP, "dgp", ADGP), CIFAR10, CIFAR100)),
    "dgp-fig5": UpdateStudy(tables.gallery, (AttackStep("ggl", DEFENSES),)),
    "dgp-fig6": UpdateStudy(tables.gallery, (AttackStep("ig", SOME, data=CIFAR100),)),
    "dgp-fig7": UpdateStudy(tables.gallery, (AttackStep("rob", SOME, data=CIFAR100, batch_size=BATCH),)),
    "dgp-fig8": UpdateStudy(tables.gallery, _by_batch("ig", (2, 4), adaptive=())),
    "dgp-fig9": UpdateStudy(tables.gallery, _by_batch("rob", (4, BATCH, 16))),  # sizes that the paper does not print
    "dgp-adgp": UpdateStudy(extensions.aligned, ADGP_STEPS),
    "dgp-residual": UpdateStudy(extensions.residual, (AttackStep("ig", PLAIN), ResidualStep((DGP, RELEASING, TOP_K)))),
    "dgp-convergence": UpdateStudy(theory.convergence, (BoundStep(("none", TOP_K, DGP, RELEASING)),), ONE_RUN),
    "dgp-membership": UpdateStudy(extensions.membership, (MembershipStep((*TRAINED, ADGP, "dp")),)),
}
register("dgp", "dgp", STUDIES)
