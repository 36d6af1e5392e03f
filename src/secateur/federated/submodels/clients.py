"""Clients of sub-models: training of several widths and sizes, one by one or stacked by width, and uploads.

| execution  | how                                                                                                  |
|------------|------------------------------------------------------------------------------------------------------|
| sequential | one client after the other, channels_last; the default on a CPU                                       |
| stacked    | clients of one width step together; on a GPU each form of a step is a CUDA graph; the default there     |

Stacked clients have lanes in the order of their sizes. A step of full batches takes the first k lanes: those that still
have one. Then the last, partial batches make a step for each length. So nothing is ever padded. In float64 both ways
are equal to 1e-9 over an epoch. Biases before a BatchNorm are an exception: their gradient is round-off.

A model is one flat vector here, and Adam runs over this vector.

A client uploads the trained model, a rewritten update, or the model without withheld cells. Its state (a residual,
withheld weights) is kept in the server's coordinates. The client's channels may change in every round, and a cell that
returns gets its kept value again. A withheld cell does not count in the server's average.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.defenses.uploads import draw_noise
from secateur.defenses.withholding import divide, empty_state, reload
from secateur.federated.augment import CropAndFlip, move_pictures
from secateur.federated.client_training import stacks
from secateur.federated.spec import Adam, SubmodelSpec
from secateur.federated.submodels.networks import Narrow, batches
from secateur.federated.submodels.structure import SubmodelIndex, flat_of, params_of
from secateur.gpu.graphs import WARMUPS, Captured
from secateur.gpu.precision import tf32
from secateur.inference import to_channels_last
from secateur.interfaces import Batch, Params, UploadContext

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
    epochs: Sequence[Tensor]  # the rows in the order of each epoch, from `pick_rows`
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

    def __init__(self, data: Batch, local: Adam, execution: str = "auto") -> None:
        self.data, self.local = data, local
        self._black = None if local.augment is None else local.augment.colour(data.inputs)  # no graph can make it
        self.stacks = stacks(execution, data.inputs.device)
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
                return [self._train_alone(job) for job in jobs]
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

    def _train_alone(self, job: SubmodelTurn) -> SubmodelResult:
        narrow, flat = self.narrow[job.key], job.start.detach().clone().requires_grad_()
        first, second, number = job.moments or AdamMoments(torch.zeros_like(flat), torch.zeros_like(flat), 0)
        first, second = first.clone(), second.clone()
        for rows in (rows for epoch in job.epochs for rows in batches(epoch, self.local.batch_size)):
            inputs, labels = self.batch(rows.to(self.data.inputs.device))
            inputs = to_channels_last({"": inputs})[""]
            noise = narrow.noise(flat, self.data.inputs, len(rows), job.rng)
            loss = narrow.loss(flat, inputs, labels, job.owned, *noise)
            (grad,) = torch.autograd.grad(loss, flat)
            number += 1
            adam_(flat, grad, first, second, *scales(self.local, number), self.local)
        return SubmodelResult(flat.detach(), AdamMoments(first, second, number))

    def capture_step(self, step: Callable[[_Step], None]) -> Callable[[_Step], None]:
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
        return move_pictures(inputs, rows, moves, self._black), labels[rows]


class _Stack:
    """A fixed number of lanes of one width, at a fixed address."""

    def __init__(self, trainer: SubmodelTrainer, narrow: Narrow, lanes: int, free: bool) -> None:
        self.trainer, self.narrow, self.local, self.free = trainer, narrow, trainer.local, free
        self.device = trainer.data.inputs.device
        size, like = sum(value.numel() for value in narrow.net.parameters()), trainer.data.inputs
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
            for first, last, rows in _list_steps(lanes, self.local.batch_size):
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
        drawn = [self.narrow.noise(self.flat[0], self.trainer.data.inputs, rows.shape[1], job.rng) for job in jobs]
        noise = tuple(torch.stack(draws) for draws in zip(*drawn, strict=True))
        step = _Step(rows, sizes, noise)
        if (first, last) not in self._steps:
            self._steps[first, last] = self.trainer.capture_step(partial(self._update, first, last))
        self._steps[first, last](step)

    def _update(self, first: int, last: int, step_inputs: _Step) -> None:
        flat = self.flat[first:last].detach().requires_grad_()
        owned = None if self.owned is None else self.owned[first:last]
        inputs, labels = self.trainer.batch(step_inputs.rows)
        losses = self.narrow.losses(flat, inputs, labels, owned, step_inputs.noise)
        (grad,) = torch.autograd.grad(losses.sum(), flat)  # the gradient of the sum is that of each lane
        step, root = step_inputs.scales[:, :1], step_inputs.scales[:, 1:]
        adam_(flat, grad, self.first[first:last], self.second[first:last], step, root, self.local)


def _list_steps(lanes: Sequence[Sequence[Tensor]], size: int) -> Iterator[tuple[int, int, list[Tensor]]]:
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


def pick_rows(epochs: Sequence[Tensor], augment: CropAndFlip | None, rng: Generator) -> Sequence[Tensor]:
    """Return every epoch's rows (n,); where pictures are augmented, rows and moves (n, 4).

    So all random draws of a turn are made before it, whatever the way and the device.
    """
    if augment is None:
        return epochs
    return [torch.cat([rows[:, None], augment.draw(len(rows), rng)], 1) for rows in epochs]


def scales(local: Adam, number: int) -> tuple[float, float]:
    """Return Adam's step size, and the factor on the root of its second moment, in step `number` from 1."""
    one, two = local.betas
    return float(local.learning_rate / (1 - one**number)), float((1 - two**number) ** -0.5)


