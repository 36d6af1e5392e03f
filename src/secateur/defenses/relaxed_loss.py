"""Relaxed loss with a calibrated target: members are fitted no better than non-members were before pruning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax

from secateur.catalogue import method
from secateur.defenses import AGAINST_TRAINING
from secateur.errors import WrongInput, check_number
from secateur.inference import outputs
from secateur.interfaces import Loss, Params
from secateur.training.aided_trainer import AidedTrainer, train_aided
from secateur.training.recipe import Fitted, Progress, Recipe, Task
from secateur.training.trainer import TaskTraining, Trainer


@method(
    "defense",
    "relaxed-loss",
    "-",
    acts_on="fine-tuning",
    strongest=AGAINST_TRAINING,
    meanings={"strength": "multiple of the unpruned model's validation loss that the training loss is held at"},
)
@dataclass(frozen=True)
class RelaxedLoss:
    """Holds the loss of fine-tuning at a target, the unpruned model's validation loss (after RelaxLoss; Chen 2022).

    Acts on: fine-tuning. Hypothesis: members are told from non-members because their loss is lower, so their mean loss
    should stop where that of non-members is. RelaxLoss searches its target by hand. Here the target is tau =
    `strength` * L_val(f), of the unpruned model f. A batch whose mean loss L is at least tau descends on L. Below it,
    an example that is right ascends on its loss, and one that is wrong is fitted to its own flattened posterior. That
    is p_y for its label y and (1 - p_y) / (K - 1) for the others. RelaxLoss takes turns with these two by epochs.
    `strength` 0 is the ablation: cross-entropy alone.

    Equation: `tau = strength L_val(f); min L if L >= tau, else max L where right, and flatten where wrong`.
    """

    strength: float = 1.0

    def __post_init__(self) -> None:
        check_number("strength", self.strength, "[0, inf)")

    def fit_many(
        self,
        net: nn.Module,
        tasks: Sequence[Task],
        recipe: Recipe,
        *,
        loss: Loss = cross_entropy,
        execution: str = "auto",
        progress: Progress | None = None,
    ) -> Iterator[tuple[int, Fitted]]:
        """Fine-tune like `trainer.fit_many`, with the target in place of the lowest loss."""
        if any(not task.validation.size for task in tasks):
            raise WrongInput("data", "relaxed-loss needs a validation split: its loss is the target")

        def make(starts: Sequence[Params]) -> partial[AidedTrainer]:
            return partial(AidedTrainer, self.calibrate(), relax, starts, net, recipe, loss, None)

        return train_aided(make, tasks, execution, progress)

    def calibrate(self) -> _Calibration:
        """Return the function that gives every batch of a run its target."""
        return _Calibration(self.strength)


class _Calibration:
    """The target of each run, computed once."""

    def __init__(self, strength: float) -> None:
        self._strength = strength
        self._targets: dict[int, Tensor] = {}

    @torch.no_grad()
    def __call__(self, trainer: Trainer, start: Params, run: TaskTraining, inputs: Tensor) -> Tensor:
        """Return the target of a run, a scalar."""
        if run.index not in self._targets:
            logits = outputs(trainer.judge, start, run.validation.inputs)
            self._targets[run.index] = self._strength * cross_entropy(logits, run.validation.labels)
        return self._targets[run.index]


def relax(logits: Tensor, labels: Tensor, target: Tensor) -> Tensor:
    """Return the loss of a batch: cross-entropy from the target up, else ascent and flattened posteriors."""
    losses = cross_entropy(logits, labels, reduction="none")
    posteriors = log_softmax(logits, 1)
    with torch.no_grad():
        is_label = labels[:, None] == torch.arange(logits.shape[1], device=logits.device)
        kept = posteriors.exp().masked_fill(~is_label, 0.0).sum(1, keepdim=True)  # p_y
        flat = torch.where(is_label, kept, (1 - kept) / max(logits.shape[1] - 1, 1))
    flattened = -(flat * posteriors).sum(1)
    is_right = logits.argmax(1) == labels
    below = torch.where(is_right, -losses, flattened).mean()
    return torch.where(losses.mean() >= target, losses.mean(), below)
