"""Data sets inside scikit-learn's wheel, which need neither a folder nor a network."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch

from secateur.catalogue import method
from secateur.data.dataset import Dataset


@method("dataset", "digits", "-", classes=10, input_shape=(1, 8, 8), source="embedded")
def digits(folder: Path | None = None, download: bool = True) -> Dataset:
    """1797 handwritten digits of 8 x 8 pixels, scikit-learn's digits (UCI, Alpaydin and Kaynak 1998).

    No folder and no download are needed. Pixels 0..16 are scaled to [0, 1], then normalised by mean .3053 and deviation
    .3760.
    """
    mean, std = 0.3053, 0.3760
    images, digit = _read_digits()
    inputs = (torch.tensor(images, dtype=torch.float32).unsqueeze(1) / 16 - mean) / std
    labels = torch.tensor(digit, dtype=torch.int64)
    return Dataset("digits", inputs, labels, 10, len(labels), mean=(mean,), std=(std,), verified=True)


@cache
def _read_digits() -> tuple[Any, Any]:
    """Return the pixels and labels, parsed once a process from scikit-learn's text file."""
    from sklearn.datasets import load_digits

    loaded = load_digits()
    return loaded.images, loaded.target


@method("dataset", "breast_cancer", "-", classes=2, input_shape=(30,), source="embedded")
def breast_cancer(folder: Path | None = None, download: bool = True) -> Dataset:
    """569 tumours in 30 standardised measurements, malignant or benign (UCI, Wolberg 1995), from scikit-learn.

    No folder and no download are needed. Every column has mean 0 and deviation 1 over the pool.
    """
    from sklearn.datasets import load_breast_cancer

    loaded = load_breast_cancer()
    table = torch.tensor(loaded.data, dtype=torch.float64)
    inputs = ((table - table.mean(0)) / table.std(0, correction=0)).to(torch.float32)
    labels = torch.tensor(loaded.target, dtype=torch.int64)
    return Dataset("breast_cancer", inputs, labels, 2, len(labels), verified=True)
