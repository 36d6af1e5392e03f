"""A matrix k x^T of which entries were dropped: k and x from those that survived."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

ROUNDS = 100  # of alternating least squares; each is exact in one of the two


class Completed(NamedTuple):
    """What the surviving entries say."""

    x: Tensor  # (C,); 0 where no entry of the column survived
    k: Tensor  # (K,); 0 where nothing of the row survived
    known: Tensor  # (C,) bool: the columns of which something survived


def along(matrix: Tensor, kept: Tensor, way: Tensor) -> Tensor:
    """Of every row the factor by which it is `way`, by least squares on the entries that were kept."""
    wide = torch.where(kept, way, 0)
    return (torch.where(kept, matrix, 0) @ way / wide.square().sum(1)).nan_to_num(0, 0, 0)


def completed(matrix: Tensor, kept: Tensor, k: Tensor | None = None, k_kept: Tensor | None = None) -> Completed:
    """Both factors of a matrix (K, C) that is k x^T where its entries were `kept`; x has norm 1 unless k is given.

    `k` is what was observed of it, and holds where `k_kept`.
    """
    shown = torch.where(kept, matrix, 0)
    fixed = torch.zeros_like(matrix[:, 0], dtype=torch.bool) if k_kept is None else k_kept
    given = matrix.new_zeros(len(matrix)) if k is None else torch.where(fixed, k, 0)
    x = shown[shown.norm(dim=1).argmax()]
    if bool(fixed.any()):
        x = along(matrix.T, kept.T, given)
    for _ in range(ROUNDS):
        if k is None:
            x = (x / x.norm()).nan_to_num(0, 0, 0)
        rows = torch.where(fixed, given, along(matrix, kept, x))
        x = along(matrix.T, kept.T, rows)
    if k is None:
        x = (x / x.norm()).nan_to_num(0, 0, 0)
    return Completed(x, torch.where(fixed, given, along(matrix, kept, x)), kept.any(0))
