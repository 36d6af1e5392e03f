"""What every measure of pictures asks of its two stacks: (N, C, H, W), values in [0, 1]."""

from __future__ import annotations

from torch import Tensor

from secateur.errors import WrongInput


def paired(truth: Tensor, guess: Tensor) -> tuple[Tensor, Tensor]:
    """Both stacks in float64, where no device rounds products; refused unless they are alike, grey or colour."""
    if truth.shape != guess.shape:
        raise WrongInput("pictures", f"{tuple(truth.shape)} and {tuple(guess.shape)} differ; give two stacks alike")
    if truth.ndim != 4 or truth.shape[1] not in (1, 3) or not truth.numel():
        raise WrongInput(
            "pictures", f"{tuple(truth.shape)} is not allowed; give (N, 1 or 3, H, W), at least one picture"
        )
    if not (truth.is_floating_point() and guess.is_floating_point()):
        raise WrongInput("pictures", f"{truth.dtype} and {guess.dtype}: give floating-point values in [0, 1]")
    return truth.double(), guess.double()
