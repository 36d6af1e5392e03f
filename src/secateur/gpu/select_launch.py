"""Launches of the selection kernels on a GPU, at little cost to the host; Triton's interpreter runs them on a CPU.

`select` finds the ranks by counting digits, in several passes over the entries. `select_narrowly` finds one rank of
very many entries among the few between two bounds that a sample gives. Comparing all entries with two bounds is one
pass at the speed of memory, and faster than counting digits. In lanes where the rank is not between the bounds, all
entries are searched, so that the result is exact.
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
TILE, PART, WARPS = 1024, 512, 4  # entries of a program at once, in a histogram and elsewhere; warps of a program
NEAR, ROOM = 2048, 16  # entries of a program at once where those near a rank are extracted; room for one in ROOM
PLAIN = 4  # calls before one is recorded: kernels are compiled by then, and a few calls are not worth a graph
SAMPLE = 2**16  # sampled entries of a lane
FROM = 2**20  # entries of a lane from which sampling is worth it
WIDTH = 6.0  # standard deviations of a sample's rank, to either side
_compiled: dict[tuple[Any, ...], list[Any]] = {}  # kernels in order; empty if only Triton can launch them


class Task(NamedTuple):
    """Selection task: all that is known before the values."""

    table: Tensor  # (programs, columns)
    ranks: Tensor  # (lanes or 1, segments, 1 or 2)
    lanes: int
    entries: int  # of a lane
    magnitudes: bool
    kept: bool  # the result is entries, not their bands
    wide: int  # entries that are read at once

    def scratch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return memory for the digits' counts, for the state of every rank, and for the ties of every program."""
        places, programs = self.lanes * self.ranks.shape[1], len(self.table)
        sizes = (places * (2 * BINS.value + 1), places * 6, 2 * self.lanes * programs)
        counted, found, equal = (self.table.new_empty(size, dtype=torch.int32) for size in sizes)
        return counted, found, equal

    @property
    def room(self) -> int:
        """The largest number of a lane's entries that may be near a rank."""
        return self.entries // ROOM // 4 * 4

    def result(self) -> Tensor:
        """Return memory for the result, (lanes, entries)."""
        return self.table.new_empty((self.lanes, self.entries), dtype=torch.float32 if self.kept else torch.int8)


Places = Callable[[int], tuple[Tensor, Tensor]]  # the table, and the shifts, of a lane of so many entries
Launches = Iterator[tuple[Any, tuple[Any, ...]]]  # kernels, and their arguments
Steps = Callable[[Task, Sequence[Any]], Launches]


def select(task: Task, values: Tensor, shifts: Tensor) -> Tensor:
    """Return the result (lanes, entries) for values (lanes, entries), in seven launches.

    `shifts` is the offset of every segment in `values` from its place in the row.
    """
    result = task.result()
    if result.numel():
        counted, found, equal = task.scratch()
        counted.zero_()
        with torch.cuda.device_of(values):
            _launch(_search, task, (values, task.table, shifts, task.ranks, counted, found, equal))
            _launch(_mark, task, (values, task.table, shifts, found, equal, result))
    return result


def worth(task: Task) -> bool:
    """Return True if `select_narrowly` takes the task: one rank, by value, of one long segment."""
    return task.ranks.shape[1:] == (1, 1) and not task.magnitudes and task.entries >= FROM


def select_narrowly(task: Task, values: Tensor, shifts: Tensor, places: Places) -> Tensor:
    """Return the result of `select`, by a sample; `places` gives the tables of shorter lanes."""
    sampled = values.index_select(1, _spots(task.entries, values.device))
    table, none = places(SAMPLE)
    few = task._replace(table=table, ranks=_around(task.ranks, task.entries), entries=SAMPLE)
    bounds = bounds_of(few, sampled, none)
    near, numbers = narrowed(task, values, shifts, bounds)
    above, first, between, second = numbers.long()
    at_first = task.ranks.view(-1) - above  # the rank among the entries at the first bound
    inside = at_first - first
    at_second = inside - between
    table, none = places(task.room)
    found = bounds_of(task._replace(table=table, ranks=inside.view(-1, 1, 1), entries=task.room), near, none)
    there = (inside > 0) & (inside <= between) & (between <= task.room)
    # Many entries may be equal, such as zeros: then the rank lies at a bound, not between the two.
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
    """Return the two ranks of a sample that bound a rank of all entries, (lanes or 1, 1, 2)."""
    middle = ranks.double() * (SAMPLE / entries)
    width = WIDTH * (middle * (1 - middle / SAMPLE)).clamp_min(0).sqrt() + WIDTH
    return torch.cat([(middle - width).floor(), (middle + width).ceil()], 2).long()


@cache  # kept for good: a captured graph reads it whenever it is replayed
def _spots(entries: int, device: torch.device) -> Tensor:
    """Return one random position in each of SAMPLE equal stretches, (SAMPLE,): even steps could meet a period."""
    chance = np.random.default_rng(0).random(SAMPLE)
    spots = ((np.arange(SAMPLE) + chance) * (entries / SAMPLE)).astype(np.int64).clip(max=entries - 1)
    with _DisableFuncTorch():
        return torch.tensor(spots, device=device)


def bounds_of(task: Task, values: Tensor, shifts: Tensor) -> Tensor:
    """Return the state of the ranks, six numbers a segment."""
    counted, found, _ = task.scratch()
    counted.zero_()
    with torch.cuda.device_of(values):
        _launch(_counts, task, (values, task.table, shifts, task.ranks, counted, found, found))
    return found


