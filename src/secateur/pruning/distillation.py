"""Knowledge distillation: a given smaller network learns the answers of the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from secateur.catalogue import method
from secateur.errors import WrongInput, check_number
from secateur.inference import bind_state
from secateur.interfaces import Batch, Guide
from secateur.models.create import check, create, example_rows
from secateur.tree import state_of


@method("pruner", "distil", "-")
@dataclass(frozen=True)
class Distil:
    """Trains the network `student` on the answers of the original (knowledge distillation; Hinton et al. 2015).

    The loss is (1 - `weight`) * cross-entropy + `weight` * T^2 * KL(original || student) of logits / T, with T the
    `temperature`. `student` is the name of a model, or module:function. It takes no sparsity.

    Equation: `L = (1 - weight) CE + weight T^2 KL(original / T || student / T)`.
    """

    uses_sparsity: ClassVar[bool] = False
    student: str = ""
    temperature: float = 4.0
    weight: float = 0.9

    def __post_init__(self) -> None:
        check_number("temperature", self.temperature, "(0, inf)")
        check_number("weight", self.weight, "[0, 1]")

    def check(self, net: nn.Module, input_shape: tuple[int, ...]) -> None:
        """Refuse a student that is missing, or that does not fit the data."""
        rows = example_rows(net, input_shape)
        check(self.reshape(net, Batch(rows, torch.zeros(2)), 0.0, Generator()), input_shape, _classes(net, rows))

    def reshape(self, net: nn.Module, batch: Batch, sparsity: float, rng: Generator) -> nn.Module:
        """Return the student before its training."""
        if not self.student:
            raise WrongInput("pruner", "distil needs a student; write distil:student=NAME or module:function for NAME")
        student = create(self.student, tuple(batch.inputs.shape[1:]), _classes(net, batch.inputs), rng)
        return student.to(batch.inputs.device)

    def guide(self, original: nn.Module, device: torch.device) -> Guide:
        """Return the term of the training loss that compares a student's logits with those of the original."""
        teacher = copy.deepcopy(original).to(device).eval().requires_grad_(False)
        return lambda inputs, logits: self.weight * divergence(teacher(inputs), logits, self.temperature)

    def share(self, loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the part of the training loss that the labels have."""
        return lambda logits, labels: (1 - self.weight) * loss(logits, labels)


def divergence(wanted: Tensor, logits: Tensor, temperature: float) -> Tensor:
    """Return T^2 * KL(softmax(wanted / T) || softmax(logits / T)), the mean over the rows.

    Example:
        >>> float(divergence(torch.zeros(1, 2), torch.zeros(1, 2), 4.0))
        0.0
    """
    inputs, target = (F.log_softmax(values / temperature, 1) for values in (logits, wanted))
    return temperature**2 * (target.exp() * (target - inputs)).sum() / len(inputs)  # vmap has no rule for kl_div


def _classes(net: nn.Module, rows: Tensor) -> int:
    """Return the number of a network's outputs."""
    return bind_state(net, state_of(net), rows.device)(rows[:2]).shape[1]
