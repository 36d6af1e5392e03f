"""Execution of many training steps at once: models, clients, trials or seeds are the lanes of one axis.

A lane's step is an objective `(params, buffers, *tensors) -> loss`. It is pure except for its buffers, the lane's own
clones, which BatchNorm updates in place. Random numbers are among the tensors.

| execution  | meaning                                                                                 |
|------------|-----------------------------------------------------------------------------------------|
| sequential | one lane after the other; on a GPU captured in a CUDA graph, one branch per lane.       |
| stacked    | all lanes in one vmap, one optimiser over stacked tensors; on a GPU captured too.       |
| eager      | sequential without a graph, for models that cannot be captured.                         |
| ray        | whole jobs distributed over a Ray cluster (`map_many`).                                 |
| auto       | sequential on a CPU; on a GPU the fastest of the first three, timed (`choose`). Inside    |
|            | `deterministic` nothing is timed: the first that can be captured.                       |

Stacked and sequential are equal in float64 to 1e-9 over an epoch, in float32 to 1e-5 relative after one step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, vmap
from torch.optim import Optimizer

from secateur import tree
from secateur.errors import unknown
from secateur.gpu.determinism import deterministic, is_deterministic
from secateur.gpu.graphs import WARMUPS, Branches, Captured
from secateur.interfaces import Mask, Params
from secateur.training.ray import connected

EXECUTIONS = ("auto", "sequential", "stacked", "eager", "ray")
Objective = Callable[..., Tensor]  # (params, buffers, *tensors) -> scalar loss
MakeOptimiser = Callable[[list[Tensor]], Optimizer]  # must update every entry independently, as SGD and Adam do
Tensors = tuple[Tensor, ...]

Item = TypeVar("Item")
Result = TypeVar("Result")


class Lane(NamedTuple):
    """A model, client, trial or seed: trained parameters, other tensors of the objective, mask of kept weights."""

    params: Params
    buffers: Params
    mask: Mask = {}  # noqa: RUF012 - read only; entries that a mask drops are exactly zero after every step


class Lanes:
    """Many lanes that are stepped at once, as clones: the tensors passed in never change."""

    def __init__(
        self, objective: Objective, lanes: Sequence[Lane], optimiser: MakeOptimiser, execution: str = "sequential"
    ) -> None:
        if execution not in ("sequential", "stacked", "eager"):
            raise unknown("execution", execution, ("sequential", "stacked", "eager"))
        self._stacked = execution == "stacked"
        self._groups = [_stack(lanes)] if self._stacked else [Lane(*map(tree.clone, lane)) for lane in lanes]
        device = _device(self._groups)
        graphs = execution != "eager" and device.type == "cuda"
        step = _LaneStep(vmap(objective) if self._stacked else objective, self._groups, optimiser, graphs)
        self._step = Captured(partial(_run_quietly, step), device, required=True) if graphs else step

    def step(self, inputs: Sequence[Tensors]) -> Tensor:
        """Run one optimiser step of every lane on its own tensors; return the (lanes,) losses before the step."""
        columns = zip(*inputs, strict=True)
        losses = self._step([tuple(map(_stack_plain, columns))] if self._stacked else list(inputs))
        return losses.clone() if isinstance(self._step, Captured) else losses

    def states(self) -> list[Params]:
        """Return every lane's current parameters and buffers as views; clone them to keep them."""
        merged = [{name: value.detach() for name, value in (g.params | g.buffers).items()} for g in self._groups]
        if not self._stacked:
            return merged
        count = len(next(iter(merged[0].values())))
        return [{name: value[i] for name, value in merged[0].items()} for i in range(count)]


