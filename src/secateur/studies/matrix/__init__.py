"""The matrix: every defense of the four papers against every kind of attacker, on one common ground.

A column can be read from top to bottom because all its cells share the ground. Of one seed these are the members and
non-members, the network with its first weights, and the clients' shares. In every round every client takes one local
step of `batch_size` pictures. A defense is placed on this ground where it acts:

- on updates, clients or the federation's model: the federation is trained under it;
- on the final model: the undefended federation's model is compressed, and fine-tuned on the same members.

What an attacker sees is the same in every row of a column:

- final model: RMIA and LiRA ask the last model, with reference models that are in or out for every candidate. They are
  trained by SGD on the union of the clients' batches, which is what an undefended federation does. They are compressed
  as the final model is. A defense of the federation also meets reference models that are trained under it (`imitates`).
- updates: membership attacks on every client's last rounds. On sub-models LiRA and RMIA learn from federations of the
  attacker's own (`shadow_federations`).
- inversion: all clients' updates of one early round, where gradients are large. Labels are known. The plain attacker
  reads the mask of pruned weights as SGI does. The strongest is the best of SGI and ig-smooth, plain and by each of the
  catalogue's `adaptive` modes.
- active server: Robbing the Fed, in the same round.

Some defenses are refused by `secateur federate`: adgp, ats, precode, ppb. Their inversions are run by `secateur invert`
on a first round, and held against `none (first round)`, which has no defense there. They are trained by collaborative
SGD on the same shares and batches; such cells are marked. Pairs that are not measured are in refusals.json. A pair that
the tool refuses shows the tool's own sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from secateur.config import Federate, read
from secateur.data.dataset import Dataset
from secateur.evaluation.setup import device_of
from secateur.report.heatmap import GROUND
from secateur.runs.archive import Archive
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.studies.matrix.ground import MatrixSetting, MatrixStep, draw_ground
from secateur.studies.matrix.measures import MEASURES
from secateur.studies.study import (
    Request,
    Scale,
    Study,
    StudyPlan,
    load_pictures,
    register,
    run_steps,
    scale_of,
    select_steps,
)

PARTS = {"rows": "row", "networks": "network", "measures": "measures"}  # `--set` selects from these fields of steps
FACTS = ("clients", "members", "batch_size", "rounds", "attacked_round", "iterations", "in_out", "imitates")


def plan(study: Study, request: Request) -> StudyPlan:
    """Return the plan of all cells for every seed; the measures of most rows come first."""
    scale, steps, more = _read(study, request)
    options = request.options
    config = read(Federate, None, {name: options.get(name) for name in ("seeds", "device")})
    device, data = device_of(config), load_pictures(options.get("data") or scale.data, options, None)
    grounds = {seed: draw_ground(data, scale.members, seed) for seed in config.seeds}

    models: dict[str, Path] = {}

    def measure(run: Run) -> None:
        run.add(_ground_rows(scale, data, steps))
        for name, function in MEASURES.items():
            for seed in config.seeds:
                for step in steps:
                    if name in step.measures:
                        function(MatrixSetting(run, scale, options, device, seed, step, grounds[seed], models))
                        run.flush()  # a matrix that is cut off has all finished cells

    return StudyPlan(
        run=lambda: run_steps(request, scale, device, config.seeds, measure, **more),
        tabulate=study.tabulate,
        facts=lambda rows: _facts(scale, data, rows) | {"seeds": config.seeds},
    )


def _read(study: Study, request: Request) -> tuple[Scale, list[MatrixStep], dict[str, Any]]:
    """Return the scale, the selected steps, and the user's selection for config.yaml."""
    parts = [text for text in request.overrides if text.partition("=")[0] in PARTS]
    scale = scale_of("matrix", request.scale, [text for text in request.overrides if text not in parts])
    networks = [request.options["model"]] if request.options.get("model") else scale.networks
    steps = [replace(step, row=step.title) for step in study.read_steps(MatrixStep, networks=networks)]
    selected, _ = select_steps(steps, parts, PARTS)
    return scale, selected, {"only": dict(text.split("=", 1) for text in parts)} if parts else {}


def _ground_rows(scale: Scale, data: Dataset, steps: Sequence[MatrixStep]) -> list[Row]:
    """Return a row for each network with the settings of the ground, for the page."""
    ground = {name: value for name, value in vars(scale).items() if name not in ("networks", "untrained", "threads")}
    extra = {"study": "matrix", "ground": ground | {"data": data.name}}
    networks = dict.fromkeys(step.network for step in steps)
    return [
        Row(model=name, dataset=data.name, seed=0, metric=GROUND, value=None, extra=dict(extra)) for name in networks
    ]


def _facts(scale: Scale, data: Dataset, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the settings that the numbers hold for."""
    networks = list(dict.fromkeys(row.model for row in rows))
    return {"data": data.name, "model": networks} | {name: getattr(scale, name) for name in FACTS}


def gather(study: Study, archive: Archive) -> dict[str, list[Row]]:
    """Return the rows of an archive: the table takes all networks."""
    return {"": archive.rows}


register("-", "matrix", plan, gather)
