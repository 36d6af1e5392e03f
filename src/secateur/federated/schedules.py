"""Learning rates by epoch: the paper's, those of its authors' code, and any other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from secateur.errors import WrongInput, unknown


@dataclass(frozen=True)
class Schedule:
    """So many epochs, and the learning rate from an epoch on; epochs count from 1."""

    epochs: int
    rates: tuple[tuple[int, float], ...]  # (from this epoch on, learning rate), the first from epoch 1

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise WrongInput("epochs", f"{self.epochs} is not allowed; give a whole number from 1")
        starts = [start for start, _ in self.rates]
        if not starts or starts[0] != 1 or any(b <= a for a, b in pairwise(starts)):
            found = ", ".join(map(str, starts)) or "nothing"
            raise WrongInput("schedule", f"its rates begin at {found}; give rising epochs, the first of them 1")
        for _, rate in self.rates:
            if not (math.isfinite(rate) and rate > 0):
                raise WrongInput("schedule", f"a learning rate of {rate} is not allowed; give numbers above 0")

    def rate(self, epoch: int) -> float:
        """The learning rate of an epoch.

        Example:
            >>> [SCHEDULES["code"].rate(epoch) for epoch in (1, 50, 51, 70, 71, 150)]
            [0.1, 0.1, 0.01, 0.01, 0.005, 0.005]
        """
        return [rate for start, rate in self.rates if start <= epoch][-1]


SCHEDULES = {
    "paper": Schedule(100, ((1, 0.01), (71, 0.005))),  # dgp Appendix: .01 up to epoch 70, .005 after it
    "paper-lenet": Schedule(100, ((1, 0.1), (51, 0.01), (71, 0.005))),
    "code": Schedule(150, ((1, 0.1), (51, 0.01), (71, 0.005))),
}


def schedule_of(given: str | Schedule | Sequence[float]) -> Schedule:
    """A schedule by its name, as it is, or as a list with one learning rate an epoch.

    Example:
        >>> schedule_of([0.1, 0.1, 0.05])
        Schedule(epochs=3, rates=((1, 0.1), (3, 0.05)))
    """
    if isinstance(given, Schedule):
        return given
    if isinstance(given, str):
        if given not in SCHEDULES:
            raise unknown("schedule", given, SCHEDULES)
        return SCHEDULES[given]
    changes = [(i, rate) for i, rate in enumerate(given, start=1) if i == 1 or rate != given[i - 2]]
    return Schedule(len(given), tuple(changes))
