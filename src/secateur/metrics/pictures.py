"""Pairs of picture stacks: the check that every measure makes, and the matching of reconstructions to pictures.

A stack is (N, C, H, W) with values in [0, 1]. A reconstructed batch has no order, so it is matched before it is scored.
"""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.errors import WrongInput


def to_float64(truth: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Return both stacks in float64, in which no device rounds products.

    Stacks are refused unless they have the same shape and are grey or colour.
    """
    if truth.shape != guess.shape:
        raise WrongInput("pictures", f"{tuple(truth.shape)} and {tuple(guess.shape)} differ; must be equal")
    if truth.ndim != 4 or truth.shape[1] not in (1, 3) or not truth.numel():
        raise WrongInput("pictures", f"{tuple(truth.shape)} is not allowed; must be (N, 1 or 3, H, W) with N > 0")
    if not (truth.is_floating_point() and guess.is_floating_point()):
        raise WrongInput("pictures", f"{truth.dtype} and {guess.dtype} are not allowed; must be floating-point")
    return truth.double(), guess.double()


def match(truth: Tensor, guess: Tensor) -> Tensor:
    """Return (N,) the row of `guess` for each row of `truth`: the assignment with the least total MSE (Hungarian).

    Only the evaluator may call this function: it looks at the truth. Every guess is used at most once, so an attack
    that returns one picture many times gains nothing. Of more guesses than truths some are left over.

    Example:
        >>> truth = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1)
        >>> guess = torch.tensor([0.9, 0.1, 0.4]).view(3, 1, 1, 1)
        >>> match(truth, guess).tolist()
        [1, 2, 0]
    """
    from scipy.optimize import linear_sum_assignment

    first, _ = to_float64(truth, guess[: len(truth)])
    a, b = first.flatten(1), guess.double().flatten(1)
    if not (a.isfinite().all() and b.isfinite().all()):
        raise WrongInput("pictures", "NaN or infinite values cannot be matched; leave the diverged trials out")
    # by differences: the expanded square would lose the small differences of nearly equal pictures
    distance = torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist")
    _, columns = linear_sum_assignment((distance**2).cpu().numpy())
    return torch.as_tensor(columns, device=truth.device)
