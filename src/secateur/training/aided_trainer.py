"""Training in which every batch has one more tensor of its run, its aid: a target, or another model's answers.

The aid is computed outside of the objective, from the weights that the run starts from before a mask. So models with
different aids step together, stacked or captured in one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from secateur import tree
from secateur.interfaces import Loss, Params, Transform
from secateur.training.execution import Lanes
from secateur.training.recipe import Fitted, Progress, Recipe, Task
from secateur.training.trainer import TaskTraining, Trainer, train_many

Aid = Callable[[Trainer, Params, TaskTraining, Tensor], Tensor]  # (trainer, first weights, run, inputs) -> the aid
AidedLoss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (logits, labels, aid) -> scalar


class AidedTrainer(Trainer):
    """Trainer that minimises a loss of logits, labels and the aid; the plain loss still decides when to stop."""

    def __init__(
        self,
        aid: Aid,
        aided_loss: AidedLoss,
        starts: Sequence[Params],  # of the tasks, unmasked
        net: nn.Module,
        recipe: Recipe,
        loss: Loss,
        transform: Transform | None,
        device: torch.device,
    ) -> None:
        super().__init__(net, recipe, loss, transform, None, device)
        self.aid, self.aided_loss, self.starts = aid, aided_loss, starts

    def stepper(self, runs: Sequence[TaskTraining], execution: str) -> _AidedDescent:
        """Return the stepper of these runs."""
        return _AidedDescent(self, runs, execution)

    def measure_aided(
        self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, aid: Tensor, *noise: Tensor
    ) -> Tensor:
        """Return the loss of a batch with its aid."""
        return self.aided_loss(self.learner(params | buffers, inputs, noise), labels, aid)


class _AidedDescent:
    """Stepper that minimises the aided objective."""

    def __init__(self, trainer: AidedTrainer, runs: Sequence[TaskTraining], execution: str) -> None:
        self.trainer, self.runs = trainer, runs
        lanes = [run.lane for run in runs]
        self.lanes = Lanes(trainer.measure_aided, lanes, trainer.recipe.make_optimiser, execution)
        self.starts = [tree.to(trainer.starts[run.index], run.train.inputs.device) for run in runs]

    def step(self, rows: Sequence[Tensor]) -> Tensor:
        """Step every run on its rows and their aid."""
        batches = []
        for run, start, some in zip(self.runs, self.starts, rows, strict=True):
            inputs, labels, *noise = run.tensors(some)
            batches.append((inputs, labels, self.trainer.aid(self.trainer, start, run, inputs), *noise))
        return self.lanes.step(batches)

    def states(self) -> list[Params]:
        """Return every run's tensors."""
        return self.lanes.states()

    def facts(self) -> list[dict[str, float]]:
        """Return nothing: an epoch adds no entries."""
        return [{} for _ in self.runs]


def train_aided(
    make: Callable[[Sequence[Params]], Callable[[torch.device], AidedTrainer]],
    tasks: Sequence[Task],
    execution: str,
    progress: Progress | None,
) -> Iterator[tuple[int, Fitted]]:
    """Train the tasks with trainers that `make` builds from their first weights; yield (index, result) as they finish.

    A Ray worker gets one task, so its trainer gets the first weights of that task alone.
    """
    groups = [[i] for i in range(len(tasks))] if execution == "ray" else [list(range(len(tasks)))]
    for group in groups:
        some = [tasks[i] for i in group]
        for index, fitted in train_many(make([task.state for task in some]), some, execution, progress):
            yield group[index], fitted


def fit_by_losses(
    net: nn.Module,
    tasks: Sequence[Task],
    recipe: Recipe,
    *,
    losses: Sequence[Loss],  # one a task
    execution: str = "auto",
    progress: Progress | None = None,
) -> Iterator[tuple[int, Fitted]]:
    """Train like `trainer.fit_many`, every model by a loss of its own: models of several losses step together.

    A run's aid is a row of zeros with a one at its loss. All losses of the logits are computed, which costs little.
    """
    distinct = [loss for i, loss in enumerate(losses) if loss not in losses[:i]]
    chosen = torch.tensor([distinct.index(loss) for loss in losses])

    def select(trainer: Trainer, start: Params, run: TaskTraining, inputs: Tensor) -> Tensor:
        return rows[run.index].to(inputs)

    def weigh(logits: Tensor, labels: Tensor, weights: Tensor) -> Tensor:
        return sum((weights[i] * loss(logits, labels) for i, loss in enumerate(distinct)), logits.new_zeros(()))

    rows = torch.nn.functional.one_hot(chosen, len(distinct))
    make = partial(LossesTrainer, losses, select, weigh, [task.state for task in tasks], net, recipe, losses[0], None)
    return train_many(make, tasks, execution, progress)


class LossesTrainer(AidedTrainer):
    """Trainer of runs that have a loss each, which decides when to stop too."""

    def __init__(self, losses: Sequence[Loss], *arguments: Any) -> None:
        super().__init__(*arguments)
        self.losses = losses

    def measure_validation(self, run: TaskTraining, logits: Tensor) -> Tensor:
        """Return the loss of a run's validation rows, by its own loss."""
        return self.losses[run.index](logits, run.validation.labels)
