"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009): binary or python version, archive or folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from secateur.catalogue import method
from secateur.data.archives import contents, read_pickle
from secateur.data.dataset import Dataset, dataset_of_pixels
from secateur.data.fetch import PublicFile, fetch, md5
from secateur.errors import WrongInput

# SAMIA's for both data sets; SAMIA's sensitivities use these units
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
PIXELS = 3 * 32 * 32
ADDRESS = "https://www.cs.toronto.edu/~kriz/"


@dataclass(frozen=True)
class CifarLayout:
    """The files of one of the two data sets, with the published md5 of every batch in both versions."""

    name: str
    classes: int
    key: str  # of the labels in the python version; in the binary version the last label byte
    source: PublicFile
    also: tuple[str, ...]
    train: dict[str, str]
    test: dict[str, str]


CIFAR10 = CifarLayout(
    "cifar10",
    10,
    "labels",
    PublicFile("cifar-10-binary.tar.gz", f"{ADDRESS}cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
    ("cifar-10-batches-bin", "cifar-10-batches-py", "cifar-10-python.tar.gz"),
    {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    {"test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d", "test_batch": "40351d587109b95175f43aff81a1287e"},
)
CIFAR100 = CifarLayout(
    "cifar100",
    100,
    "fine_labels",
    PublicFile("cifar-100-binary.tar.gz", f"{ADDRESS}cifar-100-binary.tar.gz", "03b5dce01913d631647c71ecec9e9cb8"),
    ("cifar-100-binary", "cifar-100-python", "cifar-100-python.tar.gz"),
    {"train.bin": "6172c7755cfe09b2fe270c85cebc1b15", "train": "16019d7e3df5f24257cddd939b257f8d"},
    {"test.bin": "4499cfba6c016c1be1438163640a0898", "test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
)


@method("dataset", "cifar10", "samia_ppb", classes=10, input_shape=(3, 32, 32), source=CIFAR10.source.address)
def cifar10(folder: Path | None = None, download: bool = True) -> Dataset:
    """60 000 colour photographs of 32 x 32 pixels in 10 classes (Krizhevsky 2009).

    Reads cifar-10-binary.tar.gz, cifar-10-python.tar.gz or the folder of either. A folder with only some of the batches
    gives those batches.
    """
    return _load(CIFAR10, folder, download)


@method("dataset", "cifar100", "samia_ppb", classes=100, input_shape=(3, 32, 32), source=CIFAR100.source.address)
def cifar100(folder: Path | None = None, download: bool = True) -> Dataset:
    """60 000 colour photographs of 32 x 32 pixels with 100 fine labels (Krizhevsky 2009).

    Reads cifar-100-binary.tar.gz, cifar-100-python.tar.gz or the folder of either.
    """
    return _load(CIFAR100, folder, download)


def _load(layout: CifarLayout, folder: Path | None, download: bool) -> Dataset:
    path = fetch(layout.source, folder, download, layout.also)
    known = layout.train | layout.test
    batches: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    verified = True
    for member, stream in contents(path):
        if member.name in known:
            data = stream.read()
            verified &= md5(data) == known[member.name]
            batches[member.name] = _batch(layout, data, path / member)
    train = sorted(name for name in batches if name in layout.train)
    test = sorted(name for name in batches if name in layout.test)
    if not train:
        raise WrongInput("data", f"{path} holds no training batch; it must hold {', '.join(layout.train)}")
    pixels = np.concatenate([batches[name][0] for name in train + test])
    labels = np.concatenate([batches[name][1] for name in train + test])
    train_size = sum(len(batches[name][1]) for name in train)
    verified &= 2 * len(batches) == len(known)  # each version has half of the known batches
    pixels = pixels.reshape(-1, 3, 32, 32)
    return dataset_of_pixels(layout.name, pixels, labels, layout.classes, train_size, MEAN, STD, verified=verified)


def _batch(layout: CifarLayout, data: bytes, path: Path) -> tuple[np.ndarray, np.ndarray]:
    if path.suffix != ".bin":
        batch = read_pickle(data, path)
        pixels, names = batch.get("data"), batch.get(layout.key)
        # a small pickle can repeat one list many times: a list of lists may stand for gigabytes
        flat = isinstance(names, list) and len(names) <= len(data) and all(isinstance(name, int) for name in names)
        pixels, labels = np.asarray(pixels if isinstance(pixels, np.ndarray) else 0), np.asarray(names if flat else 0)
    else:
        width = PIXELS + (2 if layout.classes == 100 else 1)  # CIFAR-100 has a coarse label before the fine one
        if len(data) % width:
            raise WrongInput("data", f"{path} is truncated: {len(data)} bytes, no multiple of {width}; get it again")
        records = np.frombuffer(data, dtype=np.uint8).reshape(-1, width)
        pixels, labels = records[:, -PIXELS:], records[:, -PIXELS - 1]
    fits = labels.ndim == 1 and labels.dtype.kind in "iu" and pixels.shape == (len(labels), PIXELS)
    if not fits or pixels.dtype != np.uint8:
        raise WrongInput("data", f"{path} must hold {PIXELS} pixels and a label for every image; get it again")
    return pixels, labels
