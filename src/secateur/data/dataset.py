"""A data set in memory: one pool of normalised examples, with labels, classes and statistics."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput, check_whole
from secateur.interfaces import Batch

Stats = tuple[float, ...]  # a number per channel


@dataclass(frozen=True, eq=False)
class Dataset:
    """The train and test parts as one pool; the first `train_size` rows are the public train part."""

    name: str
    inputs: Tensor  # (N, ...) float32, normalised; or int64, such as tokens of a text
    labels: Tensor  # (N,) int64 in [0, classes)
    classes: int
    train_size: int
    writers: Tensor | None = None  # (N,) int64: the writer of each example; None if unknown
    mean: Stats = ()  # per channel, in [0, 1] pixels, or per column of a table; empty if unknown
    std: Stats = ()
    groups: tuple[str, ...] | None = None  # (N,) the user's own column, by which leakage is compared
    population: int = 0  # rows at the end that are the attacker's: neither members nor candidates
    verified: bool | None = None  # True if every file has its published checksum; None if none is published
    scaling: str = ""  # of the inputs, in words
    described: bool = False  # True if the source of the data says the scaling of the inputs

    def __post_init__(self) -> None:
        rows = len(self.inputs)
        if rows == 0:
            raise WrongInput("inputs", f"{self.name} is empty; it must have at least one example")
        if self.inputs.dtype not in (torch.float32, torch.int64):
            raise WrongInput("inputs", f"{self.name} has {self.inputs.dtype}; allowed are float32 and int64")
        if not all(bool(torch.isfinite(part).all()) for part in torch.split(self.inputs, 4096)):
            raise WrongInput("inputs", f"{self.name} has NaN or infinite values; every value must be finite")
        for field, value in (("labels", self.labels), ("writers", self.writers)):
            if value is not None and (value.dtype != torch.int64 or value.shape != (rows,)):
                shape = tuple(value.shape)
                raise WrongInput(field, f"{self.name} has {value.dtype} of shape {shape}; allowed is int64 ({rows},)")
        if self.groups is not None and len(self.groups) != rows:
            raise WrongInput(
                "group", f"{self.name} has {len(self.groups)} values for {rows} rows; use one for each row"
            )
        low, high = int(self.labels.min()), int(self.labels.max())
        if low < 0 or high >= self.classes:
            raise WrongInput("labels", f"{self.name} has labels from {low} to {high}; allowed: 0 to {self.classes - 1}")
        check_whole("train_size", self.train_size)
        if self.train_size > rows:
            raise WrongInput("train_size", f"{self.train_size} is more than the {rows} rows of {self.name}")

    @property
    def batch(self) -> Batch:
        """All examples as one batch."""
        return Batch(self.inputs, self.labels)

    @cached_property
    def key(self) -> str:
        """The sha256 of the examples and labels."""
        return fingerprint(self.inputs, self.labels)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one example."""
        return tuple(self.inputs.shape[1:])

    def limit_rows(self, number: int, rng: Generator) -> Dataset:
        """Return the data set or, if it is larger, `number` random rows of it in their original order."""
        if number >= len(self.inputs):
            return self
        rows = torch.randperm(len(self.inputs), generator=rng)[:number].sort().values
        size, writers = int((rows < self.train_size).sum()), None if self.writers is None else self.writers[rows]
        return replace(
            self,
            inputs=self.inputs[rows],
            labels=self.labels[rows],
            train_size=size,
            writers=writers,
            groups=self.groups_of(rows),
        )

    def groups_of(self, rows: Tensor) -> tuple[str, ...] | None:
        """Return the groups of some rows (n,); None if there are none."""
        return None if self.groups is None else tuple(self.groups[row] for row in rows.tolist())


def fingerprint(*tensors: Tensor) -> str:
    """Return the sha256 of the tensors' bytes."""
    digest = hashlib.sha256()
    for value in tensors:
        flat = value.detach().cpu().contiguous().reshape(-1).numpy()
        digest.update(flat.data.cast("B"))  # no copy
    return digest.hexdigest()


def dataset_of_pixels(
    name: str, pixels: np.ndarray, labels: np.ndarray, classes: int, size: int, mean: Stats, std: Stats, **more: Any
) -> Dataset:
    """Return a data set of pictures from (N, C, H, W) bytes, with a train part of `size` rows; `more` are fields."""
    targets = torch.from_numpy(labels.astype(np.int64))
    return Dataset(name, normalise_bytes(pixels, mean, std), targets, classes, size, mean=mean, std=std, **more)


def normalise_bytes(pixels: np.ndarray, mean: Stats, std: Stats) -> Tensor:
    """Return (bytes / 255 - mean) / std as float32 for (N, C, H, W) bytes, with one copy in memory.

    Example:
        >>> normalise_bytes(np.full((1, 1, 1, 1), 255, dtype=np.uint8), (0.5,), (0.5,)).item()
        1.0
    """
    inputs = torch.from_numpy(np.ascontiguousarray(pixels)).to(torch.float32)
    per_channel = (1, -1, 1, 1)
    return inputs.div_(255).sub_(torch.tensor(mean).view(per_channel)).div_(torch.tensor(std).view(per_channel))
