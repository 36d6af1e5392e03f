"""Columns of csv and parquet files, and tables of numbers and categories that they hold."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from secateur.errors import WrongInput, require

ENDINGS = (".csv", ".parquet")
CATEGORIES = 100  # different texts that a column may have to be one of categories

Columns = dict[str, np.ndarray]  # (N,) by name


class Table(NamedTuple):
    """A table as a model takes it."""

    inputs: np.ndarray  # (N, D) float32: numbers as they are, categories as one column of bits for each
    labels: np.ndarray  # (N,) int64
    names: list[str]  # of the D columns


def read_columns(field: str, file: Path) -> Columns:
    """Read the columns of a .csv file with one line of names, or of a .parquet file."""
    return _read_parquet(field, file) if file.suffix == ".parquet" else _read_csv(field, file)


def _read_csv(field: str, file: Path) -> Columns:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            rows = list(csv.reader(stream))
    except (OSError, ValueError, csv.Error) as error:
        raise WrongInput(field, f"{file} cannot be read as values under one line of names: {error}") from None
    names = [name.strip() for name in rows[0]] if rows else []
    if any(len(row) != len(names) for row in rows[1:]):
        raise WrongInput(field, f"{file} has lines of different length; it must have the same columns in each")
    if len(set(names)) != len(names):
        raise WrongInput(field, f"{file} has two columns of one name; name them differently")
    return {name: np.array([row[i] for row in rows[1:]]) for i, name in enumerate(names)}


def _read_parquet(field: str, file: Path) -> Columns:
    require("pyarrow", "parquet")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(file)
        return {name: table[name].to_numpy() for name in table.column_names}
    except (OSError, ValueError, KeyError, pyarrow.ArrowException) as error:  # also names and texts that are no UTF-8
        raise WrongInput(field, f"{file} cannot be read as parquet: {error}") from None


def read_table(name: str, columns: Mapping[str, Any], label: str) -> Table:
    """Return the table of columns, one of which is the label.

    Numbers stay as they are. A column of texts with at most 100 different ones becomes a column of bits for each, in
    alphabetical order. Labels that are texts are numbered in alphabetical order.
    """
    if label not in columns:
        raise WrongInput("label", f"{name} has no column {label!r}; name one of {', '.join(columns) or 'its columns'}")
    if len(columns) == 1:
        raise WrongInput("data", f"{name} has no column beside {label!r}; add the inputs")
    parts, names = [], []
    for column, values in columns.items():
        if column == label:
            continue
        bits, titles = _inputs_of(name, column, np.asarray(values))
        parts.append(bits)
        names += titles
    if not len(parts[0]):
        raise WrongInput("data", f"{name} has no rows; add some")
    return Table(np.concatenate(parts, 1, dtype=np.float32), _labels_of(name, np.asarray(columns[label])), names)


def _inputs_of(name: str, column: str, values: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Return a column as numbers (N, d), and the names of these."""
    numbers = _numbers(values)
    if numbers is not None:
        if not np.isfinite(numbers).all():
            raise WrongInput("data", f"column {column} of {name} has missing or infinite values; fill or drop them")
        return numbers[:, None], [column]
    texts = np.array([str(value) for value in values])
    if values.dtype.kind not in "USO" or any(not isinstance(value, str) for value in values.tolist()):
        raise WrongInput("data", f"column {column} of {name} has neither numbers nor texts only; drop or convert it")
    categories = np.unique(texts)
    if len(categories) > CATEGORIES:
        many = f"{len(categories)} different texts, which are neither numbers nor categories (at most {CATEGORIES})"
        raise WrongInput("data", f"column {column} of {name} has {many}; drop or convert it")
    return texts[:, None] == categories[None], [f"{column}={category}" for category in categories]


def _labels_of(name: str, values: np.ndarray) -> np.ndarray:
    numbers = _numbers(values)
    if numbers is None:
        return np.unique([str(value) for value in values], return_inverse=True)[1].astype(np.int64)
    if not np.isfinite(numbers).all() or (numbers != np.round(numbers)).any():
        raise WrongInput("label", f"the labels of {name} must be whole numbers or names of classes")
    return numbers.astype(np.int64)


def _numbers(values: np.ndarray) -> np.ndarray | None:
    """Return values as float64; None if one is no number."""
    if values.dtype.kind not in "biufUSO":
        return None
    try:
        return values.astype(np.float64)
    except (TypeError, ValueError):
        return None
