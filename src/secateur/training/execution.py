"""Execution of many training steps at once: models, clients, trials or seeds are the lanes of one axis.

A lane's step is an objective `(params, buffers, *tensors) -> loss`. It is pure except for its buffers, the lane's own
clones, which BatchNorm updates in place. Random numbers are among the tensors.

| way        | execution                                                                               |
|------------|-----------------------------------------------------------------------------------------|
| sequential | one lane after the other; on a GPU captured in a CUDA graph, one branch per lane.       |
| stacked    | all lanes in one vmap, one optimiser over stacked tensors; on a GPU captured too.       |
| eager      | sequential without a graph, for models that cannot be captured.                         |
| ray        | whole jobs distributed over a Ray cluster (`map_many`).                                 |
| auto       | sequential on a CPU; on a GPU the fastest of the first three, timed (`choose`).         |

Stacked and sequential are equal in float64 to 1e-9 over an epoch, in float32 to 1e-5 relative after one step.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, vmap
from torch.optim import Optimizer

from secateur import tree
from secateur.errors import unknown
from secateur.gpu.graphs import recorded
from secateur.interfaces import Mask, Params
from secateur.training.ray import connected

WAYS = ("auto", "sequential", "stacked", "eager", "ray")
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
        self, objective: Objective, lanes: Sequence[Lane], optimiser: MakeOptimiser, way: str = "sequential"
    ) -> None:
        if way not in ("sequential", "stacked", "eager"):
            raise unknown("way", way, ("sequential", "stacked", "eager"))
        self._stacked = way == "stacked"
        self._objective = vmap(objective) if self._stacked else objective
        self._groups = [_stack(lanes)] if self._stacked else [Lane(*map(tree.clone, lane)) for lane in lanes]
        self._dropped = [(g.params[name], ~mask) for g in self._groups for name, mask in g.mask.items()]
        self._drop()
        self._leaves = [leaf.requires_grad_() for group in self._groups for leaf in group.params.values()]
        self._optimiser = optimiser(self._leaves)
        device = self._leaves[0].device
        self._side = torch.cuda.Stream(device) if way != "eager" and device.type == "cuda" else None  # type: ignore[no-untyped-call]
        # Lanes are independent, so each is a separate branch of a graph, and their small kernels overlap.
        self._branches = [torch.cuda.Stream(device) for _ in self._groups[1:]] if self._side is not None else []  # type: ignore[no-untyped-call]
        self._graphs: dict[object, _Graph] = {}

    def step(self, inputs: Sequence[Tensors]) -> Tensor:
        """Run one optimiser step of every lane on its own tensors; return the (lanes,) losses before the step."""
        columns = zip(*inputs, strict=True)
        groups = [tuple(map(_stacked, columns))] if self._stacked else list(inputs)
        return self._update(groups) if self._side is None else self._replay(groups, self._side)

    def states(self) -> list[Params]:
        """Return every lane's current parameters and buffers as views; clone them to keep them."""
        merged = [{name: value.detach() for name, value in (g.params | g.buffers).items()} for g in self._groups]
        if not self._stacked:
            return merged
        count = len(self._leaves[0])
        return [{name: value[i] for name, value in merged[0].items()} for i in range(count)]

    def _update(self, groups: Sequence[Tensors]) -> Tensor:
        self._optimiser.zero_grad(set_to_none=True)
        losses = []
        for index, (group, tensors) in enumerate(zip(self._groups, groups, strict=True)):
            with _branch(self._branches[index - 1] if index and self._branches else None):
                loss = self._objective(group.params, group.buffers, *tensors)
                # The gradient of the sum holds every stacked lane's gradient. It has its parameter's strides, which
                # fused optimisers assume.
                torch.autograd.backward(loss.sum(), inputs=list(group.params.values()))
                losses.append(loss.detach().reshape(-1))
        for branch in self._branches:
            torch.cuda.current_stream(branch.device).wait_stream(branch)
        self._optimiser.step()
        self._drop()
        return torch.cat(losses)

    @torch.no_grad()
    def _drop(self) -> None:
        for leaf, dropped in self._dropped:
            leaf.masked_fill_(dropped, 0)

    def _replay(self, groups: Sequence[Tensors], side: torch.cuda.Stream) -> Tensor:
        key = tuple((tensor.shape, tensor.dtype) for tensors in groups for tensor in tensors)
        if key not in self._graphs:
            self._graphs[key] = self._capture(groups, side)
        graph = self._graphs[key]
        torch._foreach_copy_(graph.inputs, [tensor for tensors in groups for tensor in tensors])
        graph.graph.replay()
        return graph.losses.clone()

    def _capture(self, groups: Sequence[Tensors], side: torch.cuda.Stream) -> _Graph:
        """Capture one step as a CUDA graph over static inputs; the state is unchanged afterwards."""
        held = [tuple(tensor.clone() for tensor in tensors) for tensors in groups]
        before = [tensor.detach().clone() for tensor in self._tensors()]
        moments = {id(m): m.clone() for m in self._moments()}
        # Graphs need a warm-up on a side stream: libraries initialise and the optimiser creates its state.
        side.wait_stream(torch.cuda.current_stream(side.device))
        with torch.cuda.stream(side), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*capturable=True")
            for _ in range(3):
                self._update(held)
        torch.cuda.current_stream(side.device).wait_stream(side)
        with torch.no_grad():
            torch._foreach_copy_(self._tensors(), before)
            for moment in self._moments():  # a moment that the warm-up created starts at zero
                moment.copy_(moments[id(moment)]) if id(moment) in moments else moment.zero_()
        graph = torch.cuda.CUDAGraph()
        # The graphs of one object run one at a time and keep nothing in between, so they share their memory.
        pool = next(iter(self._graphs.values())).graph.pool() if self._graphs else None
        with recorded(graph, side, pool):
            losses = self._update(held)
        return _Graph(graph, [tensor for tensors in held for tensor in tensors], losses)

    def _tensors(self) -> list[Tensor]:
        return self._leaves + [buffer for group in self._groups for buffer in group.buffers.values()]

    def _moments(self) -> list[Tensor]:
        return [v for state in self._optimiser.state.values() for v in state.values() if isinstance(v, Tensor)]


