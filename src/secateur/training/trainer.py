"""Training of one model or of many together: epochs, early stopping, history and random numbers, for any step.

`fit` and `fit_many` minimise a loss by `Trainer`. A defense that does more overrides `stepper` (and `order`) and calls
`train_many`.

The tensors stay on the device of the task's training inputs, and batches are rows of a permutation. No test split is
used here, and no argument changes: nets, states and generators are copied.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.errors import WrongInput, unknown
from secateur.functional import Ask, Functional, join_state, split
from secateur.gpu.memory import let_go, ran_out
from secateur.inference import outputs, to_channels_last
from secateur.interfaces import Batch, Guide, Loss, Params, Penalty, Transform
from secateur.training.execution import EXECUTIONS, Lane, Lanes, choose, map_many
from secateur.training.recipe import Fitted, Progress, Recipe, Row, Task

log = logging.getLogger(__name__)


class Stepper(Protocol):
    """Optimiser steps of several runs together."""

    def step(self, rows: Sequence[Tensor]) -> Tensor:
        """Step every run on these rows of its training data; return the losses (runs,) before the step."""
        ...

    def states(self) -> list[Params]:
        """Return every run's current tensors."""
        ...

    def facts(self) -> list[Row]:
        """Return the entries that the last epoch adds to every run's row of history."""
        ...


def fit(net: nn.Module, task: Task, recipe: Recipe, **options: Any) -> Fitted:
    """Train one model; `net` gives the structure, `task` the tensors. The options are those of `fit_many`."""
    return next(fit_many(net, [task], recipe, **options))[1]


def fit_many(
    net: nn.Module,
    tasks: Sequence[Task],
    recipe: Recipe,
    *,
    loss: Loss = cross_entropy,
    transform: Transform | None = None,
    penalty: Penalty | None = None,
    guide: Guide | None = None,
    execution: str = "auto",
    progress: Progress | None = None,
) -> Iterator[tuple[int, Fitted]]:
    """Train many models of one structure; yield (index of the task, result) as they finish.

    `execution` is one of `execution.EXECUTIONS`; see `train_many` for tasks that step together.
    """
    trainer = Trainer if guide is None else partial(GuidedTrainer, guide)
    return train_many(partial(trainer, net, recipe, loss, transform, penalty), tasks, execution, progress)


