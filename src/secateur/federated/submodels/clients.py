"""Client training of sub-models: turns of several widths and sizes, one by one or stacked by width.

| way        | how                                                                                                  |
|------------|------------------------------------------------------------------------------------------------------|
| sequential | one client after the other, channels_last; the default on a CPU                                       |
| stacked    | clients of one width step together; on a GPU each form of a step is a CUDA graph; the default there     |

Stacked clients have lanes in the order of their sizes. A step of full batches takes the first k lanes: those that still
have one. Then the last, partial batches make a step for each length. So nothing is ever padded. In float64 both ways
are equal to 1e-9 over an epoch. Biases before a BatchNorm are an exception: their gradient is round-off.

A model is one flat vector here, and Adam runs over this vector.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn, vmap
from torch.nn.functional import cross_entropy

from secateur.data.dataset import fingerprint
from secateur.errors import unknown
from secateur.federated.augment import CropAndFlip, moved
from secateur.federated.client_training import WAYS
from secateur.federated.submodels.chained_layers import Chain, fits
from secateur.federated.submodels.spec import Adam
from secateur.federated.submodels.structure import params_of
from secateur.functional import Ask, Functional
from secateur.gpu.graphs import WARMUPS, Captured
from secateur.gpu.precision import tf32
from secateur.inference import arranged
from secateur.interfaces import Batch

MOST_GRAPHS = 512  # a graph keeps its memory; clients that change from round to round make new forms without end


class AdamMoments(NamedTuple):
    """Adam's state of a client that goes on."""

    first: Tensor
    second: Tensor
    steps: int


class SubmodelTurn(NamedTuple):
    """The input of one client's turn."""

    key: str  # of the client's Narrow
    start: Tensor  # (P_c,)
    epochs: Sequence[Tensor]  # the rows in the order of each epoch, from `picked`
    rng: Generator  # for the network's noise, on the device
    owned: Tensor | None = None  # (K,) 1 for the labels that the client owns, else 0
    moments: AdamMoments | None = None  # None: zeros


class SubmodelResult(NamedTuple):
    """The output of one client's turn."""

    flat: Tensor
    moments: AdamMoments


class _Step(NamedTuple):
    """The inputs of one step of some lanes, which a graph copies in."""

    rows: Tensor  # (lanes, B), or (lanes, B, 4) with moves
    scales: Tensor  # (lanes, 2) Adam's step size and root
    noise: tuple[Tensor, ...]


