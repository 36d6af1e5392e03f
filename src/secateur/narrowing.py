"""One rank of very many entries, looked for among the few that a sample says it is among.

To compare all entries with two bounds takes a pass at the speed of memory; to count their digits takes several that are
slower. In lanes where the rank is not among those few after all, it is looked for among all, so that it is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch._C import _DisableFuncTorch

from secateur.launching import Task, bounds_of, narrowed, select_near

SAMPLE = 2**16  # entries of a lane
FROM = 2**20  # entries of a lane that are worth it
WIDTH = 6.0  # standard deviations of a sample's rank, to either side

Places = Callable[[int], tuple[Tensor, Tensor]]  # the table, and the shifts, of a lane of so many entries


def worth(task: Task) -> bool:
    """Whether it is one rank, by value, of one long segment."""
    return task.ranks.shape[1:] == (1, 1) and not task.magnitudes and task.entries >= FROM


def select_narrowly(task: Task, values: Tensor, shifts: Tensor, places: Places) -> Tensor:
    """What `launching.select` does."""
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
