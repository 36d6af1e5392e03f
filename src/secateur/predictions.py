"""Audit saved predictions: a table of probabilities, labels and membership, without any model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.auditing import attack_rows, flat, judged
from secateur.catalogue import Choice
from secateur.chance import derive
from secateur.config import Audit, dump
from secateur.data.archives import read_npz
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, Shadow
from secateur.metrics.membership import share
from secateur.runs import Row, open_run

FIELDS = ("probabilities", "labels", "membership")
NO_SHADOWS = "needs shadow models' predictions; give shadow_probabilities, shadow_labels and shadow_membership"
NO_MODEL = "asks the model new questions, which saved predictions cannot answer"


def run_predictions(config: Audit, file: Path, out: Path) -> list[Row]:
    """Attack what a file of saved predictions shows, into the folder `out`."""
    from secateur.report.page import write_page

    arrays = _read(file)
    victim = _table(arrays, "")
    shadow = _table(arrays, "shadow_") if "shadow_probabilities" in arrays else None
    labels: dict[str, Any] = {"model": file.stem, "dataset": "saved predictions", "pruner": "given", "sparsity": 0.0}
    labels |= {"defense": "given", "adaptive": False, "seed": config.seeds[0], "extra": {}}
    with open_run(out, "audit", dump(config), seeds=config.seeds[:1]) as run:
        hits = victim.probabilities.argmax(1) == victim.labels
        for name, side in (("train_accuracy", victim.membership), ("test_accuracy", ~victim.membership)):
            run.add([Row(**labels, metric=name, **share(hits[side])._asdict())])
        for attack in config.attack:
            named = labels | {"attack": str(attack)}
            try:
                guesses = _guess(attack, victim, shadow, config.seeds[0])
            except WrongInput as error:
                run.add([Row(**named, metric="auc", value=None, note=error.message)])
                continue
            found = judged(guesses, victim.membership, config.seeds[0])
            run.add(attack_rows(named, found))
            run.show([flat(named) | found["figure"]])
        rows = run.rows
    write_page([out])
    return rows


class _Table:
    """Saved answers; the inputs that an attack asks about are the rows' numbers."""

    def __init__(self, probabilities: Tensor, labels: Tensor, membership: Tensor) -> None:
        self.probabilities, self.labels, self.membership = probabilities, labels, membership

    @property
    def box(self) -> BlackBox:
        return BlackBox(self._answer)

    def batch(self, rows: Tensor | None = None) -> Batch:
        numbers = torch.arange(len(self.labels), dtype=torch.float64)[:, None]
        whole = Batch(numbers, self.labels)
        return whole if rows is None else whole.take(rows)

    def _answer(self, inputs: Tensor) -> Tensor:
        numbers = inputs.flatten()
        if not torch.equal(numbers, numbers.round()) or inputs.shape[1:] != (1,):
            raise WrongInput("attack", NO_MODEL)
        return self.probabilities[numbers.long()]


def _guess(attack: Choice, victim: _Table, shadow: _Table | None, seed: int) -> Guesses:
    if attack.name in ("blindmi", "label-only", "samia"):
        raise WrongInput("attack", NO_MODEL)
    if attack.method.info["shadows"] != "none" and shadow is None:
        raise WrongInput("attack", NO_SHADOWS)
    shadows = []
    if shadow is not None:
        shadows = [Shadow(shadow.box, shadow.batch(shadow.membership), shadow.batch(~shadow.membership))]
    fitted = attack.make().fit(shadows, derive(seed, "attack", str(attack)))
    guesses: Guesses = fitted.score(victim.box, Candidates(victim.batch()))
    return guesses


def _read(file: Path) -> dict[str, np.ndarray]:
    if file.suffix == ".npz":
        return read_npz(file)
    if file.suffix != ".csv":
        raise WrongInput("predictions", f"{file} is not allowed; give an .npz or a .csv file")
    try:
        with file.open(encoding="utf-8") as stream:
            names = [name.strip() for name in stream.readline().split(",")]
            table = np.loadtxt(stream, delimiter=",", ndmin=2)
    except (OSError, ValueError) as error:
        raise WrongInput("predictions", f"{file} cannot be read as numbers under one line of names: {error}") from None
    if names[-2:] != ["label", "membership"] or table.shape[1] != len(names):
        raise WrongInput("predictions", f"{file} must have the columns p0, p1, ..., label, membership")
    return {"probabilities": table[:, :-2], "labels": table[:, -2], "membership": table[:, -1]}


def _table(arrays: dict[str, np.ndarray], prefix: str) -> _Table:
    missing = [prefix + name for name in FIELDS if prefix + name not in arrays]
    if missing:
        raise WrongInput("predictions", f"{', '.join(missing)} must be given; the file holds {', '.join(arrays)}")
    probabilities, labels, membership = (torch.from_numpy(np.asarray(arrays[prefix + name])) for name in FIELDS)
    probabilities, labels, membership = probabilities.double(), labels.long(), membership.bool()
    if probabilities.ndim != 2 or labels.shape != membership.shape or labels.shape != probabilities.shape[:1]:
        shapes = ", ".join(f"{name} {tuple(arrays[prefix + name].shape)}" for name in FIELDS)
        raise WrongInput("predictions", f"the shapes do not fit: {shapes}; wanted (N, K), (N,) and (N,)")
    if not bool(probabilities.isfinite().all()) or float((probabilities.sum(1) - 1).abs().amax()) > 1e-3:
        raise WrongInput("predictions", f"{prefix}probabilities must be numbers from 0 to 1 whose rows sum to one")
    if int(labels.min()) < 0 or int(labels.max()) >= probabilities.shape[1]:
        raise WrongInput("predictions", f"{prefix}labels must lie from 0 to {probabilities.shape[1] - 1}")
    if bool(membership.all()) or not bool(membership.any()):
        raise WrongInput("predictions", f"{prefix}membership must name members (1) and non-members (0), both")
    return _Table(probabilities, labels, membership)