class _LaneStep:
    """Optimiser step of all groups of lanes.

    It does not refer to its `Lanes`: a reference back would keep the memory of a graph until garbage is collected.
    """

    def __init__(self, objective: Objective, groups: Sequence[Lane], optimiser: MakeOptimiser, graphs: bool) -> None:
        self.objective, self.groups = objective, groups
        self.dropped = [(group.params[name], ~mask) for group in groups for name, mask in group.mask.items()]
        self.drop()
        leaves = [leaf.requires_grad_() for group in groups for leaf in group.params.values()]
        self.optimiser = optimiser(leaves)
        # Lanes are independent, so each is a separate branch of a graph, and their small kernels overlap.
        self.branches = Branches(len(groups), leaves[0].device, parallel=graphs)

    def __call__(self, inputs: Sequence[Tensors]) -> Tensor:
        """Step every group on its tensors; return the losses before the step."""
        self.optimiser.zero_grad(set_to_none=True)

        def descend(index: int) -> Tensor:
            group = self.groups[index]
            loss = self.objective(group.params, group.buffers, *inputs[index])
            # The gradient of the sum holds every stacked lane's gradient. It has its parameter's strides, which fused
            # optimisers assume.
            torch.autograd.backward(loss.sum(), inputs=list(group.params.values()))
            return loss.detach().reshape(-1)

        losses = self.branches(descend)
        self.optimiser.step()
        self.drop()
        return torch.cat(losses)

    @torch.no_grad()
    def drop(self) -> None:
        """Set the entries that the masks drop to zero."""
        for leaf, dropped in self.dropped:
            leaf.masked_fill_(dropped, 0)


def _run_quietly(step: _LaneStep, inputs: Sequence[Tensors]) -> Tensor:
    """Run a step without Adam's warning that no graph captures it: the first steps run before the capture."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*capturable=True")
        return step(inputs)


def _stack(lanes: Sequence[Lane]) -> Lane:
    masked = {name for lane in lanes for name in lane.mask}
    like = {name: torch.ones_like(lanes[0].params[name], dtype=torch.bool) for name in masked}
    trees = ([lane.params for lane in lanes], [lane.buffers for lane in lanes], [like | lane.mask for lane in lanes])
    return Lane(*({name: _stack_plain([part[name] for part in parts]) for name in parts[0]} for parts in trees))


def _stack_plain(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor with a leading axis, in plain strides: vmap has no rules for channels_last on a GPU.

    `contiguous` would keep the strides of 1x1 filters, which are valid in both layouts.
    """
    stacked = tensors[0].new_empty((len(tensors), *tensors[0].shape))
    for row, tensor in zip(stacked, tensors, strict=True):
        row.copy_(tensor)
    return stacked


def choose(objective: Objective, lanes: Sequence[Lane], optimiser: MakeOptimiser, inputs: Sequence[Tensors]) -> str:
    """Return the execution for `auto`: sequential on a CPU; on a GPU the fastest, timed on clones.

    Inside `deterministic` it is the first that can be captured, because times differ from run to run.
    """
    if _device(lanes).type != "cuda":
        return "sequential"
    seconds: dict[str, float] = {}
    for execution in ("sequential", "stacked") if len(lanes) > 1 else ("sequential",):
        try:
            seconds[execution] = _seconds(Lanes(objective, lanes, optimiser, execution), inputs)
        except RuntimeError:  # cannot be captured or stacked, or does not fit
            torch.cuda.empty_cache()
        if seconds and is_deterministic():
            break
    return min(seconds, key=lambda execution: seconds[execution]) if seconds else "eager"


def _device(lanes: Sequence[Lane]) -> torch.device:
    return next(iter(lanes[0].params.values())).device


def _seconds(lanes: Lanes, inputs: Sequence[Tensors], steps: int = 5) -> float:
    for _ in range(WARMUPS + 1):  # the last one captures
        lanes.step(inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        lanes.step(inputs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def map_many(
    function: Callable[[Item], Result], items: Sequence[Item], execution: str = "sequential", gpus: float = 0
) -> Iterator[tuple[int, Result]]:
    """Run whole jobs here or on a Ray cluster; yield (index, result) as they finish.

    The Ray cluster is the one that RAY_ADDRESS names, else one on this machine that ends with the last result. A worker
    uses one thread, because results differ between thread counts, and `gpus` of a GPU.
    """
    if execution != "ray":
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    with connected() as ray:
        job: Any = ray.remote(num_cpus=1, num_gpus=gpus)(_run_as_here)
        shared, exact = ray.put(function), is_deterministic()
        running = {job.remote(shared, exact, item): index for index, item in enumerate(items)}
        while running:
            for done in ray.wait(list(running))[0]:
                index = running.pop(done)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                yield index, result


def _run_as_here(function: Callable[[Item], Result], exact: bool, item: Item) -> Result:
    """Run a job in a worker on one thread, deterministic if the process that sent it is."""
    torch.set_num_threads(1)
    with deterministic(exact):
        return function(item)