class SubmodelTrainer:
    """The training of a round's clients."""

    def __init__(self, data: Batch, local: Adam, way: str = "auto") -> None:
        if way not in WAYS:
            raise unknown("way", way, WAYS)
        self.data, self.local = data, local
        self._black = None if local.augment is None else local.augment.colour(data.inputs)  # no graph can make it
        self.stacks = way == "stacked" or (way == "auto" and data.inputs.device.type == "cuda")
        self.narrow: dict[str, Narrow] = {}
        self._stacked: dict[tuple[str, int, bool], _Stack] = {}
        self._graphs: list[Captured[_Step, None]] = []
        self._captures = 0

    def add(self, narrow: Narrow) -> str:
        """Add a width, and return its key."""
        return self.narrow.setdefault(narrow.key, narrow).key

    def __call__(self, jobs: Sequence[SubmodelTurn]) -> list[SubmodelResult]:
        """Return the output of every client's turn, in order."""
        if not self.stacks:
            with tf32(True):
                return [self._alone(job) for job in jobs]
        outputs: dict[int, SubmodelResult] = {}
        lanes = sorted(range(len(jobs)), key=lambda i: (jobs[i].key, jobs[i].owned is None, *self._order(jobs[i])))
        for (key, free), group in groupby(lanes, key=lambda i: (jobs[i].key, jobs[i].owned is None)):
            indices = list(group)
            form = (key, len(indices), free)
            if form not in self._stacked:
                self._stacked[form] = _Stack(self, self.narrow[key], len(indices), free)
            with tf32(True):
                trained = self._stacked[form]([jobs[i] for i in indices])
            outputs |= dict(zip(indices, trained, strict=True))
        return [outputs[i] for i in range(len(jobs))]

    def _order(self, job: SubmodelTurn) -> tuple[int, int]:
        """Return the sort key of a lane: most full batches first, then the longest rest."""
        sizes = [len(rows) for rows in batches(job.epochs[0], self.local.batch_size)]
        return -sizes.count(self.local.batch_size), -sizes[-1]

    def _alone(self, job: SubmodelTurn) -> SubmodelResult:
        narrow, flat = self.narrow[job.key], job.start.detach().clone().requires_grad_()
        first, second, number = job.moments or AdamMoments(torch.zeros_like(flat), torch.zeros_like(flat), 0)
        first, second = first.clone(), second.clone()
        for rows in (rows for epoch in job.epochs for rows in batches(epoch, self.local.batch_size)):
            inputs, labels = self.batch(rows.to(self.data.inputs.device))
            inputs = arranged({"": inputs})[""]
            noise = narrow.noise(flat, self.data.inputs, len(rows), job.rng)
            loss = narrow.loss(flat, inputs, labels, job.owned, *noise)
            (grad,) = torch.autograd.grad(loss, flat)
            number += 1
            adam_(flat, grad, first, second, *scales(self.local, number), self.local)
        return SubmodelResult(flat.detach(), AdamMoments(first, second, number))

    def captured(self, step: Callable[[_Step], None]) -> Callable[[_Step], None]:
        """Return a step as CUDA graphs on a GPU, else the step itself.

        Graphs run one at a time and keep nothing in between, so all share their memory. There is one graph for each
        length of a batch, up to MOST_GRAPHS in all; further lengths run uncaptured.
        """
        device = self.data.inputs.device
        if device.type != "cuda":
            return step
        graph: Captured[_Step, None] = Captured(step, device)
        self._graphs.append(graph)
        graph.stream = self._graphs[0].stream  # graphs share memory only on one stream
        calls: Counter[int] = Counter()
        captured_lengths: set[int] = set()

        def run(inputs: _Step) -> None:
            length = inputs.rows.shape[1]
            calls[length] += 1
            if calls[length] == WARMUPS + 1 and self._captures < MOST_GRAPHS:
                captured_lengths.add(length)
                self._captures += 1
            if calls[length] > WARMUPS and length not in captured_lengths:
                return step(inputs)
            graph.pool = next((other.pool for other in self._graphs if other.pool is not None), None)
            graph(inputs)

        return run

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the examples of some rows, augmented where rows come with moves."""
        inputs, labels = self.data
        if self._black is None:
            return inputs[rows], labels[rows]
        rows, moves = rows[..., 0], rows[..., 1:]
        return moved(inputs, rows, moves, self._black), labels[rows]


class _Stack:
    """A fixed number of lanes of one width, at a fixed address."""

    def __init__(self, crowd: SubmodelTrainer, narrow: Narrow, lanes: int, free: bool) -> None:
        self.crowd, self.narrow, self.local, self.free = crowd, narrow, crowd.local, free
        self.device = crowd.data.inputs.device
        size, like = sum(value.numel() for value in narrow.net.parameters()), crowd.data.inputs
        self.flat, self.first, self.second = torch.zeros(3, lanes, size, dtype=like.dtype, device=self.device)
        self.owned: Tensor | None = None
        self._steps: dict[tuple[int, int], Callable[[_Step], None]] = {}

    def __call__(self, jobs: Sequence[SubmodelTurn]) -> list[SubmodelResult]:
        """Return the output of every lane's turn."""
        self._begin(jobs)
        numbers = [0 if job.moments is None else job.moments.steps for job in jobs]
        steps, sizes = [], []
        for epoch in zip(*(job.epochs for job in jobs), strict=True):
            lanes = [batches(rows.to(self.device), self.local.batch_size) for rows in epoch]
            for first, last, rows in _together(lanes, self.local.batch_size):
                numbers[first:last] = [number + 1 for number in numbers[first:last]]
                sizes += [scales(self.local, number) for number in numbers[first:last]]
                steps.append((first, last, rows))
        all_scales = torch.tensor(sizes, dtype=self.flat.dtype).to(self.device)  # one copy for all steps: no step waits
        by_step = all_scales.split_with_sizes([last - first for first, last, _ in steps])
        for (first, last, rows), size in zip(steps, by_step, strict=True):
            self._step(first, last, jobs[first:last], torch.stack(rows), size)
        copies = (value.detach().clone() for value in (self.flat, self.first, self.second))
        return [SubmodelResult(flat, AdamMoments(*rest)) for flat, *rest in zip(*copies, numbers, strict=True)]

    @torch.no_grad()
    def _begin(self, jobs: Sequence[SubmodelTurn]) -> None:
        for lane, job in enumerate(jobs):
            self.flat[lane].copy_(job.start)
            if job.moments is None:
                self.first[lane].zero_(), self.second[lane].zero_()
            else:
                self.first[lane].copy_(job.moments.first), self.second[lane].copy_(job.moments.second)
        owned = [job.owned for job in jobs if job.owned is not None]
        if owned and self.owned is None:
            self.owned = torch.stack(owned)
        elif owned and self.owned is not None:
            self.owned.copy_(torch.stack(owned))

    def _step(self, first: int, last: int, jobs: Sequence[SubmodelTurn], rows: Tensor, sizes: Tensor) -> None:
        drawn = [self.narrow.noise(self.flat[0], self.crowd.data.inputs, rows.shape[1], job.rng) for job in jobs]
        noise = tuple(torch.stack(draws) for draws in zip(*drawn, strict=True))
        step = _Step(rows, sizes, noise)
        if (first, last) not in self._steps:
            self._steps[first, last] = self.crowd.captured(partial(self._update, first, last))
        self._steps[first, last](step)

    def _update(self, first: int, last: int, step_inputs: _Step) -> None:
        flat = self.flat[first:last].detach().requires_grad_()
        owned = None if self.owned is None else self.owned[first:last]
        inputs, labels = self.crowd.batch(step_inputs.rows)
        losses = self.narrow.losses(flat, inputs, labels, owned, step_inputs.noise)
        (grad,) = torch.autograd.grad(losses.sum(), flat)  # the gradient of the sum is that of each lane
        step, root = step_inputs.scales[:, :1], step_inputs.scales[:, 1:]
        adam_(flat, grad, self.first[first:last], self.second[first:last], step, root, self.local)


