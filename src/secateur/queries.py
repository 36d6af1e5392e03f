"""What an attacker asks of a black box: the one place that looks at the answers before an attack trusts them."""

from __future__ import annotations

from torch import Tensor

from secateur.errors import WrongInput
from secateur.interfaces import BlackBox

TOLERANCE = 1e-3  # how far a row's sum may be from one: saved predictions are often rounded to four digits


def probabilities(box: BlackBox, inputs: Tensor) -> Tensor:
    """(N, K) probabilities, for the attacks that need more than labels.

    Example:
        >>> import torch
        >>> probabilities(BlackBox(lambda inputs: inputs.softmax(1)), torch.zeros(1, 2)).tolist()
        [[0.5, 0.5]]
    """
    if box.labels_only:
        raise WrongInput(
            "attack",
            "this one needs probabilities, but the model answers with labels only; use correctness, label-only",
        )
    answers = box.predict(inputs)
    if answers.ndim != 2 or len(answers) != len(inputs):
        wanted = f"({len(inputs)}, classes)"
        raise WrongInput("predictions", f"have the shape {tuple(answers.shape)}; allowed is one row an input, {wanted}")
    off = (answers.sum(1) - 1).abs().amax() if len(answers) else answers.new_zeros(())
    if not off <= TOLERANCE or bool((answers < 0).any()):
        raise WrongInput("predictions", "are not probabilities; give rows of numbers from 0 to 1 that sum to one")
    return answers
