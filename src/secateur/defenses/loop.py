"""The loop of training.py with another step in it, for the defenses that do more than minimise a loss.

Early stopping, history, chance, checks and the grouping of tasks are training's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from secateur import tree
from secateur.errors import unknown
from secateur.execution import WAYS, map_many
from secateur.interfaces import Params
from secateur.recipe import Fitted, Progress, Row, Task
from secateur.training import _Run as Run
from secateur.training import _Trainer

__all__ = ["Run", "Stepper", "Trainer", "fit_many"]


class Stepper(Protocol):
    """Several runs in step."""

    def step(self, rows: Sequence[Tensor]) -> Tensor:
        """One step of every run on these rows of its training data; returns the (runs,) losses before it."""
        ...

    def states(self) -> list[Params]:
        """Every run's tensors as they are now."""
        ...

    def facts(self) -> list[Row]:
        """What the epoch that just ended adds to every run's row of history."""
        ...


class Trainer(_Trainer):
    """Training with the step that `stepper` gives."""

    def stepper(self, runs: Sequence[Run], way: str) -> Stepper:
        """What steps these runs."""
        raise NotImplementedError

    def order(self, run: Run) -> Sequence[Tensor]:
        """An epoch's batches of one run."""
        return run.order()

    def way(self, way: str, tasks: Sequence[Task]) -> str:
        """How tasks of one shape go together: sequential, stacked or eager."""
        if way != "auto":
            return way
        return self.choose(tasks) if tasks[0].train.inputs.is_cuda else "sequential"

    def train(self, runs: Sequence[Run], way: str, progress: Progress | None) -> Iterator[tuple[int, Fitted]]:
        """Steps the runs together and yields each when it is done."""
        steps = self.stepper(runs, way)
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
                        yield run.index, run.fitted()
            if all(run.done for run in runs):
                return


def fit_many(
    make: Callable[[torch.device], Trainer], tasks: Sequence[Task], way: str, progress: Progress | None
) -> Iterator[tuple[int, Fitted]]:
    """What `training.fit_many` does, with trainers that `make` makes for a device."""
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    if way == "ray":
        yield from _on_ray(make, tasks)
        return
    groups: dict[tuple[torch.Size, torch.Size, torch.device], list[int]] = defaultdict(list)
    for index, task in enumerate(tasks):
        inputs = task.train.inputs
        groups[inputs.shape, task.validation.inputs.shape, inputs.device].append(index)
    for (_, _, device), indices in groups.items():
        trainer = make(device)
        chosen = trainer.way(way, [tasks[i] for i in indices])
        for some in [indices] if chosen == "stacked" else [[index] for index in indices]:
            yield from trainer.train([Run(trainer, index, tasks[index]) for index in some], chosen, progress)


def _on_ray(make: Callable[[torch.device], Trainer], tasks: Sequence[Task]) -> Iterator[tuple[int, Fitted]]:
    if not tasks:
        return
    device = tasks[0].train.inputs.device

    def job(task: Task) -> Fitted:
        _, fitted = next(fit_many(make, [task.to(device.type)], "auto", None))
        return replace(fitted, state=tree.to(fitted.state, "cpu"))

    for index, fitted in map_many(job, [task.to("cpu") for task in tasks], "ray", gpus=int(device.type == "cuda")):
        yield index, replace(fitted, state=tree.to(fitted.state, device))
