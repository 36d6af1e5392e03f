"""What a user hands to `secateur.invert`: a model with a batch or an update, refused in one sentence where unfit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.attacks.inversion.problem import structure
from secateur.client import Target, check_shape
from secateur.errors import WrongInput, unknown
from secateur.given import in_precision
from secateur.interfaces import Batch, Gradient, Weights
from secateur.update_files import fitting, read_update

Update = Gradient | Weights | Path | str
SLACK = 1e-3  # of a pixel beyond [0, 1], for what a normalisation rounds


def check_settings(
    labels: str, batchnorm: str, batch_size: int | None, local_steps: int | None, learning_rate: float | None
) -> None:
    """Refuse words and numbers that are not allowed."""
    for field, word, allowed in (
        ("labels", labels, ("inferred", "oracle")),
        ("batchnorm", batchnorm, ("eval", "batch")),
    ):
        if word not in allowed:
            raise unknown(field, word, allowed)
    for field, number in (("batch_size", batch_size), ("local_steps", local_steps)):
        if number is not None and number < 1:
            raise WrongInput(field, f"{number} is not allowed; give a whole number from 1")
    if learning_rate is not None and not 0 < learning_rate < math.inf:
        raise WrongInput("learning_rate", f"{learning_rate} is not allowed; give a number above 0")


def given_targets(
    model: nn.Module, given: Any, batch_size: int | None, input_shape: Sequence[int] | None, weights: bool
) -> tuple[list[Target], Tensor]:
    """What is attacked, and inputs such as it was made of."""
    if not isinstance(model, nn.Module):
        raise WrongInput("model", f"is {type(model).__name__}; give a torch.nn.Module")
    if isinstance(given, Gradient | Weights | Path | str):
        return [_update(model, given, input_shape, weights)], _like(model, torch.zeros(1, *(input_shape or ())))
    if not isinstance(given, tuple | list) or len(given) != 2 or not all(isinstance(each, Tensor) for each in given):
        raise WrongInput("batch", "give two tensors (inputs, labels), or an update: Gradient, Weights or a file")
    inputs, labels = given
    if not len(inputs) or labels.shape != inputs.shape[:1] or labels.is_floating_point():
        sizes = f"{len(inputs)} inputs and {labels.dtype} labels of the shape {tuple(labels.shape)}"
        raise WrongInput("batch", f"{sizes} do not fit; give at least one input, and one whole number for each")
    check_shape("batch", "the batch", inputs.shape[1:])
    if not bool(torch.isfinite(inputs).all()):
        raise WrongInput("batch", "its inputs hold NaN or infinity; every number must be finite")
    size = batch_size or len(inputs)
    if len(inputs) % size:
        raise WrongInput("batch_size", f"{size} does not divide the {len(inputs)} examples; give one that does")
    batch = Batch(_like(model, inputs), labels.long().to(_device(model)))
    parts = zip(torch.split(batch.inputs, size), torch.split(batch.labels, size), strict=True)
    return [Batch(*part) for part in parts], batch.inputs


def classes_of(model: nn.Module, inputs: Tensor, targets: Sequence[Target]) -> int:
    """How many classes the model tells apart; refuses labels that are none of them."""
    rows = torch.zeros_like(inputs[:1])
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            answers = structure(model, "eval")(rows)
    except Exception as error:  # whatever the user's own code raises
        reason = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise WrongInput(
            "model", f"it must take inputs of the shape {tuple(inputs.shape[1:])}, and {reason}"
        ) from error
    if answers.ndim != 2:
        raise WrongInput("model", f"answers {tuple(answers.shape)} for one example; it must give one row of classes")
    every = [target.labels for target in targets if isinstance(target, Batch)]
    if every and not 0 <= int(torch.cat(every).min()) <= int(torch.cat(every).max()) < answers.shape[1]:
        low, high = int(torch.cat(every).min()), int(torch.cat(every).max())
        allowed = f"allowed by the model's outputs: 0 to {answers.shape[1] - 1}"
        raise WrongInput("batch", f"labels from {low} to {high}; {allowed}")
    return int(answers.shape[1])


def check_pixels(inputs: Tensor, mean: Tensor, std: Tensor) -> None:
    """Refuse a mean and a std by which the inputs cannot have been pixels in [0, 1]: scores would be of others."""
    pixels = inputs * std + mean
    low, high = float(pixels.min()), float(pixels.max())
    if low < -SLACK or high > 1 + SLACK:
        raise WrongInput("mean", f"by it and std the pixels lie from {low:.3g} to {high:.3g}; they must lie in [0, 1]")


def _update(model: nn.Module, given: Update, input_shape: Sequence[int] | None, weights: bool) -> Gradient | Weights:
    if input_shape is None:
        raise WrongInput("input_shape", "must be given with an update: (channels, height, width)")
    check_shape("input_shape", "the update", input_shape)
    if isinstance(given, Path | str):
        return read_update(Path(given), model, weights)
    return type(given)(fitting(given.values, model, "the update"))


def _like(model: nn.Module, inputs: Tensor) -> Tensor:
    return in_precision(model, inputs).to(_device(model))


def _device(model: nn.Module) -> torch.device:
    return next((value.device for value in model.parameters()), torch.device("cpu"))
