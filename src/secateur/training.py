"""Fit and fine-tune, one or many, with early stopping on the validation split; predict; per-example gradients.

The tensors stay in memory on the device of the task's training inputs, and batches are rows of a permutation. Nothing
here sees a test split, and nothing that is given changes: nets, states and generators are copied.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.modules.batchnorm import _BatchNorm

from secateur import tree
from secateur.errors import WrongInput, unknown
from secateur.execution import WAYS, Lane, Lanes, choose, map_many
from secateur.functional import Ask, Functional, joined, split
from secateur.interfaces import Batch, Loss, Params, Penalty, Transform
from secateur.prediction import arranged, logits, outputs, per_example_gradients, predict
from secateur.recipe import Fitted, Progress, Recipe, Row, Task

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

    `way` is one of `execution.WAYS`. Stacked, and on a GPU, tasks step together, in groups of one training size; one
    that stopped early keeps its best state while the others go on. Over Ray there is no progress within a task.
    """
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    if way == "ray":
        yield from _fit_on_ray(net, tasks, recipe, {"loss": loss, "transform": transform, "penalty": penalty})
        return
    groups: dict[tuple[torch.Size, torch.device], list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        groups[task.train.inputs.shape, task.train.inputs.device].append(index)
    for (_, device), indices in groups.items():
        trainer = _Trainer(net, recipe, loss, transform, penalty, device)
        chosen = way
        if way == "auto":
            chosen = "sequential" if device.type != "cuda" else trainer.choose([tasks[i] for i in indices])
        together = chosen == "stacked" or device.type == "cuda"  # on a GPU the lanes' kernels overlap
        for some in [indices] if together else [[index] for index in indices]:
            yield from trainer.train([_Run(trainer, index, tasks[index]) for index in some], chosen, progress)


def _fit_on_ray(
    net: nn.Module, tasks: Sequence[Task], recipe: Recipe, extras: dict[str, Any]
) -> Iterator[tuple[int, Fitted]]:
    if not tasks:
        return
    device = tasks[0].train.inputs.device
    net = copy.deepcopy(net).cpu()

    def job(task: Task) -> Fitted:
        fitted = fit(net, task.to(device.type), recipe, **extras)
        return replace(fitted, state=tree.to(fitted.state, "cpu"))

    for index, fitted in map_many(job, [t.to("cpu") for t in tasks], "ray", gpus=int(device.type == "cuda")):
        yield index, replace(fitted, state=tree.to(fitted.state, device))


class _Trainer:
    """What the runs of one structure share: the objective, and the loop over epochs and steps."""

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
        tensors = params | buffers
        loss = self.loss(self.learner(tensors, inputs, noise), labels)
        return loss if self.penalty is None else loss + self.penalty(tensors)

    def choose(self, tasks: Sequence[Task]) -> str:
        """The fastest way, timed on copies of the tasks' first batches."""
        runs = [_Run(self, 0, task) for task in tasks]
        batches = [run.tensors(torch.arange(min(self.recipe.batch_size, run.train.size))) for run in runs]
        return choose(self.objective, [run.lane for run in runs], self.recipe.make_optimiser, batches)

    def train(self, runs: Sequence[_Run], way: str, progress: Progress | None) -> Iterator[tuple[int, Fitted]]:
        """Steps the runs together and yields each when it is done."""
        lanes = Lanes(self.objective, [run.lane for run in runs], self.recipe.make_optimiser, way)
        for epoch in range(1, self.recipe.epochs + 1):
            losses, sizes = [], []
            for rows in zip(*(run.order() for run in runs), strict=True):
                losses.append(lanes.step([run.tensors(r) for run, r in zip(runs, rows, strict=True)]))
                sizes.append(len(rows[0]))
            weights = torch.tensor(sizes, dtype=losses[0].dtype, device=losses[0].device) / sum(sizes)
            means = (weights @ torch.stack(losses)).tolist()
            for run, mean, state in zip(runs, means, lanes.states(), strict=True):
                if not run.done:
                    row = run.close(epoch, mean, state)
                    if progress:
                        progress(run.index, row)
                    if run.done:
                        yield run.index, run.fitted()
            if all(run.done for run in runs):
                return


class _Run:
    """One task's course: its data on the device, its chance, its history and its best state."""

    def __init__(self, trainer: _Trainer, index: int, task: Task) -> None:
        device = task.train.inputs.device
        state = tree.masked(tree.to(task.state, device), tree.to(task.mask or {}, device))
        params, buffers = (arranged(part) for part in split(trainer.net, state))
        mask = {name: kept for name, kept in tree.to(task.mask or {}, device).items() if name in params}
        self.trainer, self.recipe, self.index = trainer, trainer.recipe, index
        self.lane = Lane(params, buffers, arranged(mask))
        self.train, self.validation = (Batch(**arranged(part._asdict())) for part in (task.train, task.validation))
        self.rng = task.rng.clone_state()
        seed = int(torch.randint(2**62, (), generator=self.rng))
        self.noise = torch.Generator(device).manual_seed(seed)  # dropout and transforms draw on the device
        self.asks: dict[int, list[Ask]] = {}
        self.history: list[Row] = []
        self.best: Params = {}
        self.best_epoch, self.least, self.done = 0, math.inf, False
        self._check()

    def order(self) -> tuple[Tensor, ...]:
        """An epoch's batches as rows. A last single example joins the batch before it where BatchNorm needs two."""
        rows = torch.randperm(self.train.size, generator=self.rng).to(self.train.inputs.device)
        batches = torch.split(rows, self.recipe.batch_size)
        if self.trainer.needs_two and len(batches) > 1 and len(batches[-1]) == 1:
            batches = (*batches[:-2], torch.cat(batches[-2:]))
        return batches

    def tensors(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A batch and its noise."""
        inputs, labels = self.train.take(rows)
        if self.trainer.transform is not None:
            inputs = self.trainer.transform(inputs, self.noise)
        if len(rows) not in self.asks:
            self.asks[len(rows)] = self.trainer.learner.asks(self.lane.params | self.lane.buffers, inputs)
        return (inputs, labels, *(ask.draw(self.noise) for ask in self.asks[len(rows)]))

    def close(self, epoch: int, train_loss: float, state: Params) -> Row:
        """Judge the state at the end of an epoch: keep the best, and stop when patience is out."""
        row: Row = {"epoch": epoch, "train_loss": train_loss}
        if self.validation.size:
            given = outputs(self.trainer.judge, state, self.validation.inputs)
            row["validation_loss"] = float(self.trainer.loss(given, self.validation.labels))
            row["validation_accuracy"] = float((given.argmax(1) == self.validation.labels).double().mean())
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
            self.best_epoch, self.best = epoch, joined(self.trainer.net, state)
        return row

    def fitted(self) -> Fitted:
        return Fitted(self.best, self.history, self.best_epoch, stopped=len(self.history) < self.recipe.epochs)

    @torch.no_grad()
    def _check(self) -> None:
        if not self.lane.params:
            raise WrongInput("model", "has no parameters to train")
        if not self.train.size or not (self.validation.size or self.recipe.patience is None):
            raise WrongInput("data", "training and validation need at least one example each")
        given = outputs(self.trainer.judge, self.lane.params | self.lane.buffers, self.train.inputs[:2])
        labels = torch.cat([self.train.labels, self.validation.labels])
        if given.ndim != 2 or not 0 <= int(labels.min()) <= int(labels.max()) < given.shape[1]:
            allowed = f"0 to {given.shape[1] - 1}" if given.ndim == 2 else "rows of logits, one for each class"
            found = f"labels from {int(labels.min())} to {int(labels.max())}"
            raise WrongInput(
                "labels", f"{found} do not fit the model's output {tuple(given.shape)}; allowed: {allowed}"
            )
