"""Audit of saved predictions: a table of probabilities, labels and membership, without a model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.attacks.membership.reference_models import content
from secateur.catalogue import Choice
from secateur.config import Audit, dump
from secateur.data.archives import read_npz
from secateur.errors import WrongInput
from secateur.evaluation.membership import attack_rows, evaluate_guesses, flat_labels
from secateur.inference import TOLERANCE
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, Shadow
from secateur.metrics.membership import share
from secateur.runs.folder import open_run
from secateur.runs.rows import Row
from secateur.seeding import derive

FIELDS = ("probabilities", "labels", "membership")
NO_SHADOWS = "needs shadow models' predictions; give shadow_probabilities, shadow_labels and shadow_membership"
NO_MODEL = "asks the model new questions, which saved predictions cannot answer"


def run_predictions(config: Audit, file: Path, out: Path) -> list[Row]:
    """Attack the saved predictions of a file, into the folder `out`."""
    from secateur.report.page import write_page

    victim, shadow, config = _opened(config, file)
    labels: dict[str, Any] = {"model": file.stem, "dataset": "saved predictions", "pruner": "given", "sparsity": 0.0}
    labels |= {"defense": "given", "adaptive": False, "seed": config.seeds[0], "extra": {}}
    with open_run(out, "audit", dump(config), seeds=config.seeds[:1]) as run:
        hits = victim.probabilities.argmax(1) == victim.labels
        for name, side in (("train_accuracy", victim.membership), ("test_accuracy", ~victim.membership)):
            run.add([Row(**labels, metric=name, **share(hits[side])._asdict())])
        for attack in config.attack:
            attack_labels = labels | {"attack": str(attack)}
            try:
                guesses = _guess(attack, victim, shadow, config.seeds[0])
            except WrongInput as error:
                run.add([Row(**attack_labels, metric="auc", value=None, note=error.message)])
                continue
            result = evaluate_guesses(guesses, victim.membership, config.seeds[0])
            run.add(attack_rows(attack_labels, result))
            run.show([flat_labels(attack_labels) | result["figure"]])
        rows = run.rows
    write_page([out])
    return rows


def planned(config: Audit, file: Path) -> list[str]:
    """Describe the audit of the file in lines; the file is read for that."""
    names = ", ".join(map(str, _opened(config, file)[2].attack))
    return [f"attack the saved predictions {file} with {names}"]


def _opened(config: Audit, file: Path) -> tuple[_Table, _Table | None, Audit]:
    """Return the tables of the model and of a shadow model, if any, and the configuration with possible attacks."""
    arrays = _read(file)
    shadow = _table(arrays, "shadow_") if "shadow_probabilities" in arrays else None
    return _table(arrays, ""), shadow, config if shadow else config.with_default_attacks("correctness")


class _Table:
    """Table of saved answers, one a row. A row's input is a random mark, so any altered input is a new question."""

    def __init__(self, probabilities: Tensor, labels: Tensor, membership: Tensor, name: str) -> None:
        self.probabilities, self.labels, self.membership = probabilities, labels, membership
        self.marks = torch.rand(len(labels), 8, generator=derive(0, "marks", name))
        self.rows = {mark: row for row, mark in enumerate(content(self.marks))}

    @property
    def box(self) -> BlackBox:
        return BlackBox(self._answer)

    def batch(self, rows: Tensor | None = None) -> Batch:
        examples = Batch(self.marks, self.labels)
        return examples if rows is None else examples.take(rows)

    def _answer(self, inputs: Tensor) -> Tensor:
        asked = [self.rows.get(mark) for mark in content(inputs)]
        if None in asked:
            raise WrongInput("attack", NO_MODEL)
        return self.probabilities[torch.tensor(asked, dtype=torch.int64)]


def _guess(attack: Choice, victim: _Table, shadow: _Table | None, seed: int) -> Guesses:
    if attack.method.info["shadows"] != "none" and shadow is None:
        raise WrongInput("attack", NO_SHADOWS)
    shadows = []
    if shadow is not None:
        shadows = [Shadow(shadow.box, shadow.batch(shadow.membership), shadow.batch(~shadow.membership))]
    fitted = attack.make().fit(shadows, derive(seed, "attack", str(attack)))
    guesses: Guesses = fitted.score(victim.box, Candidates(victim.batch()))
    return guesses


def _read(file: Path) -> dict[str, np.ndarray]:
    if file.suffix not in (".npz", ".csv"):
        raise WrongInput("predictions", f"{file} is not allowed; give an .npz or a .csv file")
    if not file.is_file():
        raise WrongInput("predictions", f"{file} is not a file; give an .npz or a .csv file that exists")
    return read_npz(file) if file.suffix == ".npz" else _read_csv(file)


def _read_csv(file: Path) -> dict[str, np.ndarray]:
    try:
        with file.open(encoding="utf-8") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # numpy warns about a file without rows
            names = [name.strip() for name in stream.readline().split(",")]
            table = np.loadtxt(stream, delimiter=",", ndmin=2)
            table = table if table.size else table.reshape(0, len(names))
    except (OSError, ValueError) as error:
        raise WrongInput("predictions", f"{file} cannot be read as numbers under one line of names: {error}") from None
    if names[-2:] != ["label", "membership"] or table.shape[1] != len(names):
        raise WrongInput("predictions", f"{file} must have the columns p0, p1, ..., label, membership")
    return {"probabilities": table[:, :-2], "labels": table[:, -2], "membership": table[:, -1]}


def _table(arrays: dict[str, np.ndarray], prefix: str) -> _Table:
    missing = [prefix + name for name in FIELDS if prefix + name not in arrays]
    if missing:
        held = ", ".join(arrays) or "nothing"
        raise WrongInput("predictions", f"{', '.join(missing)} must be given; the file holds {held}")
    probabilities, labels, membership = (_numbers(prefix + name, arrays[prefix + name]) for name in FIELDS)
    if probabilities.ndim != 2 or labels.shape != membership.shape or labels.shape != probabilities.shape[:1]:
        shapes = ", ".join(f"{name} {tuple(arrays[prefix + name].shape)}" for name in FIELDS)
        raise WrongInput("predictions", f"the shapes do not fit: {shapes}; wanted (N, K), (N,) and (N,)")
    if probabilities.numel() == 0:
        raise WrongInput("predictions", f"{prefix}probabilities have no rows; give members and non-members")
    if bool((probabilities < 0).any()) or float((probabilities.sum(1) - 1).abs().amax()) > TOLERANCE:
        raise WrongInput("predictions", f"{prefix}probabilities must be numbers from 0 to 1 whose rows sum to one")
    if not bool(torch.isin(labels, torch.arange(probabilities.shape[1])).all()):
        raise WrongInput("predictions", f"{prefix}labels must be whole numbers from 0 to {probabilities.shape[1] - 1}")
    if set(membership.tolist()) != {0, 1}:
        raise WrongInput("predictions", f"{prefix}membership must name members (1) and non-members (0), both")
    return _Table(probabilities, labels.long(), membership.bool(), prefix)


def _numbers(name: str, array: np.ndarray) -> Tensor:
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise WrongInput("predictions", f"{name} must hold finite numbers and nothing else")
    return torch.from_numpy(array.astype(np.float64))
