"""SVHN, cropped digits, in MATLAB files."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np

from secateur.catalogue import method
from secateur.data.archives import LIMITS
from secateur.data.dataset import Dataset, dataset_of_pixels
from secateur.data.fetch import PublicFile, fetch, md5_of
from secateur.errors import WrongInput

MEAN = STD = (0.5, 0.5, 0.5)  # SAMIA's
ADDRESS = "https://ufldl.stanford.edu/housenumbers/"
SUMS = {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373", "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"}
FILES = [PublicFile(name, f"{ADDRESS}{name}", checksum) for name, checksum in SUMS.items()]
MATRIX, COMPRESSED = 14, 15  # MATLAB's types of data elements, and those of numbers:
_CODES = {1: "i1", 2: "u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8", 13: "<u8"}
KINDS = {kind: np.dtype(code) for kind, code in _CODES.items()}
CLASSES = {6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8"}  # of arrays


@method("dataset", "svhn", "samia_ppb", classes=10, input_shape=(3, 32, 32), source=FILES[0].address)
def svhn(folder: Path | None = None, download: bool = True) -> Dataset:
    """99 289 house-number digits in colour, 32 x 32 pixels, train and test (Netzer et al. 2011).

    Reads train_32x32.mat and test_32x32.mat, in `folder` or in its subfolder svhn. Their label 10 is the digit 0.
    """
    paths = [fetch(file, folder, download, [f"svhn/{file.name}"]) for file in FILES]
    (train, train_labels), (test, test_labels) = [_read(path) for path in paths]
    labels = np.concatenate([train_labels, test_labels])
    labels[labels == 10] = 0
    verified = all(md5_of(path) == file.md5 for path, file in zip(paths, FILES, strict=True))
    pixels = np.concatenate([train, test])
    return dataset_of_pixels("svhn", pixels, labels, 10, len(train), MEAN, STD, verified=verified)


def _read(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return (N, 3, 32, 32) bytes and (N,) labels 1..10."""
    try:
        with path.open("rb") as file:
            arrays = dict(_arrays(file, LIMITS.limit_of(path)))
        pixels, labels = arrays["X"], arrays["y"].reshape(-1)
        if pixels.shape != (32, 32, 3, len(labels)):
            raise ValueError(f"X has shape {pixels.shape} and y {arrays['y'].shape}; must be (32, 32, 3, N) and (N, 1)")
        if pixels.dtype != np.uint8 or not np.all(np.isin(labels, range(1, 11))):
            raise ValueError(f"X is {pixels.dtype} and y {labels.dtype}; must be bytes and labels 1 to 10")
    except (OSError, ValueError, KeyError, zlib.error) as error:
        raise WrongInput("data", f"{path} is not SVHN's cropped format ({error}); get it again") from error
    return pixels.transpose(3, 2, 0, 1), labels.astype(np.int64)


def _arrays(file: BinaryIO, limit: int) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the array of every variable of a MATLAB file, version 5; refuse other types than numbers.

    Every size is checked against `limit` bytes before memory is taken. scipy's reader trusts the file, and one changed
    byte can end the process.
    """
    head = file.read(128)
    if len(head) < 128 or head[124:128] != b"\x00\x01IM":
        raise ValueError("it does not start as a MATLAB 5 file does")
    while tag := file.read(8):
        kind, size = _tag(tag)
        if size > limit:
            raise ValueError("it promises far more than a data set of its size would hold")
        content = file.read(size)
        if kind == COMPRESSED:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(content, limit + 1)
            if len(content) > limit or unpacker.unconsumed_tail or not unpacker.eof:
                raise ValueError("it unpacks to far more than a data set of its size would, or is cut off")
            (kind, size), content = _tag(content[:8]), content[8:]
        if kind != MATRIX or len(content) != size:
            raise ValueError(f"it holds an element of type {kind} and {len(content)} bytes, no whole array")
        yield _array(memoryview(content))


def _array(content: memoryview) -> tuple[str, np.ndarray]:
    """Return the name and the array of a matrix element: flags, dimensions, name, numbers."""
    elements: list[np.ndarray] = []
    while content and len(elements) < 4:
        if len(content) < 8:
            raise ValueError("an element is cut off")
        kind, size = _tag(content[:8])
        start = 8
        if kind >> 16:  # the short form: the size in the upper half, and up to four bytes in the tag itself
            kind, size, start = kind & 0xFFFF, kind >> 16, 4
        if kind not in KINDS or size > (len(content) - start if start == 8 else 4):
            raise ValueError(f"an element has type {kind} and {size} bytes")
        if size % KINDS[kind].itemsize:
            raise ValueError(f"an element of type {kind} has {size} bytes")
        elements.append(np.frombuffer(content[start : start + size], KINDS[kind]))
        content = content[8 if start == 4 else 8 + -(-size // 8) * 8 :]
    if len(elements) < 4 or len(elements[0]) != 2 or elements[0][0] & 0x800:
        raise ValueError("an array is not complete, or is complex")
    flags, shape, name, values = elements
    number_class = int(flags[0]) & 0xFF
    if number_class not in CLASSES or (shape.astype(np.int64) < 0).any() or math.prod(map(int, shape)) != len(values):
        raise ValueError(f"an array of class {number_class} has shape {shape.tolist()} and {len(values)} numbers")
    array = values.astype(CLASSES[number_class], copy=False).reshape(tuple(map(int, shape)), order="F")
    return name.tobytes().decode("latin1"), array


def _tag(content: bytes | memoryview) -> tuple[int, int]:
    if len(content) < 8:
        raise ValueError("an element is cut off")
    return int.from_bytes(content[:4], "little"), int.from_bytes(content[4:8], "little")
