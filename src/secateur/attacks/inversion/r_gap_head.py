"""The first step of R-GAP: the inputs of the last layer, read from its gradient k x^T.

Where entries of the gradient were dropped, k and x are fitted to the surviving ones (`completed`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from secateur.attacks.inversion.r_gap_network import LinearMap
from secateur.interfaces import Loss

ROUNDS = 100  # of alternating least squares; each is exact in one of the two
SCALES = 4001  # tried before the zoom: |x| / |k x^T| = 1 / |k|, and |k| < 1.5 for the cross-entropy
ZOOMS = 12  # each narrows the bracket 32 times
FITS = 1e-6  # largest residual of a solution, relative to the gradient's norm


class Kept(NamedTuple):
    """Masks of the kept entries of the last layer's gradient."""

    weight: Tensor  # (K, C) bool
    bias: Tensor | None  # (K,) bool


class Head(NamedTuple):
    """One reading of the last layer's gradient."""

    features: Tensor  # (C,) the last layer's inputs
    k: Tensor  # (K,) dL/dlogits
    label: int
    known: Tensor | None = None  # (C,) bool: the features that the gradient determines; None: all


class Completed(NamedTuple):
    """The factors of a matrix k x^T by its surviving entries."""

    x: Tensor  # (C,); 0 where no entry of the column survived
    k: Tensor  # (K,); 0 where no entry of the row survived
    known: Tensor  # (C,) bool: the columns with a surviving entry


def heads(
    layer: LinearMap,
    gradient: Tensor,
    bias: Tensor | None,
    loss: Loss,
    known_label: int | None,
    kept: Kept | None = None,
) -> list[Head]:
    """Read x, k and the label from the last layer's gradient k x^T (K, C): one reading, or all that fit equally.

    With a bias, k is the bias gradient, and x the mean over classes of gradient[c] / k[c], weighted by k[c]^2. A class
    of vanishing gradient would add nothing but rounding. Without a bias, x is s times a unit vector u, and s solves
    dloss(s W u, y) = (gradient u) / s. For one logit this is R-GAP's mu l'(mu) = <g, w>.

    Where entries were dropped, k and x are least squares on the kept ones.
    """
    known: Tensor | None = None
    if bias is not None:
        features, k = gradient.T @ bias / bias.square().sum(), bias
        if kept is not None:
            features, k, known = completed(gradient, kept.weight, bias, kept.bias)
        return [Head(features.nan_to_num(0, 0, 0), k, _label(k) if known_label is None else known_label, known)]
    unit = _unit(gradient)
    if kept is not None:
        unit, _, known = completed(gradient, kept.weight)
    readings = []
    for direction in (unit, -unit):
        c = gradient @ direction if kept is None else along(gradient, kept.weight, direction)
        label = _label(c) if known_label is None else known_label
        for scale, residual in scales(layer.weight.flatten(1) @ direction, c, loss, label):
            readings.append((residual, Head(scale * direction, c / scale, label, known)))
    best = min(residual for residual, _ in readings)
    return [head for residual, head in readings if residual <= max(best, FITS)]


def _unit(gradient: Tensor) -> Tensor:
    """Return the direction of x (C,), by power iterations.

    The direction is exact for a gradient of rank one, and that of the nearest such gradient for a perturbed one.
    """
    unit = gradient[gradient.norm(dim=1).argmax()]
    for _ in range(3):
        unit = gradient.T @ (gradient @ unit)
        unit = (unit / unit.norm()).nan_to_num(0, 0, 0)
    return unit


def _label(k: Tensor) -> int:
    """Return the one class whose logit the loss wants higher; a single logit wants to be higher for label 1."""
    return int(k.argmin()) if len(k) > 1 else int(k[0] < 0)


def scales(v: Tensor, c: Tensor, loss: Loss, label: int) -> list[tuple[float, float]]:
    """Return the s > 0 that solve s dloss(s v, label) = c, and their residuals over |c|; the best s always."""
    y = torch.full((1,), label, device=v.device)
    slopes = vmap(grad(lambda logits: loss(logits[None], y)))

    def residual(s: Tensor) -> Tensor:
        gaps: Tensor = s[:, None] * slopes(s[:, None] * v) - c
        norms: Tensor = torch.linalg.vector_norm(gaps, dim=1)
        return norms.nan_to_num(math.inf)

    norm = max(float(c.norm()), 1e-300)
    grid = norm * torch.logspace(-3, 13, SCALES, dtype=v.dtype, device=v.device)
    values = residual(grid)
    inner = values[1:-1]
    dips = 1 + ((inner < values[:-2]) & (inner <= values[2:])).nonzero().flatten()
    nearest = inner.argmin() + 1
    solutions = []
    for dip in {*dips.tolist(), int(nearest)}:
        low, high = grid[dip - 1], grid[dip + 1]
        for _ in range(ZOOMS):
            fine = low + (high - low) * torch.linspace(0, 1, 65, dtype=v.dtype, device=v.device)
            at = int(residual(fine).argmin().clamp(1, 63))
            low, high = fine[at - 1], fine[at + 1]
        middle = (low + high) / 2
        solutions.append((float(middle), float(residual(middle[None])) / norm))
    return solutions


def completed(matrix: Tensor, kept: Tensor, k: Tensor | None = None, k_kept: Tensor | None = None) -> Completed:
    """Return both factors of a matrix (K, C) that is k x^T where its entries were `kept`.

    `k` is the observed factor, valid where `k_kept`. Without it x has norm 1.
    """
    shown = torch.where(kept, matrix, 0)
    fixed = torch.zeros_like(matrix[:, 0], dtype=torch.bool) if k_kept is None else k_kept
    observed = matrix.new_zeros(len(matrix)) if k is None else torch.where(fixed, k, 0)
    x = shown[shown.norm(dim=1).argmax()]
    if bool(fixed.any()):
        x = along(matrix.T, kept.T, observed)
    for _ in range(ROUNDS):
        if k is None:
            x = (x / x.norm()).nan_to_num(0, 0, 0)
        rows = torch.where(fixed, observed, along(matrix, kept, x))
        x = along(matrix.T, kept.T, rows)
    if k is None:
        x = (x / x.norm()).nan_to_num(0, 0, 0)
    return Completed(x, torch.where(fixed, observed, along(matrix, kept, x)), kept.any(0))


def along(matrix: Tensor, kept: Tensor, direction: Tensor) -> Tensor:
    """Return for every row its factor of `direction`, by least squares on the kept entries."""
    wide = torch.where(kept, direction, 0)
    return (torch.where(kept, matrix, 0) @ direction / wide.square().sum(1)).nan_to_num(0, 0, 0)
