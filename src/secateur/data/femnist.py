"""FEMNIST in LEAF's format: JSON files of users, each with images and labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secateur.catalogue import method
from secateur.data.dataset import Dataset
from secateur.data.fetch import cache, find
from secateur.errors import WrongInput

MEAN, STD = 0.9652, 0.1559  # MaPP-FL's
LEAF = "https://github.com/TalwalkarLab/leaf"

Users = dict[str, tuple[np.ndarray, np.ndarray]]  # images (n, 784) float32 and labels (n,) by user


@method("dataset", "femnist", "mapp_fl", classes=62, input_shape=(1, 28, 28), source=LEAF)
def femnist(folder: Path | None = None, download: bool = True) -> Dataset:
    """Handwritten digits and letters in 62 classes, with their writers (LEAF, Caldas et al. 2018).

    Reads femnist/data/train/*.json and femnist/data/test/*.json as LEAF's preprocess.sh writes them. MaPP-FL uses `-s
    niid --sf 0.2 -k 300 -t user`. Paper is 1.0, ink 0.0. There is no public download of these files.
    """
    path = find(["femnist/data", "femnist"], folder)
    if path is None or not (path / "train").is_dir():
        target = (folder or cache()) / "femnist/data"
        raise WrongInput("data", f"FEMNIST is missing; make it with {LEAF} and put its train and test into {target}")
    train, test = _users(path / "train"), _users(path / "test")
    if not train:
        raise WrongInput("data", f"{path / 'train'} holds no .json file of LEAF's users; make it again")
    names = {name: i for i, name in enumerate(sorted({name for name, _ in train + test}))}
    labels = torch.from_numpy(np.concatenate([data[1] for _, data in train + test]))
    writers = torch.from_numpy(np.concatenate([np.full(len(data[1]), names[name]) for name, data in train + test]))
    inputs = torch.from_numpy(np.concatenate([data[0] for _, data in train + test])).sub_(MEAN).div_(STD)
    train_size = sum(len(data[1]) for _, data in train)
    return Dataset("femnist", inputs.view(-1, 1, 28, 28), labels, 62, train_size, writers, (MEAN,), (STD,))


def _users(folder: Path) -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    return [user for file in sorted(folder.glob("*.json")) for user in _read(file)]


def _read(file: Path) -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
    try:
        with file.open(encoding="utf-8") as stream:
            # a user's numbers become arrays as soon as they are read: Python's floats take eight times the memory
            users: Users = json.load(stream, object_hook=_arrays)["user_data"]
        if wrong := [name for name, data in users.items() if not isinstance(data, tuple)]:
            raise ValueError(f"its user {wrong[0]} has no x and y")
        return list(users.items())
    except (OSError, ValueError, ArithmeticError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise WrongInput("data", f"{file} is not a file of LEAF's FEMNIST ({error}); make it again") from error


def _arrays(value: dict[str, Any]) -> Any:
    if "x" not in value or "y" not in value:
        return value
    images, labels = np.asarray(value["x"], dtype=np.float32), np.asarray(value["y"])
    if labels.dtype.kind not in "iu" or not ((labels >= 0) & (labels < 62)).all():
        raise ValueError("a label is no whole number from 0 to 61")
    if labels.ndim != 1 or images.shape != (len(labels), 784) or not np.isfinite(images).all():
        raise ValueError(f"{labels.size} labels and images of shape {images.shape}; must be finite numbers, (n, 784)")
    return images, labels.astype(np.int64)
