"""The figures and tables of "Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks".

Each study is a sequence of steps and a table. Networks and data sets are the paper's. At smaller scales others stand
in for them (scales.json), and the table names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from secateur.catalogue import method
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
    load_all,
    stand_in,
)
from secateur.studies.dgp.steps import ADAPTIVE, AttackStep, TrainingStep
from secateur.studies.dgp.theory import BoundStep, DistanceStep
from secateur.studies.study import Plan, Request, run_steps, scale_of
from secateur.studies.table import Tabulated

BATCH = 9  # the batch size attacked by Rob
DEFENSES = ("none", "ats", "soteria", "precode", "noise", "top-k", "outpost", "dgp")
TOP_K, DGP, ADGP = (f"{name}+error-feedback" for name in ("top-k", "dgp", "adgp"))
TRAINED = ("none", "ats", "soteria", "precode", "noise", TOP_K, "outpost", DGP)
TOTALS = tuple(f"dgp:k1={k1:g}:k2={k2:g}" for k1, k2 in ((0.03, 0.45), (0.05, 0.75), (0.06, 0.9)))
RATIOS = tuple(f"dgp:k1={k1:g}:k2={k2:g}" for k1, k2 in ((0.05, 0.75), (0.1, 0.7), (0.2, 0.6)))
FOLLOWER = "adgp:chosen=false"  # a user that uses the positions broadcast by another user
HARD_TOP_K = "top-k:keep=0.05"
NEAR_TO_FAR = ("none", "top-k:keep=0.5", "top-k", HARD_TOP_K, "dgp:k1=0.01:k2=0.79", *RATIOS, "noise")
register = partial(method, "study", paper="dgp", scales=tuple(SCALES))


@dataclass(frozen=True)
class UpdateStudy:
    """The study of one figure or table: steps that measure, and a function that makes the table of their rows."""

    tabulate: Callable[[DgpResults], Tabulated]
    steps: tuple[Step, ...]
    intervals: str = ""  # describes the table's intervals; empty: they are over examples or seeds

    def plan(self, request: Request) -> Plan:
        """Return the plan of all steps for every seed."""
        steps, overrides = select_steps(self.steps, request.overrides)
        scale, options = scale_of(SCALES, request.scale, overrides), request.options
        steps = merge_steps(steps, scale, options)
        config = read(Invert, None, {name: options.get(name) for name in ("seeds", "device")})
        device, datasets = device_of(config), load_all(steps, scale, options)
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

        return Plan(
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


@register("dgp-table1")
def table1() -> UpdateStudy:
    """Four attacks on eight defenses, plain and adaptive, and the final accuracy (dgp, Table 1)."""
    steps = (
        AttackStep("r-gap", DEFENSES, "cnn6"),
        AttackStep("ig", DEFENSES),
        AttackStep("ig", ("none", "top-k", "dgp"), labels="oracle", adaptive=()),
        AttackStep("gi", DEFENSES),
        AttackStep("rob", DEFENSES, batch_size=BATCH),
        TrainingStep(TRAINED),
    )
    return UpdateStudy(tables.table1, steps)


@register("dgp-table2")
def table2() -> UpdateStudy:
    """DGP by k1 + k2 under Rob and by p = k1 / k2 under IG, and its accuracy (dgp, Table 2)."""
    with_feedback = tuple(f"{defense}+error-feedback" for defense in dict.fromkeys((*TOTALS, *RATIOS)))
    steps = (AttackStep("rob", TOTALS, batch_size=BATCH), AttackStep("ig", RATIOS), TrainingStep(with_feedback))
    return UpdateStudy(tables.table2, steps)


@register("dgp-table3")
def table3() -> UpdateStudy:
    """Bytes of one upload and one download, four networks (dgp, Table 3)."""
    return UpdateStudy(cost.table3, _costs(), "Bytes are counted, not estimated.")


@register("dgp-table4")
def table4() -> UpdateStudy:
    """Seconds that the defenses take in an epoch, four networks (dgp, Table 4)."""
    return UpdateStudy(cost.table4, _costs(), "Medians; in brackets the fastest and the slowest call, on this machine.")


@register("dgp-table5")
def table5() -> UpdateStudy:
    """Rob and IG on four networks with and without DGP, CIFAR-10 (dgp, Table 5)."""
    return UpdateStudy(tables.table5, _on_networks())


@register("dgp-table6")
def table6() -> UpdateStudy:
    """Rob and IG on four networks with and without DGP, CIFAR-100 (dgp, Table 6)."""
    return UpdateStudy(tables.table6, _on_networks(CIFAR100))


@register("dgp-table7")
def table7() -> UpdateStudy:
    """Accuracy of Top-k at 95 % and of DGP at 80 %, four networks, CIFAR-100 (dgp, Table 7)."""
    both = (f"{HARD_TOP_K}+error-feedback", DGP)
    return UpdateStudy(tables.table7, tuple(TrainingStep(both, model, CIFAR100) for model in NETWORKS))


@register("dgp-fig1")
def fig1() -> UpdateStudy:
    """Recovery by IG against the relative distance of the upload, and Proposition 1 (dgp, Fig. 1)."""
    return UpdateStudy(theory.fig1, (DistanceStep(NEAR_TO_FAR),))


@register("dgp-fig2")
def fig2() -> UpdateStudy:
    """Top-k against DGP: what IG recovers, and the accuracy over the epochs (dgp, Fig. 2)."""
    return UpdateStudy(tables.fig2, (AttackStep("ig", ("none", "top-k", "dgp")), TrainingStep(("none", TOP_K, DGP))))


@register("dgp-fig3")
def fig3() -> UpdateStudy:
    """Pictures by defense under four attacks (dgp, Fig. 3)."""
    steps = (
        AttackStep("ig", DEFENSES, adaptive=()),
        AttackStep("gi", DEFENSES, adaptive=()),
        AttackStep("r-gap", DEFENSES, "cnn6", adaptive=()),
        AttackStep("rob", DEFENSES, batch_size=BATCH, adaptive=()),
    )
    return UpdateStudy(tables.fig3, steps)


@register("dgp-fig4")
def fig4() -> UpdateStudy:
    """Accuracy with and without error feedback, four networks, two data sets (dgp, Fig. 4)."""
    four = ("none", DGP, "dgp", ADGP)
    steps = tuple(TrainingStep(four, model, data) for data in (CIFAR10, CIFAR100) for model in NETWORKS)
    return UpdateStudy(tables.fig4, steps)


@register("dgp-fig5")
def fig5() -> UpdateStudy:
    """Pictures under GGL, with a generator that the run itself trains on CIFAR-10 (dgp, Fig. 5, on ImageNet)."""
    return UpdateStudy(tables.gallery, (AttackStep("ggl", DEFENSES),))


@register("dgp-fig6")
def fig6() -> UpdateStudy:
    """Pictures under IG, Top-k at 80 and 95 % and DGP, CIFAR-100 (dgp, Fig. 6)."""
    defenses = ("none", "top-k", HARD_TOP_K, "dgp")
    return UpdateStudy(tables.gallery, (AttackStep("ig", defenses, data=CIFAR100),))


@register("dgp-fig7")
def fig7() -> UpdateStudy:
    """Pictures under Rob, Top-k at 80 and 95 % and DGP, CIFAR-100 (dgp, Fig. 7)."""
    defenses = ("none", "top-k", HARD_TOP_K, "dgp")
    return UpdateStudy(tables.gallery, (AttackStep("rob", defenses, data=CIFAR100, batch_size=BATCH),))


@register("dgp-fig8")
def fig8() -> UpdateStudy:
    """Pictures under IG of batches of two and of four (dgp, Fig. 8)."""
    steps = tuple(AttackStep("ig", DEFENSES, batch_size=size, adaptive=()) for size in (2, 4))
    return UpdateStudy(tables.gallery, steps)


@register("dgp-fig9")
def fig9() -> UpdateStudy:
    """Pictures under Rob of batches of 4, 9 and 16, sizes that the paper does not print (dgp, Fig. 9)."""
    sizes = (4, BATCH, 16)
    return UpdateStudy(tables.gallery, tuple(AttackStep("rob", DEFENSES, batch_size=size) for size in sizes))


@register("dgp-adgp")
def adgp() -> UpdateStudy:
    """ADGP beside DGP: the user that broadcasts and one that follows, and who only listens (dgp 6.4, future work)."""
    four = ("none", "dgp", "adgp", FOLLOWER)
    steps = (
        AttackStep("r-gap", four, "cnn6"),
        AttackStep("ig", four),
        AttackStep("gi", four),
        AttackStep("rob", four, batch_size=BATCH),
        BroadcastStep("adgp"),
        TrainingStep(("none", DGP, ADGP)),
        TrainingStep((ADGP,), liar=Silence()),
    )
    return UpdateStudy(extensions.aligned, steps)


@register("dgp-residual")
def residual() -> UpdateStudy:
    """IG on updates with an empty and with a trained residual, and what error feedback holds back (not in dgp)."""
    defenses = (DGP, "dgp:release=10+error-feedback", TOP_K)
    return UpdateStudy(extensions.residual, (AttackStep("ig", ("none", "dgp")), ResidualStep(defenses)))


@register("dgp-convergence")
def convergence() -> UpdateStudy:
    """Lemma 1 and Theorem 2 on a training by plain SGD, under error feedback (dgp Section 5)."""
    defenses = ("none", TOP_K, DGP, "dgp:release=10+error-feedback")
    intervals = "One run is what it is: there are no intervals; K is the largest met, so bounds are flattered."
    return UpdateStudy(theory.convergence, (BoundStep(defenses),), intervals)


@register("dgp-membership")
def membership() -> UpdateStudy:
    """Membership inference on the model trained under every defense of updates (not in dgp)."""
    return UpdateStudy(extensions.membership, (MembershipStep((*TRAINED, ADGP, "dp")),))


def _costs() -> tuple[CostStep, ...]:
    """Return steps for all defenses on stand-in networks, and for pruning defenses on the paper's large networks."""
    large = [CostStep(("none", "top-k", "dgp", "adgp"), model, exact=True) for model in ("resnet18", "vgg11-bn")]
    return (*(CostStep((*DEFENSES, "adgp", "dp"), model) for model in NETWORKS), *large)


def _on_networks(data: str = "cifar10") -> tuple[AttackStep, ...]:
    both = ("none", "dgp")
    rob = [AttackStep("rob", both, model, data, BATCH) for model in NETWORKS]
    return (*rob, *(AttackStep("ig", both, model, data) for model in NETWORKS))
