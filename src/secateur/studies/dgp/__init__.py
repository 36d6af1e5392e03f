"""The figures and tables of "Revisiting Gradient Pruning: A Dual Realization for Defending against Gradient Attacks".

Each study is a sequence of steps and a table (studies.json). Networks and data sets are the paper's. At smaller scales
others stand in for them (scales.json), and the table names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from secateur.config import Invert, read
from secateur.evaluation.setup import device_of
from secateur.runs.archive import Archive
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.dgp import cost, extensions, tables, theory
from secateur.studies.dgp.results import DgpResults
from secateur.studies.dgp.steps import (
    DgpSetting,
    Step,
    attack_updates,
    augmentation_of,
    load_datasets,
    measure_training,
    network_of,
    stand_in,
)
from secateur.studies.study import Request, Scale, Study, StudyPlan, register, run_steps, scale_of, select_steps
from secateur.studies.table import Tabulated

PARTS = {"steps": "name", "defenses": "defenses", "adaptive": "adaptive"}  # `--set` selects from these fields of steps
OPTIONAL = ("adaptive",)  # the plain attacker remains
MEASURES: dict[str, Callable[[DgpSetting], None]] = {  # by the name of a step; another name is that of an attack
    "training": measure_training,
    "costed": cost.measure_cost,
    "distanced": theory.measure_distances,
    "bounded": theory.measure_bounds,
    "overheard": extensions.overhear_broadcast,
    "midway": extensions.attack_midway,
    "members": extensions.infer_members,
}


def plan(study: Study, request: Request) -> StudyPlan:
    """Return the plan of all steps of a study for every seed."""
    every = study.read_steps(Step)
    selected, overrides = select_steps(every, request.overrides, PARTS, OPTIONAL)
    scale, options = scale_of("dgp", request.scale, overrides), request.options
    steps = merge_steps(selected, scale, options)
    config = read(Invert, None, {name: options.get(name) for name in ("seeds", "device")})
    device, datasets = device_of(config), load_datasets(steps, scale, options)
    more = {} if steps == every else {"steps": [repr(step) for step in steps]}

    def measure(run: Run) -> None:
        for seed in config.seeds:
            for step in steps:
                data = datasets[step.data]
                if (model := network_of(step, scale, options, data)) is not None:
                    for defense in step.defenses:
                        setting = DgpSetting(run, scale, options, seed, step, data, model, defense)
                        MEASURES.get(step.name, attack_updates)(setting)

    def tabulate(rows: Sequence[Row]) -> Tabulated:
        results = DgpResults(rows)
        lines, findings = study.tabulate(results)
        return lines + tables.left_out_lines(results), findings

    return StudyPlan(
        run=lambda: run_steps(request, scale, device, config.seeds, measure, **more),
        tabulate=tabulate,
        facts=lambda rows: _facts(scale, rows) | {"seeds": config.seeds},
        intervals=study.intervals,
    )


def merge_steps(steps: Sequence[Step], scale: Scale, options: Mapping[str, Any]) -> list[Step]:
    """Return the steps without duplicates: steps whose stand-in network and data set are equal are one step."""
    kept: dict[str, Step] = {}
    for step in steps:
        model, data = stand_in(step.model, scale, options), options.get("data") or scale.data[step.data]
        kept.setdefault(repr(replace(step, model=str(model), data=data)), step)
    return list(kept.values())


def _facts(scale: Scale, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the settings that the numbers hold for; they show where a run is smaller than the paper's."""
    facts: dict[str, Any] = {"data": list(dict.fromkeys(row.dataset for row in rows))}
    facts |= {"model": list(dict.fromkeys(row.model for row in rows))}
    facts |= {} if scale.examples is None else {"examples": scale.examples}
    if any("target" in row.extra for row in rows):
        facts |= {"targets": scale.targets, "iterations": scale.iterations}
    if any(row.metric == "test_accuracy" for row in rows):
        facts |= {"users": scale.users, "epochs": scale.epochs or "as in the paper"}
        facts |= {"augmentation": augmentation_of(scale)}
    return facts


def gather(study: Study, archive: Archive) -> dict[str, DgpResults]:
    """Return the results of archived rows, whose keys hold network and data set."""
    return {"": DgpResults(archive.rows)}


register("dgp", "dgp", plan, gather)
