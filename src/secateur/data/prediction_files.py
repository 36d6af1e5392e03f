"""Files of saved predictions: probabilities, labels and membership, and those of shadow models.

An .npz file holds `probabilities` (N, K), `labels` (N,) and `membership` (N,), and if known `groups` (N,). Shadow
models come in one of two forms. With `shadow_probabilities` (S, N, K) and `shadow_membership` (S, N), S models answer
the same N rows. With `shadow_probabilities` (M, K), `shadow_labels` (M,) and `shadow_membership` (M,), one model
answers rows of its own. A .csv or .parquet file has the columns p0, p1, ..., label, membership, and if known group.
Each shadow model of the same rows adds columns: the first shadow0_p0, shadow0_p1, ..., shadow0_membership.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from secateur.data.archives import map_npz
from secateur.data.columns import read_columns
from secateur.errors import WrongInput
from secateur.inference import TOLERANCE

AT_ONCE = 1 << 12  # rows that are checked at a time
ENDINGS = (".npz", ".csv", ".parquet")
FIELDS = ("probabilities", "labels", "membership")
COLUMNS = "p0, p1, ..., label, membership"


@dataclass(frozen=True)
class Predictions:
    """Answers of one model to N rows, and the truth about them."""

    probabilities: Tensor  # (N, K) numbers of any kind; those of an uncompressed .npz are mapped, not read
    labels: Tensor  # (N,) int64
    membership: Tensor  # (N,) bool
    groups: tuple[str, ...] | None = None  # (N,)


@dataclass(frozen=True)
class PredictionFile:
    """Contents of a file: the victim's answers, and those of shadow models in one of two forms."""

    victim: Predictions
    shadow: Predictions | None = None  # one model with rows of its own
    answers: Tensor | None = None  # (S, N, K): S models on the victim's rows
    trained_on: Tensor | None = None  # (S, N) bool: the rows that each of them was trained on


def read_predictions(file: Path, group: str | None = None) -> PredictionFile:
    """Read and check a file of saved predictions; `group` is the user's own column, by default `groups` or `group`."""
    if file.suffix not in ENDINGS:
        raise WrongInput("predictions", f"{file} is not allowed; use {', '.join(ENDINGS)}")
    if not file.is_file():
        raise WrongInput("predictions", f"{file} is not a file; name one that exists")
    arrays = map_npz(file) if file.suffix == ".npz" else _arrange_columns(file, read_columns("predictions", file))
    if group is not None and group not in arrays:
        raise WrongInput("group", f"{file} has no column {group!r}; it holds {', '.join(arrays)}")
    arrays |= {"groups": arrays[group]} if group is not None else {}
    victim = _predictions(arrays, "")
    if "shadow_probabilities" not in arrays:
        return PredictionFile(victim)
    if arrays["shadow_probabilities"].ndim == 3:
        return PredictionFile(victim, None, *_answers(arrays, victim))
    shadow = _predictions(arrays, "shadow_")
    kinds = victim.probabilities.shape[1], shadow.probabilities.shape[1]
    if kinds[0] != kinds[1]:
        problem = f"probabilities have {kinds[0]} classes and shadow_probabilities {kinds[1]}"
        raise WrongInput("predictions", f"{problem}; must be equal, in one order")
    return PredictionFile(victim, shadow)


def _predictions(arrays: dict[str, np.ndarray], prefix: str) -> Predictions:
    missing = [prefix + name for name in FIELDS if prefix + name not in arrays]
    if missing:
        held = ", ".join(arrays) or "nothing"
        raise WrongInput("predictions", f"{', '.join(missing)} is missing; the file holds {held}")
    probabilities, labels, membership = (_read_numbers(prefix + name, arrays[prefix + name]) for name in FIELDS)
    if probabilities.ndim != 2 or labels.shape != membership.shape or labels.shape != probabilities.shape[:1]:
        shapes = ", ".join(f"{name} {tuple(arrays[prefix + name].shape)}" for name in FIELDS)
        raise WrongInput("predictions", f"the shapes do not fit: {shapes}; must be (N, K), (N,) and (N,)")
    if probabilities.numel() == 0:
        raise WrongInput("predictions", f"{prefix}probabilities have no rows; must be members and non-members")
    _check_probabilities(f"{prefix}probabilities", probabilities)
    classes = probabilities.shape[1]
    if bool(((labels != labels.long()) | (labels < 0) | (labels >= classes)).any()):
        raise WrongInput("predictions", f"{prefix}labels must be whole numbers from 0 to {classes - 1}")
    if not bool(((membership == 0) | (membership == 1)).all()) or not 0 < int(membership.sum()) < len(membership):
        raise WrongInput("predictions", f"{prefix}membership must name members (1) and non-members (0), both")
    groups = None if prefix else _groups(arrays, len(labels))
    return Predictions(probabilities, labels.long(), membership.bool(), groups)


