"""Fit and fine-tune, one or many, with early stopping on the validation split; predict; per-example gradients.

The tensors stay in memory on the device of the task's training inputs, and batches are rows of a permutation. Nothing
here sees a test split, and nothing that is given changes: nets, states and generators are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from torch import nn
from torch.nn.functional import cross_entropy

from secateur.interfaces import Loss, Penalty, Transform
from secateur.prediction import logits, per_example_gradients, predict
from secateur.recipe import Fitted, Progress, Recipe, Task
from secateur.trainer import Trainer, train_many

__all__ = ["Fitted", "Recipe", "Task", "fit", "fit_many", "logits", "per_example_gradients", "predict"]


def fit(
    net: nn.Module,
    task: Task,
    recipe: Recipe,
    *,
    loss: Loss = cross_entropy,
    transform: Transform | None = None,
    penalty: Penalty | None = None,
    progress: Progress | None = None,
) -> Fitted:
    """Train one model; `net` gives the structure, `task` the tensors."""
    extras = {"loss": loss, "transform": transform, "penalty": penalty, "progress": progress}
    return next(fit_many(net, [task], recipe, **extras))[1]  # type: ignore[arg-type]


def fit_many(
    net: nn.Module,
    tasks: Sequence[Task],
    recipe: Recipe,
    *,
    loss: Loss = cross_entropy,
    transform: Transform | None = None,
    penalty: Penalty | None = None,
    way: str = "auto",
    progress: Progress | None = None,
) -> Iterator[tuple[int, Fitted]]:
    """Train many models of one structure; yields (index of the task, result) as they finish.

    `way` is one of `execution.WAYS`; trainer.py says how tasks go together.
    """
    return train_many(partial(Trainer, net, recipe, loss, transform, penalty), tasks, way, progress)
