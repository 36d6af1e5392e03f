"""A collaborative training as one stage of a run; a killed and restarted training ends with equal rows."""

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
from secateur.federated.collaborative.training import CollaborativeResult, CollaborativeTraining, Epoch
from secateur.progress import progress
from secateur.runs.artifacts import Result, decode, encode, explained, key_of, write
from secateur.runs.folder import Run
from secateur.runs.unfinished import forget

STAGE = "collaborate"
EVERY = 30.0  # seconds between two checkpoints
SHARE = 0.03  # of the time for checkpoints: with the residuals of ten ResNet18s, one checkpoint takes seconds

Measure = Callable[[Epoch], Row]  # further columns of an epoch's row, e.g. the bytes that its last step sent


def collaborate(
    run: Run,
    training: CollaborativeTraining,
    *,
    measure: Measure | None = None,
    also: Mapping[str, Any] | None = None,
    every: float = EVERY,
) -> CollaborativeResult:
    """Train, resume, or return the saved result of the same data, network, plan and seed.

    Until the stage is done, checkpoints are written to `unfinished/` after epochs, at most once in `every` seconds.
    They are less frequent if they would take more than SHARE of the time.

    Args:
        run: the run that stores the result.
        training: the training to run.
        measure: computes further columns of an epoch's row.
        also: further parts of the stage key; functions, such as the loss and `measure`, are in it by name only.
        every: seconds between two checkpoints; 0: one after every epoch.
    """
    depends = depends_of(training) | {"measure": named(measure), "also": dict(also or {})}
    key = key_of(STAGE, depends)
    result = run.stage(STAGE, depends, lambda: _train(run.folder, key, training, measure, every))
    forget(run.folder, STAGE, key)
    parts: dict[str, dict[str, Any]] = {"model": {}, "client": {}}
    for name, value in result.tensors.items():
        part, _, key_in_part = name.partition(".")
        parts[part][key_in_part] = value
    return CollaborativeResult(parts["model"], result.data["history"], parts["client"], training.stated)


def depends_of(training: CollaborativeTraining) -> dict[str, Any]:
    """Return everything that a training's result depends on."""
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


def _train(folder: Path, key: str, training: CollaborativeTraining, measure: Measure | None, every: float) -> Result:
    path = folder / "unfinished" / f"{STAGE}-{key[:16]}.safetensors"
    history, saved_at = _resumed(path, key, training), time.monotonic()
    plan, steps = training.plan, training.feed.steps
    with progress(f"{plan.users} users, {named(plan.upload)}", plan.schedule.epochs * steps, rate=True) as advance:
        advance(training.epoch * steps)
        for epoch in training.epochs(advance):
            history.append(epoch.row | ({} if measure is None else measure(epoch)))
            if time.monotonic() - saved_at >= every and training.epoch < plan.schedule.epochs:
                started = time.monotonic()
                with explained(path):
                    path.parent.mkdir(exist_ok=True)
                write(path, encode(Result(training.state(), {"history": history}), key))
                saved_at = time.monotonic()
                every = every and max(every, (saved_at - started) / SHARE)
    model, client = training.model(), tree.clone(training.rounds.states[0])
    tensors = {f"model.{name}": value for name, value in model.items()}
    return Result(tensors | {f"client.{name}": value for name, value in client.items()}, {"history": history})


def _resumed(path: Path, key: str, training: CollaborativeTraining) -> list[Row]:
    """Load the checkpoint of a killed training and return its rows; a damaged file counts as absent."""
    with explained(path):
        content = path.read_bytes() if path.exists() else None
    checkpoint = None if content is None else decode(content, key)
    if checkpoint is None:
        return []
    training.load(dict(checkpoint.tensors))
    history: list[Row] = checkpoint.data["history"]
    return history
