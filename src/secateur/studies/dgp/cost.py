"""Tables 3 and 4 of dgp: bytes and seconds of an update, measured on one gradient of each network."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Generator
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import defense_of_updates
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.uploads import SendAll
from secateur.evaluation.client import scale as pixel_scale
from secateur.evaluation.client import transform_of
from secateur.functional import noise_of
from secateur.interfaces import Batch, Params, Transform, UploadContext
from secateur.metrics.cost import communication, count_as_paper
from secateur.metrics.estimates import combine
from secateur.runs.artifacts import Result
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies.dgp.results import DgpResults, TrainingKey, base
from secateur.studies.dgp.steps import DgpSetting, build_structure
from secateur.studies.table import Cases, Cells, TableLine, Tabulated, find_printed

BATCH = 32
MEGABYTE = 2**20
PRUNED = ("dgp", "adgp")  # defenses whose share of the dense size the paper prints
PATIENCE = 20.0  # seconds after which a slow call is not repeated
TIMES = {"defense_seconds": "seconds an epoch", "user_seconds": "with the gradients"}  # titles in Table 4


def measure_cost(setting: DgpSetting) -> None:
    """Measure bytes and seconds of one network's update under a defense; times are this machine's."""
    data, scale = setting.data, setting.scale
    steps = math.ceil(data.train_size / (scale.users * BATCH))
    depends = {"model": setting.model, "data": data.key, "defense": setting.defense, "seed": setting.seed}
    depends |= {"repeats": scale.repeats, "device": setting.device.type, "times": [*TIMES]}
    cost = setting.run.stage("cost", depends, partial(_measure, setting)).data
    labels = setting.labels("cost", steps=steps)
    sizes = {name: cost[name] for name in ("bytes", "ratio", "paper_ratio")}
    rows = [Row(**labels, metric=name, value=x, low=x, high=x) for name, x in sizes.items()]
    for name in TIMES:
        ends = {end: steps * seconds for end, seconds in cost[name].items()}
        rows.append(Row(**labels, metric=name, timing=True, **ends))
    setting.run.add(rows)


def _measure(setting: DgpSetting) -> Result:
    """Measure one user's update; under ADGP it uses the positions broadcast by another user."""
    data, net = setting.data, build_structure(setting).to(setting.device)
    chosen = defense_of_updates(setting.defense)
    upload = upload_of(chosen) or SendAll()
    transform = transform_of(chosen, *pixel_scale(data.mean, data.std, data.inputs[: data.train_size]))
    first, other = (_context(setting, net, user) for user in range(2))
    broadcast: dict[str, Any] = {}
    if isinstance(upload, AlignedDualGradientPruning):
        broadcast["inside"] = upload.positions(_gradient(other))
    defending: list[float] = []
    total_seconds: list[float] = []
    begin = time.perf_counter()
    while len(total_seconds) < setting.scale.repeats and (not total_seconds or time.perf_counter() - begin < PATIENCE):
        start = _now(setting.device)
        context = first if transform is None else _transform_inputs(first, transform)
        transformed = _now(setting.device)
        grads = _gradient(context)
        differentiated = _now(setting.device)
        sent, _ = upload(grads, upload.init(grads), context, **broadcast)
        end = _now(setting.device)
        defending.append(transformed - start + end - differentiated)
        total_seconds.append(end - start)
    real, counted = communication(sent, **broadcast), count_as_paper(sent, **broadcast)
    sizes = {"bytes": real.bytes, "ratio": real.ratio, "paper_ratio": counted.ratio}
    return Result(data=sizes | dict(zip(TIMES, map(_spread, (defending, total_seconds)), strict=True)))


def _gradient(context: UploadContext) -> Params:
    return gradient_update(context.net, context.sent, context.batch, "batch").values


def _transform_inputs(context: UploadContext, transform: Transform) -> UploadContext:
    inputs = transform(context.batch.inputs, context.rng)
    return replace(context, batch=context.batch._replace(inputs=inputs))


def _spread(seconds: list[float]) -> dict[str, float]:
    return {"value": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}


def _context(setting: DgpSetting, net: torch.nn.Module, user: int) -> UploadContext:
    rng = derive(setting.seed, "cost", user)
    rows = torch.randperm(setting.data.train_size, generator=rng)[:BATCH]
    batch: Batch = setting.data.batch.take(rows).to(setting.device)
    params = tree.state_of(net) | noise_of(net, batch.size, rng)
    return UploadContext(net, params, batch, 0, Generator().manual_seed(user), cross_entropy, "batch")


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def table3(results: DgpResults) -> Tabulated:
    """Return Table 3: MB of one upload and one download, as encoded and as the paper counts."""
    costs = results.trainings("cost")
    lines = []
    for key in costs.keys:
        size = costs.mean(key, "bytes")
        cells: Cells = {"MB": combine(lambda x: x / MEGABYTE, costs.of(key, "bytes"))}
        cells |= {"bytes": f"{size.value:,.0f}" if size else "", "of dense": costs.mean(key, "ratio")}
        cells |= {"as the paper counts": costs.mean(key, "paper_ratio")}
        lines.append(TableLine(_labels(key), cells, _paper("table_3", key, "MB")))
    network = "resnet18"
    shares = {
        name: find_printed("dgp", "table_3", network, name) / find_printed("dgp", "table_3", network, "none")
        for name in PRUNED
    }
    keys = {key.defense: key for key in costs.select(model=network)}

    def room(metric: str) -> Cases:
        """Return how much less than the paper's share each defense takes."""
        return {
            name: combine(lambda x, most=most: most - x, costs.of(keys.get(name), metric))
            for name, most in shares.items()
        }

    limits = ", ".join(f"{name} {share:.4f}" for name, share in shares.items())
    return lines, results.judge("table3", {"limits": limits}, room=room("ratio"), counted=room("paper_ratio"))


def table4(results: DgpResults) -> Tabulated:
    """Return Table 4: seconds of one user's steps in an epoch, of the defense alone and with the gradients.

    PRECODE acts on the model, so that its cost is in the gradients, which take longer.
    """
    costs = results.trainings("cost")
    lines = []
    for key in costs.keys:
        cells: Cells = {title: costs.mean(key, name) for name, title in TIMES.items()}
        lines.append(TableLine(_labels(key), cells, _paper("table_4", key, "s")))
    return lines, results.judge("table4")


def _labels(key: TrainingKey) -> dict[str, str]:
    return {"model": key.model, "defense": key.defense}


def _paper(table: str, key: TrainingKey, unit: str) -> str:
    number = find_printed("dgp", table, key.model, base(key.defense))
    return "" if number is None else f"{number:g} {unit}"
