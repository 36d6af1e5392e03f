"""Means and differences of estimates, with their intervals carried through."""

from __future__ import annotations

import math
from collections.abc import Sequence

from secateur.metrics.membership import Estimate


def average(values: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates; half widths are added as squares.

    Example:
        >>> average([Estimate(0.2, 0.1, 0.3), Estimate(0.4, 0.3, 0.5)]).low.__round__(3)
        0.229
    """
    n = len(values)
    centre = math.fsum(value.value for value in values) / n
    down = math.sqrt(math.fsum((value.value - value.low) ** 2 for value in values)) / n
    up = math.sqrt(math.fsum((value.high - value.value) ** 2 for value in values)) / n
    return Estimate(centre, centre - down, centre + up)


def average_on_same(values: Sequence[Estimate]) -> Estimate:
    """The mean of estimates by the same examples; half widths are averaged: asking the same again tells nothing new.

    Example:
        >>> average_on_same([Estimate(0.2, 0.1, 0.3), Estimate(0.4, 0.3, 0.5)]).low.__round__(3)
        0.2
    """
    triples = zip(*((each.value, each.low, each.high) for each in values), strict=True)
    centre, low, high = (math.fsum(each) / len(values) for each in triples)
    return Estimate(centre, low, high)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """One less another (Newcombe's interval for shares).

    Example:
        >>> [round(end, 3) for end in difference(Estimate(0.8, 0.77, 0.83), Estimate(0.7, 0.66, 0.74))[:3]]
        [0.1, 0.05, 0.15]
    """
    centre = one.value - other.value
    down = math.hypot(one.value - one.low, other.high - other.value)
    up = math.hypot(one.high - one.value, other.value - other.low)
    return Estimate(centre, centre - down, centre + up)
