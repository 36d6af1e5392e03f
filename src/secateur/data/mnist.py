"""MNIST, Fashion-MNIST and QMNIST: images and labels in IDX files, plain or .gz; FEMNIST in JSON files by writer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from secateur.catalogue import method
from secateur.data.archives import read_idx
from secateur.data.dataset import Dataset, dataset_of_pixels
from secateur.data.fetch import PublicFile, cache, fetch, find, md5, md5_of
from secateur.errors import WrongInput

MNIST_STATS = (0.1307,), (0.3081,)
FASHION_STATS = (0.2860,), (0.3530,)


@dataclass(frozen=True)
class Idx(PublicFile):
    """An IDX file, published as .gz; `raw` is the md5 of its uncompressed content ('' if not published)."""

    raw: str = ""


def _files(folder: str, address: str, checksums: dict[str, tuple[str, str]]) -> list[Idx]:
    return [Idx(f"{folder}/raw/{name}.gz", f"{address}{name}.gz", *sums) for name, sums in checksums.items()]


MNIST = _files(
    "MNIST",
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    {
        "train-images-idx3-ubyte": ("f68b3c2dcbeaaa9fbdd348bbdeb94873", "6bbc9ace898e44ae57da46a324031adb"),
        "train-labels-idx1-ubyte": ("d53e105ee54ea40749a09fcbcd1e9432", "a25bea736e30d166cdddb491f175f624"),
        "t10k-images-idx3-ubyte": ("9fb629c4189551a2d022fa330f9573f3", "2646ac647ad5339dbf082846283269ea"),
        "t10k-labels-idx1-ubyte": ("ec29112dd5afa0611ce80d1b7f02629c", "27ae3e4e09519cfbb04c329615203637"),
    },
)
FASHION = _files(
    "FashionMNIST",
    "https://github.com/zalandoresearch/fashion-mnist/raw/master/data/fashion/",
    {
        "train-images-idx3-ubyte": ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", "f4a8712d7a061bf5bd6d2ca38dc4d50a"),
        "train-labels-idx1-ubyte": ("25c81989df183df01b3e8a0aad5dffbe", "9018921c3c673c538a1fc5bad174d6f9"),
        "t10k-images-idx3-ubyte": ("bef4ecab320f06d8554ea6380940ec79", "8181f5470baa50b63fa0f6fddb340f0a"),
        "t10k-labels-idx1-ubyte": ("bb300cfdad3c16e7a12a480ee83cd310", "15d484375f8d13e6eb1aabb0c3f46965"),
    },
)
QMNIST = _files(
    "QMNIST",
    "https://raw.githubusercontent.com/facebookresearch/qmnist/master/",
    {
        "qmnist-train-images-idx3-ubyte": ("ed72d4157d28c017586c42bc6afe6370", ""),
        "qmnist-train-labels-idx2-int": ("0058f8dd561b90ffdd0f734c6a30e5e4", ""),
        "qmnist-test-images-idx3-ubyte": ("1394631089c404de565df7b7aeaf9412", ""),
        "qmnist-test-labels-idx2-int": ("5b5b05890a5e13444e108efe57b788aa", ""),
    },
)


@method("dataset", "mnist", "-", classes=10, input_shape=(1, 28, 28), source=MNIST[0].address)
def mnist(folder: Path | None = None, download: bool = True) -> Dataset:
    """70 000 handwritten digits of 28 x 28 pixels (LeCun, Cortes and Burges 1998), from MNIST/raw."""
    return _load("mnist", MNIST, MNIST_STATS, folder, download)


@method("dataset", "fashion-mnist", "-", classes=10, input_shape=(1, 28, 28), source=FASHION[0].address)
def fashion_mnist(folder: Path | None = None, download: bool = True) -> Dataset:
    """70 000 pieces of clothing of 28 x 28 pixels (Xiao, Rasul and Vollgraf 2017), from FashionMNIST/raw."""
    return _load("fashion-mnist", FASHION, FASHION_STATS, folder, download)


@method("dataset", "qmnist", "-", classes=10, input_shape=(1, 28, 28), source=QMNIST[0].address)
def qmnist(folder: Path | None = None, download: bool = True) -> Dataset:
    """Handwritten digits with their writers (Yadav and Bottou 2019), from QMNIST/raw.

    With QMNIST's own images the test part has 60 000 rows. If only QMNIST's label files exist, beside MNIST's images,
    MNIST's images are used. The train parts match row by row, and MNIST's test images are the first 10 000 of QMNIST's.
    """
    qmnist_images = find([QMNIST[0].path, QMNIST[0].path.removesuffix(".gz")], folder)
    mnist_images = find([MNIST[0].path, MNIST[0].path.removesuffix(".gz")], folder)
    if qmnist_images is None and mnist_images is not None:
        return _load("qmnist", [MNIST[0], QMNIST[1], MNIST[2], QMNIST[3]], MNIST_STATS, folder, download)
    return _load("qmnist", QMNIST, MNIST_STATS, folder, download)


def _load(
    name: str, files: list[Idx], stats: tuple[tuple[float], tuple[float]], folder: Path | None, download: bool
) -> Dataset:
    read = [_read(file, folder, download) for file in files]
    (train, train_labels, test, test_labels), checks = zip(*read, strict=True)
    table = np.concatenate([_rows(train_labels, train, files[1]), _rows(test_labels, test, files[3])])
    pixels = np.concatenate([train, test])[:, None]
    writers = torch.from_numpy(table[:, 2].astype(np.int64)) if table.shape[1] > 2 else None
    verified = None if None in checks and False not in checks else all(checks)
    return dataset_of_pixels(name, pixels, table[:, 0], 10, len(train), *stats, writers=writers, verified=verified)


def _read(file: Idx, folder: Path | None, download: bool) -> tuple[np.ndarray, bool | None]:
    """Return the array, and True if its file has the published checksum.

    None instead of True or False: no checksum is published for this form of the file.
    """
    path = fetch(file, folder, download, [file.path.removesuffix(".gz")])
    array, data = read_idx(path)
    if ("images" in file.name) != (array.ndim == 3 and array.shape[1:] == (28, 28) and array.dtype.itemsize == 1):
        raise WrongInput("data", f"{path} has shape {array.shape}; images are bytes of shape (N, 28, 28)")
    if path.suffix != ".gz" and not file.raw:
        return array, None
    return array, md5(data) == file.raw or md5_of(path) == file.md5


def _rows(labels: np.ndarray, images: np.ndarray, file: Idx) -> np.ndarray:
    """Return (N, columns) labels for N images.

    Only QMNIST's labels may have further rows, for images that MNIST left out.
    """
    table = labels[:, None] if labels.ndim == 1 else labels
    enough = len(table) >= len(images) if file.path.startswith("QMNIST") else len(table) == len(images)
    if table.ndim != 2 or table.shape[1] == 2 or not enough:
        raise WrongInput("data", f"{file.name} has shape {labels.shape} for {len(images)} images; get it again")
    return table[: len(images)]


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
    return [user for file in sorted(folder.glob("*.json")) for user in _read_users(file)]


def _read_users(file: Path) -> list[tuple[str, tuple[np.ndarray, np.ndarray]]]:
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
