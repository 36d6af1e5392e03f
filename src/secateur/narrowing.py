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
    near, numbers = narrowed(task, values, shifts, bounds_of(few, sampled, none))
    above, inside = numbers.long()
    left, (table, none) = task.ranks.view(-1) - above, places(task.room)
    rest = task._replace(table=table, ranks=left.view(-1, 1, 1), entries=task.room)
    missed = (left < 1) | (left > inside) | (inside > task.room)
    return select_near(task, values, shifts, bounds_of(rest, near, none), missed.int())


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