def narrowed(task: Task, values: Tensor, shifts: Tensor, bounds: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entries between a lane's two bounds, (lanes, room), in any order and padded with -inf.

    The second result, (4, lanes), counts the entries above the first bound, at it, between, and at the second. The
    counts include entries for which there was no room.
    """
    near = values.new_full((task.lanes, task.room), -torch.inf)
    numbers = task.table.new_zeros((4, task.lanes), dtype=torch.int32)
    with torch.cuda.device_of(values):
        _launch(_narrow, task, (values, task.table, shifts, bounds, numbers, near))
    return near, numbers


def select_near(task: Task, values: Tensor, shifts: Tensor, found: Tensor, wanted: Tensor) -> Tensor:
    """Return the result of `select` from the state of the ranks; search only the lanes of `wanted` (lanes,)."""
    result, (counted, _, equal) = task.result(), task.scratch()
    counted.zero_()
    with torch.cuda.device_of(values):
        _launch(_again, task, (values, task.table, shifts, task.ranks, counted, found, wanted, equal))
        _launch(_mark, task, (values, task.table, shifts, found, equal, result))
    return result


class Gathered:
    """Selection of one lane's tensors at any addresses; a CUDA graph finds their ranks, one launch in place of six.

    The scratch memory is shared between calls, so an instance is for one stream. The result is new memory.
    """

    def __init__(self, task: Task, starts: list[int]) -> None:
        self.task, self.starts = task, np.array(starts, np.int64)  # starts of the segments in the row
        self.lock, self.left = Lock(), PLAIN if task.table.is_cuda else 0
        self.graph: torch.cuda.CUDAGraph | None = None
        with torch.inference_mode(False):  # tensors of that mode may be changed only in that mode
            self.origin = task.table.new_empty(1, dtype=torch.float32)  # addresses are relative to it
            self.shifts = task.table.new_zeros(len(starts))
            self.scratch = task.scratch()

    def __call__(self, addresses: np.ndarray) -> Tensor:
        """Return the result (1, entries) for contiguous tensors at addresses that are multiples of `wide` entries."""
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
        except RuntimeError:  # such as other work that forbids a capture now: plain launches give the same
            return
        self.graph = graph

    def _search(self) -> None:
        self.scratch[0].zero_()
        _launch(_search, self.task, (self.origin, self.task.table, self.shifts, self.task.ranks, *self.scratch))


def _launch(steps: Steps, task: Task, memory: tuple[Tensor, ...]) -> None:
    """Launch kernels in order: by Triton, which looks up each by all its arguments, or as compiled before."""
    grid = (len(task.table), task.lanes, 1)
    addresses = [tensor.data_ptr() for tensor in memory]
    key = (steps, task.table.device, task.ranks.dtype, task.ranks.shape[2], *task[4:])
    alike = not any(address % 16 for address in addresses) and task.entries < 2**31  # else Triton compiles others
    if alike and _compiled.get(key):
        try:
            for ready, (_, arguments) in zip(_compiled[key], steps(task, addresses), strict=True):
                ready[grid](*arguments)
            return
        except TypeError:  # a Triton that takes other arguments
            _compiled[key] = []
    compiled = [kernel[grid](*arguments, num_warps=WARPS) for kernel, arguments in steps(task, memory)]
    if alike and None not in compiled:  # the interpreter gives None
        _compiled.setdefault(key, compiled)


def _search(task: Task, memory: Sequence[Any]) -> Launches:
    """Yield the kernels that find the ranks, then the ties."""
    *first, found, equal = memory
    yield from _counts(task, (*first, found, found))
    yield from _ties(task, (*first[:3], found, equal))


def _again(task: Task, memory: Sequence[Any]) -> Launches:
    """Yield the kernels that find the ranks of wanted lanes, then the ties of all lanes."""
    *first, found, wanted, equal = memory
    yield from _counts(task, (*first, found, wanted), again=True)
    yield from _ties(task, (*first[:3], found, equal))


def _counts(task: Task, memory: Sequence[Any], again: bool = False) -> Launches:
    """Yield the kernels that find the ranks; with `again` the last of `memory` says in which lanes."""
    lanes, segments, ranks = task.ranks.shape
    stride, shift = segments * ranks if lanes > 1 else 0, 32
    for step, bits in enumerate(BITS):
        shift -= bits
        # The later steps add entries one by one and read them one by one: else all would change threads first.
        how = (shift, 1 << bits, step == 0, again, ranks, task.magnitudes, task.wide if step < 2 else 1, TILE, PART)
        yield count, (*memory, task.entries, segments, stride, *how)


def _ties(task: Task, memory: Sequence[Any]) -> Launches:
    """Yield the kernel that counts the ties of every program."""
    segments = task.ranks.shape[1]
    yield ties, (*memory, task.entries, segments, task.magnitudes, task.wide, PART)


def _narrow(task: Task, memory: Sequence[Any]) -> Launches:
    """Yield the kernel that extracts the entries between two bounds."""
    yield narrow, (*memory, task.entries, task.room, task.wide, NEAR)


def _mark(task: Task, memory: Sequence[Any]) -> Launches:
    """Yield the kernel that writes the result for every entry."""
    yield mark, (*memory, task.entries, task.ranks.shape[1], task.kept, task.magnitudes, task.wide, PART)