@contextmanager
def _branch(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Run work on a stream that forks off the current one; the caller waits for its results."""
    if stream is None:
        yield
        return
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    with torch.cuda.stream(stream):
        yield


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    losses: Tensor


def _stack(lanes: Sequence[Lane]) -> Lane:
    masked = {name for lane in lanes for name in lane.mask}
    like = {name: torch.ones_like(lanes[0].params[name], dtype=torch.bool) for name in masked}
    trees = ([lane.params for lane in lanes], [lane.buffers for lane in lanes], [like | lane.mask for lane in lanes])
    return Lane(*({name: _stacked([part[name] for part in parts]) for name in parts[0]} for parts in trees))


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor with a leading axis, in plain strides: vmap has no rules for channels_last on a GPU.

    `contiguous` would keep the strides of 1x1 filters, which are valid in both layouts.
    """
    stacked = tensors[0].new_empty((len(tensors), *tensors[0].shape))
    for row, tensor in zip(stacked, tensors, strict=True):
        row.copy_(tensor)
    return stacked


def choose(objective: Objective, lanes: Sequence[Lane], optimiser: MakeOptimiser, inputs: Sequence[Tensors]) -> str:
    """Return the way for `auto`: sequential on a CPU; on a GPU the fastest, timed on clones over captured steps."""
    if next(iter(lanes[0].params.values())).device.type != "cuda":
        return "sequential"
    seconds: dict[str, float] = {}
    for way in ("sequential", "stacked") if len(lanes) > 1 else ("sequential",):
        try:
            seconds[way] = _seconds(Lanes(objective, lanes, optimiser, way), inputs)
        except RuntimeError:  # cannot be captured or stacked, or does not fit
            torch.cuda.empty_cache()
    return min(seconds, key=lambda way: seconds[way]) if seconds else "eager"


def _seconds(lanes: Lanes, inputs: Sequence[Tensors], steps: int = 5) -> float:
    lanes.step(inputs)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        lanes.step(inputs)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def map_many(
    function: Callable[[Item], Result], items: Sequence[Item], way: str = "sequential", gpus: float = 0
) -> Iterator[tuple[int, Result]]:
    """Run whole jobs here or on a Ray cluster; yield (index, result) as they finish.

    The Ray cluster is the one that RAY_ADDRESS names, else one on this machine that ends with the last result. A worker
    uses one thread, because results differ between thread counts, and `gpus` of a GPU.
    """
    if way != "ray":
        yield from ((index, function(item)) for index, item in enumerate(items))
        return
    with connected() as ray:
        job: Any = ray.remote(num_cpus=1, num_gpus=gpus)(_on_one_thread)
        shared = ray.put(function)
        running = {job.remote(shared, item): index for index, item in enumerate(items)}
        while running:
            for done in ray.wait(list(running))[0]:
                index = running.pop(done)
                try:
                    result = ray.get(done)
                except ray.exceptions.RayTaskError as error:
                    raise error.cause from None
                yield index, result


def _on_one_thread(function: Callable[[Item], Result], item: Item) -> Result:
    torch.set_num_threads(1)
    return function(item)
