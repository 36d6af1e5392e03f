"""A collaborative training as one stage of a run: killed at any moment and started again, it ends with equal rows."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from secateur import tree
from secateur.data.dataset import fingerprint
from secateur.federated.collaborative.measurements import Row
from secateur.federated.collaborative.plan import named
from secateur.federated.collaborative.training import Collaborated, Epoch, Training
from secateur.progress import progress
from secateur.runs.artifacts import Result, decode, encode, explained, key_of, write
from secateur.runs.folder import Run
from secateur.runs.unfinished import forget

STAGE = "collaborate"
EVERY = 30.0  # seconds between two savings
SHARE = 0.03  # of the time may go into savings: with ten ResNet18s' residuals one takes seconds

Measure = Callable[[Epoch], Row]  # more columns of an epoch's row, such as the bytes that its last step sent


def collaborate(
    run: Run,
    training: Training,
    *,
    measure: Measure | None = None,
    also: Mapping[str, Any] | None = None,
    every: float = EVERY,
) -> Collaborated:
    """Train, or go on, or take what an earlier start of this run made from the same data, network, plan and seed.

    After an epoch everything is kept in `unfinished/` until the stage is done: at most once in `every` seconds (0:
    after every epoch), and less often where that would take more than a SHARE of the time.
    The result depends on functions, such as a loss and `measure`, by their names; `also` is what these do not tell.
    """
    depends = depends_of(training) | {"measure": named(measure), "also": dict(also or {})}
    key = key_of(STAGE, depends)
    result = run.stage(STAGE, depends, lambda: _train(run.folder, key, training, measure, every))
    forget(run.folder, STAGE, key)
    parts: dict[str, dict[str, Any]] = {"model": {}, "client": {}}
    for name, value in result.tensors.items():
        part, _, own = name.partition(".")
        parts[part][own] = value
    return Collaborated(parts["model"], result.data["history"], parts["client"], training.stated)


def depends_of(training: Training) -> dict[str, Any]:
    """All that a training's result depends on."""
    net, shares = training.net, training.feed.shares
    structure = hashlib.sha256(repr(net).encode()).hexdigest()
    return training.plan.stated | {
        "upload": repr(training.plan.upload),
        "data": training.data.key,
        "train_size": training.data.train_size,
        "net": [structure, fingerprint(*net.state_dict().values())],
        "shares": fingerprint(*shares),
        "sizes": [len(rows) for rows in shares],
        "seed": training.seed,
        "device": training.device.type,
    }


def _train(folder: Path, key: str, training: Training, measure: Measure | None, every: float) -> Result:
    place = folder / "unfinished" / f"{STAGE}-{key[:16]}.safetensors"
    history, saved = _resumed(place, key, training), time.monotonic()
    plan, steps = training.plan, training.feed.steps
    with progress(f"{plan.users} users, {named(plan.upload)}", plan.schedule.epochs * steps, rate=True) as advance:
        advance(training.epoch * steps)
        for epoch in training.epochs(advance):
            history.append(epoch.row | ({} if measure is None else measure(epoch)))
            if time.monotonic() - saved >= every and training.epoch < plan.schedule.epochs:
                begun = time.monotonic()
                with explained(place):
                    place.parent.mkdir(exist_ok=True)
                write(place, encode(Result(training.state(), {"history": history}), key))
                saved = time.monotonic()
                every = every and max(every, (saved - begun) / SHARE)
    model, client = training.model(), tree.clone(training.rounds.states[0])
    tensors = {f"model.{name}": value for name, value in model.items()}
    return Result(tensors | {f"client.{name}": value for name, value in client.items()}, {"history": history})


def _resumed(place: Path, key: str, training: Training) -> list[Row]:
    """Bring the training to where a killed one was; a damaged file counts as none."""
    with explained(place):
        content = place.read_bytes() if place.exists() else None
    kept = None if content is None else decode(content, key)
    if kept is None:
        return []
    training.load(dict(kept.tensors))
    history: list[Row] = kept.data["history"]
    return history
