"""SVHN, cropped digits, in MATLAB files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from secateur.catalogue import method
from secateur.data.archives import LIMITS
from secateur.data.dataset import Dataset, dataset_of_pixels
from secateur.data.fetch import PublicFile, fetch, md5_of
from secateur.errors import WrongInput

MEAN = STD = (0.5, 0.5, 0.5)  # SAMIA's
ADDRESS = "http://ufldl.stanford.edu/housenumbers/"
SUMS = {"train_32x32.mat": "e26dedcc434d2e4c54c9b2d4a06d8373", "test_32x32.mat": "eb5a983be6a315427106f1b164d9cef3"}
FILES = [PublicFile(name, f"{ADDRESS}{name}", checksum) for name, checksum in SUMS.items()]


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
    """Return (N, 3, 32, 32) bytes and (N,) labels 1..10.

    The sizes in the file's index are checked before the file is unpacked.
    """
    from scipy.io import loadmat, whosmat

    try:
        shapes = {name: shape for name, shape, _ in whosmat(path)}
        count = shapes["X"][-1]
        if shapes["X"] != (32, 32, 3, count) or math.prod(shapes["y"]) != count:
            raise ValueError(f"X has shape {shapes['X']} and y {shapes['y']}; must be (32, 32, 3, N) and (N, 1)")
        if math.prod(shapes["X"]) > LIMITS.limit_of(path):
            raise ValueError("it unpacks to far more than a data set of its size would")
        arrays = loadmat(path, variable_names=["X", "y"])
        pixels, labels = arrays["X"], arrays["y"].reshape(-1)
        if pixels.dtype != np.uint8 or labels.dtype.kind not in "iuf":
            raise ValueError(f"X is {pixels.dtype} and y {labels.dtype}; must be bytes and numbers")
    except Exception as error:  # scipy's reader fails in many ways on a damaged file
        raise WrongInput("data", f"{path} is not SVHN's cropped format ({error}); get it again") from error
    return pixels.transpose(3, 2, 0, 1), labels.astype(np.int64)
