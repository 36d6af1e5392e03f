"""Outputs of models that were brought: a tensor in whatever the model returns, and its kind.

The kinds are logits and probabilities. The softmax of log-probabilities gives the probabilities, so they are logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from secateur.errors import NotFinite, WrongInput
from secateur.inference import TOLERANCE

NAMED = ("logits", "probabilities", "scores", "output")  # entries of a mapping or an object that hold the answer
KEEPS = ("View", "Squeeze", "Unsqueeze", "Select", "Slice", "Clone", "Clamp", "Reshape", "Alias", "Transpose", "ToCopy")


def read_outputs(answer: Any) -> Tensor:
    """Return the tensor of an answer: the answer, its entry `logits`, or its first tensor.

    Example:
        >>> read_outputs({"loss": None, "logits": torch.zeros(1, 2)}).tolist()
        [[0.0, 0.0]]
    """
    if isinstance(answer, Tensor):
        return answer
    if isinstance(answer, np.ndarray):
        return torch.from_numpy(answer)
    for name in NAMED:
        value = answer.get(name) if isinstance(answer, Mapping) else getattr(answer, name, None)
        if isinstance(value, Tensor | np.ndarray):
            return read_outputs(value)
    for value in answer.values() if isinstance(answer, Mapping) else answer if isinstance(answer, Sequence) else ():
        if isinstance(value, Tensor | np.ndarray):
            return read_outputs(value)
    wanted = f"a tensor, a tuple of tensors, or an object with {' or '.join(NAMED[:2])}"
    raise WrongInput("model", f"it returned {type(answer).__name__}; it must return {wanted}")


def as_table(answers: Tensor, rows: int) -> Tensor:
    """Return finite floating-point answers (N, K); refuse others."""
    answers = answers.detach()
    if answers.ndim == 1 and len(answers) == rows:
        answers = answers[:, None]
    if answers.ndim != 2 or len(answers) != rows or not answers.shape[1]:
        shape = f"answers {tuple(answers.shape)} for {rows} examples"
        raise WrongInput("model", f"{shape}; it must return one row of classes for each")
    if not answers.is_floating_point():
        raise WrongInput("model", f"it returns {answers.dtype}; it must return logits or probabilities")
    if not bool(answers.isfinite().all()):
        if bool(answers.isnan().any()) or bool((answers == torch.inf).any()):
            raise NotFinite
        answers = answers.clamp_min(torch.finfo(answers.dtype).min)  # the logarithm of a probability of zero
    return answers if answers.dtype in (torch.float32, torch.float64) else answers.float()


def recognise_outputs(answers: Tensor) -> str:
    """Return `probabilities` or `log-probabilities` if all answers can be ones, else `logits`.

    Rows of probabilities are not negative and sum to one. A single column of probabilities is from 0 to 1.

    Example:
        >>> recognise_outputs(torch.tensor([[0.25, 0.75]])), recognise_outputs(torch.tensor([[-1.0, 3.0]]))
        ('probabilities', 'logits')
        >>> recognise_outputs(torch.tensor([[0.25, 0.75]]).log())
        'log-probabilities'
    """
    if _can_be_probabilities(answers):
        return "probabilities"
    return "log-probabilities" if answers.shape[1] > 1 and _can_be_probabilities(answers.exp()) else "logits"


def _can_be_probabilities(answers: Tensor) -> bool:
    if bool((answers < 0).any()):
        return False
    if answers.shape[1] == 1:
        return bool((answers <= 1).all())
    return bool(((answers.sum(1) - 1).abs() <= TOLERANCE).all())


def convert_outputs(answers: Tensor, kind: str) -> Tensor:
    """Return answers (N, K) of a kind as probabilities; a single column is for class 1 of two."""
    if kind == "probabilities":
        if not _can_be_probabilities(answers):
            problem = "it returns some rows that are no probabilities"
            raise WrongInput("model", f"{problem}; say what it returns: secateur.wrap(model, outputs='logits')")
        return torch.cat([1 - answers, answers], 1) if answers.shape[1] == 1 else answers
    if answers.shape[1] == 1:
        return torch.cat([-answers, answers], 1).sigmoid()
    return answers.softmax(1)


# Networks that return something else than (N, K) -------------------------------------------------------------------
@dataclass(frozen=True)
class ReadOutputs:
    """A forward hook that turns what a network returns into (N, K) logits or probabilities."""

    kind: str  # of a single number for two classes: logits or probabilities

    def __call__(self, net: nn.Module, inputs: Any, outputs: Any) -> Tensor:
        """Return the table of the outputs."""
        answers = read_outputs(outputs)
        answers = answers[:, None] if answers.ndim == 1 else answers
        if answers.ndim != 2 or answers.shape[1] != 1:
            return answers
        other = 1 - answers if self.kind == "probabilities" else torch.zeros_like(answers)
        return torch.cat([other, answers], 1)  # the softmax of (0, z) is the sigmoid of z


def adapt_outputs(net: nn.Module, outputs: Any, classes: int) -> nn.Module:
    """Return the network; where it returns no (N, K) tensor, a hook makes one of its outputs.

    Args:
        net: the network; the hook leaves its tensors and their names alone.
        outputs: its answer for some rows.
        classes: the number of classes of the data; a single number can answer for two.
    """
    answers = read_outputs(outputs)
    single = answers.ndim == 1 or answers.shape[1:] == (1,)
    if (single and classes == 2) or (not single and answers is not outputs):
        net.register_forward_hook(ReadOutputs("probabilities" if ends_in_probabilities(answers) else "logits"))
    return net


def ends_in_probabilities(answers: Tensor) -> bool:
    """Return True if the last computation behind answers is a sigmoid or a softmax.

    Without a history of computations the values decide: numbers from 0 to 1 are probabilities.
    """
    if answers.grad_fn is None:
        return _can_be_probabilities(answers.reshape(len(answers), -1)[:, :1])
    last = next(name for name in _list_steps(answers.grad_fn) if not name.startswith(KEEPS))
    return last.startswith(("Sigmoid", "Softmax"))


def _list_steps(step: Any) -> Iterator[str]:
    """Yield the names of the computations behind a tensor, the last one first, along their first inputs."""
    while step is not None:
        yield type(step).__name__
        step = step.next_functions[0][0] if step.next_functions else None
    yield ""