def _together(lanes: Sequence[Sequence[Tensor]], size: int) -> Iterator[tuple[int, int, list[Tensor]]]:
    """Yield the steps of an epoch: (first lane, last lane, their rows); lanes come with most full batches first."""
    full = [sum(len(rows) == size for rows in lane) for lane in lanes]
    for step in range(max(full)):
        count = sum(number > step for number in full)
        yield 0, count, [lane[step] for lane in lanes[:count]]
    rest = [lane[number:] for lane, number in zip(lanes, full, strict=True)]
    first = 0
    for length, group in groupby(rest, key=lambda left: len(left[0]) if left else 0):
        last = first + len(list(group))
        if length:
            yield first, last, [left[0] for left in rest[first:last]]
        first = last


class Narrow:
    """The model of one width, as a function of its flat vector."""

    def __init__(self, net: nn.Module, rate: float, scaler: bool, device: torch.device) -> None:
        self.net, self.rate = net, rate
        self.key = f"{rate}, {scaler}, {fingerprint(*net.buffers())}: {net}"  # equal for equal functions
        self.shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
        self.others = {name: value.to(device) for name, value in net.named_buffers()}
        self.function = Functional(net, training=True, device=device)
        self.chain = Chain(net) if fits(net) else None
        self._asks: dict[int, list[Ask]] = {}
        self._quiet = False  # True once the network is known to draw nothing

    def loss(self, flat: Tensor, inputs: Tensor, labels: Tensor, owned: Tensor | None, *noise: Tensor) -> Tensor:
        """Return the cross-entropy; the logits of labels that a client does not own count as 0 (HeteroFL)."""
        logits = self.function(params_of(flat, self.shapes) | self.others, inputs, noise)
        return cross_entropy(logits if owned is None else logits * owned, labels)

    def losses(
        self, flat: Tensor, inputs: Tensor, labels: Tensor, owned: Tensor | None, noise: tuple[Tensor, ...]
    ) -> Tensor:
        """Return the loss of each of many clients, (lanes,); every argument has the lanes first."""
        if self.chain is None:
            inputs = inputs.contiguous()  # a single channels_last lane breaks BatchNorm under vmap
            lanes = (0, 0, 0, None if owned is None else 0, *(0 for _ in noise))
            return vmap(self.loss, in_dims=lanes)(flat, inputs, labels, owned, *noise)
        logits = self.chain(flat, inputs)
        logits = logits if owned is None else logits * owned[:, None]
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape).mean(1)

    def noise(self, flat: Tensor, data: Tensor, size: int, rng: Generator) -> tuple[Tensor, ...]:
        """Return the network's random draws for a batch of `size` rows of the data."""
        if self._quiet:
            return ()
        if size not in self._asks:
            asks = self.function.asks(params_of(flat, self.shapes) | self.others, data[[0] * size])
            self._asks[size], self._quiet = asks, not asks
        return tuple(ask.draw(rng) for ask in self._asks[size])


def picked(epochs: Sequence[Tensor], augment: CropAndFlip | None, rng: Generator) -> Sequence[Tensor]:
    """Return every epoch's rows (n,); where pictures are augmented, rows and moves (n, 4).

    So all random draws of a turn are made before it, whatever the way and the device.
    """
    if augment is None:
        return epochs
    return [torch.cat([rows[:, None], augment.draw(len(rows), rng)], 1) for rows in epochs]


def batches(rows: Tensor, size: int) -> list[Tensor]:
    """Return full batches, then the rest; a single row joins the batch before, as BatchNorm cannot normalise it.

    Example:
        >>> [len(batch) for batch in batches(torch.arange(7), 3)]
        [3, 4]
    """
    parts = list(torch.split(rows, size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def scales(local: Adam, number: int) -> tuple[float, float]:
    """Return Adam's step size, and the factor on the root of its second moment, in step `number` from 1."""
    one, two = local.betas
    return float(local.learning_rate / (1 - one**number)), float((1 - two**number) ** -0.5)


@torch.no_grad()
def adam_(
    flat: Tensor,
    grad: Tensor,
    first: Tensor,
    second: Tensor,
    step: Tensor | float,
    root: Tensor | float,
    local: Adam,
) -> None:
    """Make one step of torch.optim.Adam in place; with many lanes `step` and `root` have one value a lane."""
    one, two = local.betas
    first.lerp_(grad, 1 - one)
    second.mul_(two).addcmul_(grad, grad, value=1 - two)
    flat.sub_(first / second.sqrt().mul_(root).add_(local.eps) * step)