def _answers(arrays: dict[str, np.ndarray], victim: Predictions) -> tuple[Tensor, Tensor]:
    """Return answers (S, N, K) and membership (S, N) of shadow models on the victim's rows."""
    if "shadow_membership" not in arrays:
        raise WrongInput("predictions", "shadow_membership is missing; must be (S, N): the rows of each model")
    names = ("shadow_probabilities", "shadow_membership")
    answers, trained_on = (_read_numbers(name, arrays[name]) for name in names)
    wanted = (len(answers), *victim.probabilities.shape)
    if tuple(answers.shape) != wanted or tuple(trained_on.shape) != wanted[:2] or not len(answers):
        shapes = f"shadow_probabilities {tuple(answers.shape)}, shadow_membership {tuple(trained_on.shape)}"
        raise WrongInput("predictions", f"the shapes do not fit: {shapes}; must be (S, N, K) and (S, N)")
    _check_probabilities("shadow_probabilities", answers)
    if not bool(((trained_on == 0) | (trained_on == 1)).all()):
        raise WrongInput("predictions", "shadow_membership must be 1 where the row trained the model, else 0")
    return answers, trained_on.bool()


def _check_probabilities(name: str, probabilities: Tensor) -> None:
    """Refuse rows (..., K) that are no probabilities; some rows at a time, as they may be mapped."""
    for part in torch.split(probabilities.flatten(0, -2), AT_ONCE):
        numbers = part.double()
        if not bool(((numbers.sum(-1) - 1).abs() <= TOLERANCE).all()) or bool((numbers < 0).any()):
            raise WrongInput("predictions", f"{name} must be numbers from 0 to 1 whose rows sum to one")


def _groups(arrays: dict[str, np.ndarray], rows: int) -> tuple[str, ...] | None:
    if "groups" not in arrays:
        return None
    if arrays["groups"].shape != (rows,):
        raise WrongInput("predictions", f"groups have the shape {arrays['groups'].shape}; must be ({rows},)")
    return tuple(str(group) for group in arrays["groups"].tolist())


def _read_numbers(name: str, array: np.ndarray) -> Tensor:
    """Return an array as a tensor that shares its memory; refuse other values than finite numbers."""
    if array.dtype.kind not in "biuf" or not all(np.isfinite(part).all() for part in _split_rows(array)):
        raise WrongInput("predictions", f"{name} must hold finite numbers and nothing else")
    if array.dtype.kind == "u" or not array.dtype.isnative:  # torch has few of these kinds
        array = array.astype(np.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an array that cannot be written is only read
        return torch.from_numpy(array)


def _split_rows(array: np.ndarray) -> Iterator[np.ndarray]:
    rows = array.reshape(-1, array.shape[-1]) if array.ndim > 1 else array
    return (rows[start : start + AT_ONCE] for start in range(0, len(rows), AT_ONCE))


def _arrange_columns(file: Path, columns: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the arrays that a file's columns stand for."""
    classes = _count(columns, r"p\d+")
    if not classes or "label" not in columns or "membership" not in columns:
        raise WrongInput("predictions", f"{file} must have the columns {COLUMNS}")
    probabilities = [f"p{k}" for k in range(classes)]
    arrays = {
        "probabilities": _table(file, columns, probabilities),
        "labels": _table(file, columns, ["label"])[:, 0],
        "membership": _table(file, columns, ["membership"])[:, 0],
    }
    known = re.compile(r"p\d+|label|membership|shadow\d+_\w+")
    arrays |= {name: np.asarray(values).astype(str) for name, values in columns.items() if not known.fullmatch(name)}
    if "group" in columns:
        arrays["groups"] = arrays["group"]
    if shadows := _count(columns, r"shadow\d+_p0"):
        tables = [_table(file, columns, [f"shadow{s}_{name}" for name in probabilities]) for s in range(shadows)]
        inside = [_table(file, columns, [f"shadow{s}_membership"])[:, 0] for s in range(shadows)]
        arrays |= {"shadow_probabilities": np.stack(tables), "shadow_membership": np.stack(inside)}
    return arrays


def _count(columns: dict[str, Any], pattern: str) -> int:
    """Return the number of columns with such names, which are numbered from 0; `_table` names a gap."""
    return sum(re.fullmatch(pattern, name) is not None for name in columns)


def _table(file: Path, columns: dict[str, Any], names: list[str]) -> np.ndarray:
    if missing := [name for name in names if name not in columns]:
        raise WrongInput("predictions", f"{file} has no column {missing[0]}; must have the columns {COLUMNS}")
    try:
        return np.stack([np.asarray(columns[name]).astype(np.float64) for name in names], 1)
    except (TypeError, ValueError) as error:
        raise WrongInput("predictions", f"{file} cannot be read as numbers under one line of names: {error}") from None
