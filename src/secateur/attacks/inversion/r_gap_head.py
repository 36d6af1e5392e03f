"""Where R-GAP begins: what the last layer was given, read off its gradient k x^T.

A matrix k x^T of which entries were dropped: k and x from those that survived.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap

from secateur.attacks.inversion.r_gap_network import Layer
from secateur.interfaces import Loss

ROUNDS = 100  # of alternating least squares; each is exact in one of the two

SCALES = 4001  # tried before the zoom: |x| / |k x^T| = 1 / |k|, and |k| < 1.5 for the cross-entropy
ZOOMS = 12  # each narrows the bracket 32 times
FITS = 1e-6  # a scale whose equation is left so far open, of the gradient's norm, is no solution


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


class Kept(NamedTuple):
    """Which entries of the last layer's gradient were kept."""

    weight: Tensor  # (K, C) bool
    bias: Tensor | None  # (K,) bool


class Head(NamedTuple):
    """One reading of the last layer's gradient."""

    features: Tensor  # (C,) what the last layer was given
    k: Tensor  # (K,) dL/dlogits
    label: int
    known: Tensor | None = None  # (C,) bool: the features that the gradient tells; None: all


def heads(
    layer: Layer, gradient: Tensor, bias: Tensor | None, loss: Loss, told: int | None, kept: Kept | None = None
) -> list[Head]:
    """What the last layer's gradient k x^T (K, C) says of x, k and the label: one reading, or all that fit equally.

    With a bias k is its gradient, and x the mean over classes of gradient[c] / k[c], each weighed by k[c]^2: a class
    of vanishing gradient would add nothing but rounding. Without one x is s times a unit vector u, and s solves
    dloss(s W u, y) = (gradient u) / s; for one logit that is R-GAP's mu l'(mu) = <g, w>. Where entries were dropped,
    k and x are least squares on those that were kept.
    """
    known: Tensor | None = None
    if bias is not None:
        features, k = gradient.T @ bias / bias.square().sum(), bias
        if kept is not None:
            features, k, known = completed(gradient, kept.weight, bias, kept.bias)
        return [Head(features.nan_to_num(0, 0, 0), k, _label(k) if told is None else told, known)]
    unit = _unit(gradient)
    if kept is not None:
        unit, _, known = completed(gradient, kept.weight)
    found = []
    for way in (unit, -unit):
        c = gradient @ way if kept is None else along(gradient, kept.weight, way)
        label = _label(c) if told is None else told
        for scale, rest in scales(layer.weight.flatten(1) @ way, c, loss, label):
            found.append((rest, Head(scale * way, c / scale, label, known)))
    best = min(rest for rest, _ in found)
    return [head for rest, head in found if rest <= max(best, FITS)]


def _unit(gradient: Tensor) -> Tensor:
    """The way of x, by power iterations: exact for a gradient of rank one, the nearest one for a perturbed gradient."""
    unit = gradient[gradient.norm(dim=1).argmax()]
    for _ in range(3):
        unit = gradient.T @ (gradient @ unit)
        unit = (unit / unit.norm()).nan_to_num(0, 0, 0)
    return unit


def _label(k: Tensor) -> int:
    """The one class whose logit the loss wants higher; a single logit wants to be higher for label 1."""
    return int(k.argmin()) if len(k) > 1 else int(k[0] < 0)


def scales(v: Tensor, c: Tensor, loss: Loss, label: int) -> list[tuple[float, float]]:
    """The s > 0 that solve s dloss(s v, label) = c, and how far each is from solving it, of |c|; the best always."""
    y = torch.full((1,), label, device=v.device)
    slopes = vmap(grad(lambda logits: loss(logits[None], y)))

    def rest(s: Tensor) -> Tensor:
        gaps: Tensor = s[:, None] * slopes(s[:, None] * v) - c
        norms: Tensor = torch.linalg.vector_norm(gaps, dim=1)
        return norms.nan_to_num(math.inf)

    norm = max(float(c.norm()), 1e-300)
    grid = norm * torch.logspace(-3, 13, SCALES, dtype=v.dtype, device=v.device)
    values = rest(grid)
    inner = values[1:-1]
    dips = 1 + ((inner < values[:-2]) & (inner <= values[2:])).nonzero().flatten()
    nearest = values[1:-1].argmin() + 1
    found = []
    for dip in {*dips.tolist(), int(nearest)}:
        low, high = grid[dip - 1], grid[dip + 1]
        for _ in range(ZOOMS):
            fine = low + (high - low) * torch.linspace(0, 1, 65, dtype=v.dtype, device=v.device)
            at = int(rest(fine).argmin().clamp(1, 63))
            low, high = fine[at - 1], fine[at + 1]
        middle = (low + high) / 2
        found.append((float(middle), float(rest(middle[None])) / norm))
    return found
