"""How the kernels of select.py are launched, for little of the host's time: it has less of it than a GPU.

Written for tensors on a GPU; Triton's interpreter does the same on a CPU.

One rank of very many entries is looked for among the few that a sample says it is among. To compare all entries with
two bounds takes a pass at the speed of memory; to count their digits takes several that are slower. In lanes where the
rank is not among those few after all, it is looked for among all, so that it is exact.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch

from secateur.gpu.graphs import recorded
from secateur.gpu.select_kernels import BINS, count, mark, narrow, ties

BITS = (7, 7, 9, 9)  # of the digits
TILE, PART, WARPS = 1024, 512, 4  # entries that a program has at once in a histogram and elsewhere
NEAR, ROOM = 2048, 16  # likewise where those near a rank are taken out: room is for one in so many
PLAIN = 4  # calls before one is recorded: kernels are compiled by then, and a few calls are not worth it
_compiled: dict[tuple[Any, ...], list[Any]] = {}  # kernels in order; none where only Triton can launch them

SAMPLE = 2**16  # entries of a lane
FROM = 2**20  # entries of a lane that are worth it
WIDTH = 6.0  # standard deviations of a sample's rank, to either side

Places = Callable[[int], tuple[Tensor, Tensor]]  # the table, and the shifts, of a lane of so many entries


class Task(NamedTuple):
    """What is known before any value is."""

    table: Tensor  # (programs, columns)
    ranks: Tensor  # (lanes or 1, segments, 1 or 2)
    lanes: int
    entries: int  # of a lane
    magnitudes: bool
    kept: bool  # entries are wanted, not their bands
    wide: int  # entries that are read at once

    def scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for the digits' counts, for what is found of every rank, and for the ties of every program."""
        places, programs = self.lanes * self.ranks.shape[1], len(self.table)
        sizes = (places * (2 * BINS.value + 1), places * 6, 2 * self.lanes * programs)
        counted, found, equal = (self.table.new_empty(size, dtype=torch.int32) for size in sizes)
        return counted, found, equal

    @property
    def room(self) -> int:
        """How many entries of a lane may be near a rank."""
        return self.entries // ROOM // 4 * 4

    def result(self) -> Tensor:
        """(lanes, entries), still empty."""
        return self.table.new_empty((self.lanes, self.entries), dtype=torch.float32 if self.kept else torch.int8)


Launches = Iterator[tuple[Any, tuple[Any, ...]]]  # kernels, and their arguments
Steps = Callable[[Task, Sequence[Any]], Launches]


def select(task: Task, values: Tensor, shifts: Tensor) -> Tensor:
    """(lanes, entries) of (lanes, entries), in seven launches; `shifts`: what a segment lies behind its place there."""
    result = task.result()
    if result.numel():
        counted, found, equal = task.scratch()
        counted.zero_()
        with torch.cuda.device_of(values):
            _launch(_search, task, (values, task.table, shifts, task.ranks, counted, found, equal))
            _launch(_mark, task, (values, task.table, shifts, found, equal, result))
    return result


def bounds_of(task: Task, values: Tensor, shifts: Tensor) -> Tensor:
    """What is found of the ranks, six numbers a segment."""
    counted, found, _ = task.scratch()
    counted.zero_()
    with torch.cuda.device_of(values):
        _launch(_counts, task, (values, task.table, shifts, task.ranks, counted, found, found))
    return found


