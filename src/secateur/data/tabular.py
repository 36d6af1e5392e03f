"""Location, Purchase and Texas: the binary tables of Shokri et al. (2017), as text in .tgz archives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from secateur.catalogue import method
from secateur.data.archives import contents
from secateur.data.dataset import Dataset
from secateur.data.fetch import PublicFile, fetch
from secateur.errors import WrongInput

ADDRESS = "https://github.com/privacytrustlab/datasets/raw/master/"  # no checksums are published there
LOCATION = PublicFile("location/dataset_location.tgz", f"{ADDRESS}dataset_location.tgz")
PURCHASE = PublicFile("purchase/dataset_purchase.tgz", f"{ADDRESS}dataset_purchase.tgz")
TEXAS = PublicFile("texas/dataset_texas.tgz", f"{ADDRESS}dataset_texas.tgz")


@method("dataset", "location", "samia_ppb", classes=30, input_shape=(446,), source=LOCATION.address)
def location(folder: Path | None = None, download: bool = True) -> Dataset:
    """5010 users' check-ins in Bangkok as 446 bits, 30 classes (Shokri et al. 2017).

    Reads dataset_location.tgz or its member `bangkok`, in `folder` or in its subfolder location. A row is a quoted
    label 1..30 and the bits.
    """
    return _table("location", fetch(LOCATION, folder, download, ["location/bangkok"]), "bangkok", 446, 30)


@method("dataset", "purchase", "samia_ppb", classes=100, input_shape=(600,), source=PURCHASE.address)
def purchase(folder: Path | None = None, download: bool = True) -> Dataset:
    """197 324 shoppers' purchases as 600 bits, 100 classes (Shokri et al. 2017).

    Reads dataset_purchase.tgz or its member `dataset_purchase`, in `folder` or in its subfolder purchase. A row is a
    label 1..100 and the bits.
    """
    path = fetch(PURCHASE, folder, download, ["purchase/dataset_purchase"])
    return _table("purchase", path, "dataset_purchase", 600, 100)


@method("dataset", "texas", "samia_ppb", classes=100, input_shape=(6169,), source=TEXAS.address)
def texas(folder: Path | None = None, download: bool = True) -> Dataset:
    """67 330 hospital stays as 6169 bits, the 100 most frequent procedures (Shokri et al. 2017).

    Reads dataset_texas.tgz, in `folder` or in its subfolder texas, or the folder texas/100. The file `feats` has the
    bits, and `labels` has one label 1..100 per row.
    """
    path = fetch(TEXAS, folder, download, ["texas/100", "texas/texas/100"])
    bits: bytearray | None = None
    labels: list[int] | None = None
    for member, stream in contents(path):
        if member.parts[-2:] == ("100", "feats"):
            bits = bytearray()
            for row, line in enumerate(stream, 1):
                bits += _bits(line, 6169, path, row)
        elif member.parts[-2:] == ("100", "labels"):
            labels = [_label(line, path, row) for row, line in enumerate(stream, 1)]
    if bits is None or labels is None:
        raise WrongInput("data", f"{path} must hold texas/100/feats and texas/100/labels; get it from {TEXAS.address}")
    return _dataset("texas", bits, labels, 6169, 100, path)


def _table(name: str, path: Path, member_name: str, features: int, classes: int) -> Dataset:
    for member, stream in contents(path):
        if member.name == member_name:
            bits, labels = bytearray(), []
            for row, line in enumerate(stream, 1):
                label, _, rest = line.partition(b",")
                labels.append(_label(label, path, row))
                bits += _bits(rest, features, path, row)
            return _dataset(name, bits, labels, features, classes, path)
    raise WrongInput("data", f"{path} does not hold a file {member_name!r}; get it from {ADDRESS}")


def _bits(line: bytes, features: int, path: Path, row: int) -> bytes:
    """Return the bits of `0,1,...,0` as bytes 0 and 1."""
    text = line.rstrip()
    values = text[::2].translate(BIT)
    if len(text) != 2 * features - 1 or values.count(2) or text[1::2].count(b",") != features - 1:
        raise WrongInput("data", f"row {row} of {path} must be {features} bits with commas between; get it again")
    return values


BIT = bytes({ord("0"): 0, ord("1"): 1}.get(i, 2) for i in range(256))


def _label(text: bytes, path: Path, row: int) -> int:
    digits = text.strip().strip(b'"')
    if not digits.isdigit() or len(digits) > 9:
        raise WrongInput("data", f"row {row} of {path} starts with no label; get it again")
    return int(digits)


def _dataset(name: str, bits: bytearray, labels: list[int], features: int, classes: int, path: Path) -> Dataset:
    if not labels or len(bits) != features * len(labels):
        raise WrongInput("data", f"{path} has {len(bits) // features} rows and {len(labels)} labels; get it again")
    inputs = torch.from_numpy(np.frombuffer(bits, dtype=np.uint8).reshape(-1, features)).to(torch.float32)
    return Dataset(name, inputs, torch.tensor(labels) - 1, classes, len(labels))