def train_many(
    make: Callable[[torch.device], Trainer], tasks: Sequence[Task], execution: str, progress: Progress | None
) -> Iterator[tuple[int, Fitted]]:
    """Train the tasks with trainers that `make` builds for a device; yield (index, result) as they finish.

    Stacked, and on a GPU, tasks of one size step together. A task that stopped early keeps its best state while the
    others go on. Over Ray there is no progress within a task.
    """
    if execution not in EXECUTIONS:
        raise unknown("execution", execution, EXECUTIONS)
    if execution == "ray":
        yield from _train_on_ray(make, tasks)
        return
    groups: dict[tuple[torch.Size, torch.Size, torch.device], list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        groups[task.train.inputs.shape, task.validation.inputs.shape, task.train.inputs.device].append(index)
    for (_, _, device), indices in groups.items():
        trainer = make(device)
        chosen = trainer.choose_execution(execution, [tasks[i] for i in indices])
        # On a GPU the kernels of several runs overlap.
        together = chosen == "stacked" or (device.type == "cuda" and trainer.lockstep)
        for some in [indices] if together else [[index] for index in indices]:
            yield from _train_together(trainer, tasks, some, chosen, progress)


def _train_together(
    trainer: Trainer, tasks: Sequence[Task], indices: Sequence[int], execution: str, progress: Progress | None
) -> Iterator[tuple[int, Fitted]]:
    """Train tasks together; where memory runs out, train the unfinished ones in halves, from their beginning."""
    done: set[int] = set()
    try:
        runs = [TaskTraining(trainer, index, tasks[index]) for index in indices]
        for index, fitted in trainer.train(runs, execution, progress):
            done.add(index)
            yield index, fitted
        return
    except Exception as error:
        left = [index for index in indices if index not in done]
        if len(left) < 2 or not ran_out(error):
            raise
    del runs
    let_go(tasks[left[0]].train.inputs.device)  # only here, after the error is released, are its tensors free
    half = (len(left) + 1) // 2
    log.warning("memory ran out with %d models at once; going on with %d", len(left), half)
    for some in (left[:half], left[half:]):
        yield from _train_together(trainer, tasks, some, execution, progress)


def _train_on_ray(make: Callable[[torch.device], Trainer], tasks: Sequence[Task]) -> Iterator[tuple[int, Fitted]]:
    """Train every task in a Ray worker of its own."""
    if not tasks:
        return
    device = tasks[0].train.inputs.device

    def job(task: Task) -> Fitted:
        _, fitted = next(train_many(make, [task.to(device.type)], "auto", None))
        return replace(fitted, state=tree.to(fitted.state, "cpu"))

    for index, fitted in map_many(job, [task.to("cpu") for task in tasks], "ray", gpus=int(device.type == "cuda")):
        yield index, replace(fitted, state=tree.to(fitted.state, device))


class Trainer:
    """Objective of the runs of one structure, and their loop over epochs and steps."""

    lockstep = True  # True if runs may step together

    def __init__(
        self,
        net: nn.Module,
        recipe: Recipe,
        loss: Loss,
        transform: Transform | None,
        penalty: Penalty | None,
        device: torch.device,
    ) -> None:
        self.net, self.recipe, self.loss, self.transform, self.penalty = net, recipe, loss, transform, penalty
        self.learner = Functional(net, training=True, device=device)
        self.judge = Functional(net, training=False, device=device)
        self.needs_two = any(isinstance(module, _BatchNorm) for module in net.modules())

    def objective(self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        """Return the loss of a batch plus the penalty."""
        tensors = params | buffers
        loss = self.loss(self.learner(tensors, inputs, noise), labels)
        return loss if self.penalty is None else loss + self.penalty(tensors)

    def stepper(self, runs: Sequence[TaskTraining], execution: str) -> Stepper:
        """Return the stepper of these runs."""
        return _Descent(self, runs, execution)

    def order(self, run: TaskTraining) -> Sequence[Tensor]:
        """Return an epoch's batches of one run."""
        return run.order()

    def measure_validation(self, run: TaskTraining, logits: Tensor) -> Tensor:
        """Return the loss of a run's validation rows, which decides when it stops."""
        return self.loss(logits, run.validation.labels)

    def choose_execution(self, execution: str, tasks: Sequence[Task]) -> str:
        """Return the execution of tasks of one shape: sequential, stacked or eager; "auto" times copies."""
        if execution != "auto":
            return execution
        if not tasks[0].train.inputs.is_cuda:
            return "sequential"
        runs = [TaskTraining(self, 0, task) for task in tasks]
        batches = [run.tensors(torch.arange(min(self.recipe.batch_size, run.train.size))) for run in runs]
        return choose(self.objective, [run.lane for run in runs], self.recipe.make_optimiser, batches)

    def train(
        self, runs: Sequence[TaskTraining], execution: str, progress: Progress | None
    ) -> Iterator[tuple[int, Fitted]]:
        """Step the runs together and yield each when it is done."""
        steps = self.stepper(runs, execution)
        for epoch in range(1, self.recipe.epochs + 1):
            losses, sizes = [], []
            for rows in zip(*(self.order(run) for run in runs), strict=True):
                losses.append(steps.step(rows))
                sizes.append(len(rows[0]))
            weights = torch.tensor(sizes, dtype=losses[0].dtype, device=losses[0].device) / max(sum(sizes), 1)
            means = (weights @ torch.stack(losses)).tolist()
            for run, mean, state, facts in zip(runs, means, steps.states(), steps.facts(), strict=True):
                if not run.done:
                    row = run.close(epoch, mean, state)
                    row.update(facts)
                    if progress:
                        progress(run.index, row)
                    if run.done:
                        yield run.index, run.result()
            if all(run.done for run in runs):
                return


class GuidedTrainer(Trainer):
    """Trainer whose loss has a term of the inputs and the logits: a student that learns from another network."""

    def __init__(self, guide: Guide, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.guide = guide

    def objective(self, params: Params, buffers: Params, inputs: Tensor, labels: Tensor, *noise: Tensor) -> Tensor:
        """Return the loss of a batch plus the guide's term."""
        logits = self.learner(params | buffers, inputs, noise)
        return self.loss(logits, labels) + self.guide(inputs, logits)


class _Descent:
    """Stepper that minimises the trainer's objective."""

    def __init__(self, trainer: Trainer, runs: Sequence[TaskTraining], execution: str) -> None:
        self.runs = runs
        self.lanes = Lanes(trainer.objective, [run.lane for run in runs], trainer.recipe.make_optimiser, execution)

    def step(self, rows: Sequence[Tensor]) -> Tensor:
        return self.lanes.step([run.tensors(some) for run, some in zip(self.runs, rows, strict=True)])

    def states(self) -> list[Params]:
        return self.lanes.states()

    def facts(self) -> list[Row]:
        return [{} for _ in self.runs]


class TaskTraining:
    """Training of one task: its data on the device, its generators, its history and its best state."""

    def __init__(self, trainer: Trainer, index: int, task: Task) -> None:
        device = task.train.inputs.device
        state = tree.mask_tree(tree.to(task.state, device), tree.to(task.mask or {}, device))
        params, buffers = (to_channels_last(part) for part in split(trainer.net, state))
        mask = {name: kept for name, kept in tree.to(task.mask or {}, device).items() if name in params}
        self.trainer, self.recipe, self.index = trainer, trainer.recipe, index
        self.lane = Lane(params, buffers, to_channels_last(mask))
        self.train, self.validation = (
            Batch(**to_channels_last(part._asdict())) for part in (task.train, task.validation)
        )
        self.rng = task.rng.clone_state()
        seed = int(torch.randint(2**62, (), generator=self.rng))
        self.noise = torch.Generator(device).manual_seed(seed)  # dropout and transforms draw on the device
        self.asks: dict[int, list[Ask]] = {}
        self.history: list[Row] = []
        self.best: Params = {}
        self.best_epoch, self.least, self.done = 0, math.inf, False
        self._check()

    def order(self) -> tuple[Tensor, ...]:
        """Return an epoch's batches as rows; a single last example joins the batch before if BatchNorm needs two."""
        rows = torch.randperm(self.train.size, generator=self.rng).to(self.train.inputs.device)
        batches = torch.split(rows, self.recipe.batch_size)
        if self.trainer.needs_two and len(batches) > 1 and len(batches[-1]) == 1:
            batches = (*batches[:-2], torch.cat(batches[-2:]))
        return batches

    def tensors(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return a batch and its noise."""
        inputs, labels = self.train.take(rows)
        if self.trainer.transform is not None:
            inputs = self.trainer.transform(inputs, self.noise)
        if len(rows) not in self.asks:
            self.asks[len(rows)] = self.trainer.learner.asks(self.lane.params | self.lane.buffers, inputs)
        return (inputs, labels, *(ask.draw(self.noise) for ask in self.asks[len(rows)]))

    def close(self, epoch: int, train_loss: float, state: Params) -> Row:
        """Evaluate the state at the end of an epoch: keep the best, and stop when patience is out."""
        row: Row = {"epoch": epoch, "train_loss": train_loss}
        if self.validation.size:
            logits = outputs(self.trainer.judge, state, self.validation.inputs)
            row["validation_loss"] = float(self.trainer.measure_validation(self, logits))
            row["validation_accuracy"] = float((logits.argmax(1) == self.validation.labels).double().mean())
        if not all(math.isfinite(value) for value in row.values()):
            raise WrongInput("model", f"the loss became NaN in epoch {epoch}; lower the learning rate, check the data")
        self.history.append(row)
        patience, last = self.recipe.patience, epoch == self.recipe.epochs
        if patience is None:
            better, self.done = last, last
        else:
            value = row["validation_loss"] if self.recipe.monitor == "loss" else -row["validation_accuracy"]
            better = value < self.least
            self.least = min(value, self.least)
            self.done = last or (not better and epoch - self.best_epoch >= patience)
        if better:
            self.best_epoch, self.best = epoch, join_state(self.trainer.net, state)
        return row

    def result(self) -> Fitted:
        """Return the result of a run that is done."""
        return Fitted(self.best, self.history, self.best_epoch, stopped=len(self.history) < self.recipe.epochs)

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse a model without parameters, empty data, and labels that do not fit the model's output."""
        if not self.lane.params:
            raise WrongInput("model", "has no parameters to train")
        if not self.train.size or not (self.validation.size or self.recipe.patience is None):
            raise WrongInput("data", "must have at least one example for training and one for validation")
        logits = outputs(self.trainer.judge, self.lane.params | self.lane.buffers, self.train.inputs[:2])
        labels = torch.cat([self.train.labels, self.validation.labels])
        low, high = int(labels.min()), int(labels.max())
        if logits.ndim != 2 or not 0 <= low <= high < logits.shape[1]:
            allowed = f"0 to {logits.shape[1] - 1}" if logits.ndim == 2 else "rows of logits, one for each class"
            problem = f"labels from {low} to {high} do not fit the model's output {tuple(logits.shape)}"
            raise WrongInput("labels", f"{problem}; allowed: {allowed}")