def narrowed(task: Task, values: Tensor, shifts: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """(lanes, room) the entries between a lane's two bounds, in any order, and -inf behind them.

    And (4, lanes) how many lie above the first, at it, between, and at the second; there may not be room for them.
    """
    near = values.new_full((task.lanes, task.room), -torch.inf)
    numbers = task.table.new_zeros((4, task.lanes), dtype=torch.int32)
    with torch.cuda.device_of(values):
        _launch(_narrow, task, (values, task.table, shifts, bounds, numbers, near))
    return near, numbers


def select_near(task: Task, values: Tensor, shifts: Tensor, found: Tensor, wanted: Tensor) -> Tensor:
    """What `select` does where the ranks are found, but for the lanes (lanes,) where it is still wanted."""
    result, (counted, _, equal) = task.result(), task.scratch()
    counted.zero_()
    with torch.cuda.device_of(values):
        _launch(_again, task, (values, task.table, shifts, task.ranks, counted, found, wanted, equal))
        _launch(_mark, task, (values, task.table, shifts, found, equal, result))
    return result


class Gathered:
    """The same of one lane's tensors wherever they lie: a CUDA graph finds their ranks, one launch in place of six.

    It works in memory of its own, so it is for one stream. What it returns is new.
    """

    def __init__(self, task: Task, starts: list[int]) -> None:
        self.task, self.starts = task, np.array(starts, np.int64)  # where segments begin in the row
        self.lock, self.left = Lock(), PLAIN if task.table.is_cuda else 0
        self.graph: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(False):  # what is made in that mode may be changed in it alone
            self.origin = task.table.new_empty(1, dtype=torch.float32)  # what addresses are told from
            self.shifts = task.table.new_zeros(len(starts))
            self.scratch = task.scratch()

    def __call__(self, addresses: np.ndarray) -> Tensor:
        """(1, entries) of contiguous tensors at addresses that are multiples of `wide` entries."""
        task, (_, found, equal) = self.task, self.scratch
        result = task.result()
        if not result.numel():
            return result
        shifts = torch.from_numpy((addresses - self.origin.data_ptr()) // 4 - self.starts)
        with self.lock, torch.cuda.device_of(result):
            self.shifts.copy_(shifts, non_blocking=True)
            self._find()
            _launch(_mark, task, (self.origin, task.table, self.shifts, found, equal, result))
        return result

    def _find(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        self._search()
        self.left -= 1
        if self.left == 0:
            self._record()

    def _record(self) -> None:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.shifts.device)
        try:
            with recorded(graph, stream, mode="thread_local"):
                self._search()
        except RuntimeError:  # such as other work that forbids it just now: launches do as well
            return
        self.graph = graph

    def _search(self) -> None:
        self.scratch[0].zero_()
        _launch(_search, self.task, (self.origin, self.task.table, self.shifts, self.task.ranks, *self.scratch))


def _launch(steps: Steps, task: Task, memory: tuple[Tensor, ...]) -> None:
    """Kernels in order: by Triton, which looks each up by all its arguments, or as they were found before."""
    grid = (len(task.table), task.lanes, 1)
    addresses = [tensor.data_ptr() for tensor in memory]
    key = (steps, task.table.device, task.ranks.dtype, task.ranks.shape[2], *task[4:])
    alike = not any(address % 16 for address in addresses) and task.entries < 2**31  # else they are compiled otherwise
    if alike and _compiled.get(key):
        try:
            for ready, (_, given) in zip(_compiled[key], steps(task, addresses), strict=True):
                ready[grid](*given)
            return
        except TypeError:  # a Triton that takes other arguments
            _compiled[key] = []
    made = [kernel[grid](*given, num_warps=WARPS) for kernel, given in steps(task, memory)]
    if alike and None not in made:  # as the interpreter's are
        _compiled.setdefault(key, made)


def _counts(task: Task, memory: Sequence[Any], again: bool = False) -> Launches:
    """What finds the ranks, with all arguments; the last of the memory says in which lanes, where it is done again."""
    shared, segments, each = task.ranks.shape
    stride, shift = segments * each if shared > 1 else 0, 32
    for step, bits in enumerate(BITS):
        shift -= bits
        # Entries that are added one by one lie in threads one by one: else all would change places first.
        how = (shift, 1 << bits, step == 0, again, each, task.magnitudes, task.wide if step < 2 else 1, TILE, PART)
        yield count, (*memory, task.entries, segments, stride, *how)


def _ties(task: Task, memory: Sequence[Any]) -> Launches:
    segments = task.ranks.shape[1]
    yield ties, (*memory, task.entries, segments, task.magnitudes, task.wide, PART)


def _search(task: Task, memory: Sequence[Any]) -> Launches:
    """The ranks, and where there are ties."""
    *first, found, equal = memory
    yield from _counts(task, (*first, found, found))
    yield from _ties(task, (*first[:3], found, equal))


def _again(task: Task, memory: Sequence[Any]) -> Launches:
    """The same of lanes where it is wanted; the ties of all."""
    *first, found, wanted, equal = memory
    yield from _counts(task, (*first, found, wanted), again=True)
    yield from _ties(task, (*first[:3], found, equal))


def _narrow(task: Task, memory: Sequence[Any]) -> Launches:
    """What takes out the entries between two bounds."""
    yield narrow, (*memory, task.entries, task.room, task.wide, NEAR)


def _mark(task: Task, memory: Sequence[Any]) -> Launches:
    """What tells every entry."""
    yield mark, (*memory, task.entries, task.ranks.shape[1], task.kept, task.magnitudes, task.wide, PART)


def worth(task: Task) -> bool:
    """Whether it is one rank, by value, of one long segment."""
    return task.ranks.shape[1:] == (1, 1) and not task.magnitudes and task.entries >= FROM


def select_narrowly(task: Task, values: Tensor, shifts: Tensor, places: Places) -> Tensor:
    """What ``select`` does."""
    sampled = values.index_select(1, _spots(task.entries, values.device))
    table, none = places(SAMPLE)
    few = task._replace(table=table, ranks=_around(task.ranks, task.entries), entries=SAMPLE)
    bounds = bounds_of(few, sampled, none)
    near, numbers = narrowed(task, values, shifts, bounds)
    above, first, between, second = numbers.long()
    at_first = task.ranks.view(-1) - above  # which of those there it would be
    inside = at_first - first
    at_second = inside - between
    table, none = places(task.room)
    found = bounds_of(task._replace(table=table, ranks=inside.view(-1, 1, 1), entries=task.room), near, none)
    there = (inside > 0) & (inside <= between) & (between <= task.room)
    # Many entries may be equal, such as zeros: a bound that a rank lies at is none that others are near.
    for bound, left, alike in (
        (bounds.view(-1, 6)[:, 0], at_first, first),
        (bounds.view(-1, 6)[:, 3], at_second, second),
    ):
        here = (left > 0) & (left <= alike)
        state = torch.stack([bound, left.int(), alike.int()], 1)
        found.view(-1, 6)[:, :3] = torch.where(here[:, None], state, found.view(-1, 6)[:, :3])
        there = there | here
    return select_near(task, values, shifts, found, (~there).int())


def _around(ranks: Tensor, entries: int) -> Tensor:
    """(lanes or 1, 1, 2) the ranks of a sample that a rank of all lies between."""
    middle = ranks.double() * (SAMPLE / entries)
    width = WIDTH * (middle * (1 - middle / SAMPLE)).clamp_min(0).sqrt() + WIDTH
    return torch.cat([(middle - width).floor(), (middle + width).ceil()], 2).long()


@cache  # kept for good: a captured graph reads it whenever it is replayed
def _spots(entries: int, device: torch.device) -> Tensor:
    """(SAMPLE,) one place in each of as many equal stretches: in step, they might all be of one kind."""
    chance = np.random.default_rng(0).random(SAMPLE)
    spots = ((np.arange(SAMPLE) + chance) * (entries / SAMPLE)).astype(np.int64).clip(max=entries - 1)
    with _DisableFuncTorch():
        return torch.tensor(spots, device=device)