@torch.no_grad()
def adam_(
    flat: Tensor, grad: Tensor, first: Tensor, second: Tensor, step: Tensor | float, root: Tensor | float, local: Adam
) -> None:
    """Make one step of torch.optim.Adam in place; with many lanes `step` and `root` have one value a lane."""
    one, two = local.betas
    first.lerp_(grad, 1 - one)
    second.mul_(two).addcmul_(grad, grad, value=1 - two)
    flat.sub_(first / second.sqrt().mul_(root).add_(local.eps) * step)


class SubmodelSent(NamedTuple):
    """The result of a client's turn: the sent parts, and the state that stays with the client."""

    flat: Tensor  # the model as the server averages it
    covered: Tensor | None  # (P_c,) 1 at sent cells, otherwise 0; None: all were sent
    message: Params | None  # the transmitted values, if they are not the model
    state: Params  # in the server's coordinates


class SubmodelUpload:
    """The step of a federation's clients from a trained model to a sent update."""

    def __init__(self, terms: SubmodelSpec, shapes: dict[str, tuple[int, ...]]) -> None:
        self.terms, self.shapes = terms, shapes
        rule = terms.withholding
        self.keeps = terms.upload is not None or (rule is not None and rule.pseudo)

    def init(self, whole: Tensor) -> Params:
        """Return a client's state before its first round; empty if the client keeps nothing."""
        if not self.keeps:
            return {}
        params = params_of(whole, self.shapes)
        return empty_state(params) if self.terms.upload is None else self.terms.upload.init(params)

    @torch.no_grad()
    def start(self, received: Tensor, state: Params, cut: SubmodelIndex) -> Tensor:
        """Return the received model with the values withheld last time restored."""
        if self.terms.withholding is None or not self.keeps:
            return received
        return flat_of(reload(params_of(received, cut.shapes), self._part(state, cut), {}))

    @torch.no_grad()
    def __call__(
        self, net: nn.Module, cut: SubmodelIndex, received: Tensor, trained: Tensor, state: Params, rng: Generator
    ) -> SubmodelSent:
        """Return the upload of a client that trained `received` into `trained`."""
        terms = self.terms
        if terms.upload is None and terms.withholding is None:
            return SubmodelSent(trained, None, None, {})
        rate, before = terms.local.learning_rate, params_of(received, cut.shapes)
        update = params_of((received - trained) / rate, cut.shapes)
        if terms.upload is not None:
            no_examples = Batch(received[:0], received[:0])  # these uploads use no examples
            turning = UploadContext(net, before, no_examples, 0, rng)
            noise = tree.to(draw_noise(terms.upload, before, rng), received.device)
            draws = {"noise": noise} if noise else {}
            message, after = terms.upload(update, self._part(state, cut), turning, **draws)
            return SubmodelSent(received - rate * flat_of(message), None, message, self._expand(state, after, cut))
        assert terms.withholding is not None
        values = params_of(trained, cut.shapes)
        withheld = terms.withholding.withheld(values, update, {}, rng)
        message, after = divide(values, withheld, self.keeps)
        covered = flat_of({n: ~withheld[n] if n in withheld else torch.ones_like(v) for n, v in message.items()})
        return SubmodelSent(flat_of(message), covered.to(trained.dtype), message, self._expand(state, after, cut))

    def _part(self, state: Params, cut: SubmodelIndex) -> Params:
        return {key: cut.take(self._name(key), value) for key, value in state.items()}

    def _expand(self, state: Params, part: Params, cut: SubmodelIndex) -> Params:
        return {key: cut.put(self._name(key), value, part[key]) for key, value in state.items()}

    def _name(self, key: str) -> str:
        """Return the parameter of a state's key: `residual.0.weight` belongs to `0.weight`."""
        return max((name for name in self.shapes if key == name or key.endswith(f".{name}")), key=len)
