"""Means, differences and correlations of estimates, with their 95 % intervals.

`combine` carries intervals through any function of measures. `exposure_correlation` tests if clients with less data
are more exposed (mapp_fl Fig. 1a and Table 3).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from torch import Tensor

from secateur.metrics.membership import Estimate, Z

K = TypeVar("K", bound=Hashable)

Measure = dict[int, Estimate]  # by seed; empty where it was not measured

INFINITE = math.inf
SMALLEST = 400  # examples of a client that counts (mapp_fl 3.2)


class Correlation(NamedTuple):
    """Pearson's r of log10 dataset size and advantage over clients."""

    r: Estimate
    p: float  # p-value of no correlation
    clients: int
    excluded: int  # clients with too few examples


def combine(function: Callable[..., float], *measures: Measure) -> Estimate | None:
    """Return a function of measures with its 95 % interval; None where no seed has them all.

    Several seeds are compared seed by seed, and Student's interval is taken over them. With one seed each measure's
    interval is carried through, one at a time, and the changes are added as squares. For a difference this is
    Newcombe's interval. The measures are taken as independent, which is too wide where they share their examples.

    Example:
        >>> from operator import sub
        >>> combine(sub, {0: Estimate(0.8, 0.77, 0.83)}, {0: Estimate(0.7, 0.66, 0.74)}).low.__round__(3)
        0.05
    """
    seeds = sorted(set[int].intersection(*(set(measure) for measure in measures)))
    if not seeds:
        return None
    if len(seeds) > 1:
        return mean_of([function(*(measure[seed].value for measure in measures)) for seed in seeds])
    return _propagate(function, [measure[seeds[0]] for measure in measures])


def _propagate(function: Callable[..., float], measures: Sequence[Estimate]) -> Estimate:
    """Return a function of estimates; each interval is carried through alone, and the changes are added as squares."""
    values = [measure.value for measure in measures]
    centre = function(*values)
    down = up = 0.0
    for i, measure in enumerate(measures):
        moved = [function(*values[:i], end, *values[i + 1 :]) for end in (measure.low, measure.high)]
        down += max(0.0, centre - min(moved)) ** 2
        up += max(0.0, max(moved) - centre) ** 2
    note = "; ".join(sorted({measure.note for measure in measures if measure.note})) or None
    return Estimate(centre, centre - math.sqrt(down), centre + math.sqrt(up), note)


def mean(measure: Measure) -> Estimate | None:
    """Return the mean over seeds; None where nothing was measured."""
    return combine(lambda value: value, measure)


def pick_highest(measures: Mapping[K, Measure]) -> K | None:
    """Return the name of the measure with the highest mean, among those of most seeds; None without any.

    One that lacks a seed cannot stand for one that has it: the seeds are what intervals are taken over.

    Example:
        >>> pick_highest({"samia": {0: Estimate(0.6, 0, 1), 1: Estimate(0.6, 0, 1)}, "lira": {0: Estimate(0.7, 0, 1)}})
        'samia'
    """
    most = max(map(len, measures.values()), default=0)
    full = {name: seeds.values() for name, seeds in measures.items() if len(seeds) == most > 0}
    return max(full, key=lambda name: math.fsum(x.value for x in full[name]), default=None)


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean of independent values with Student's 95 % interval; a single value has an infinite one."""
    n = len(values)
    centre = math.fsum(values) / n
    if n == 1:
        return Estimate(centre, -INFINITE, INFINITE)
    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    radius = student_quantile(n - 1) * math.sqrt(variance / n)
    return Estimate(centre, centre - radius, centre + radius)


@functools.cache
def student_quantile(degrees: int) -> float:
    """Return the 97.5 % quantile of Student's distribution, as scipy.stats.t.ppf computes it."""
    from scipy.special import stdtrit  # a page has many means, and scipy.stats takes seconds to import

    return float(stdtrit(degrees, 0.975))


def average(values: Sequence[Estimate]) -> Estimate:
    """Return the mean of independent estimates; half widths are added as squares.

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
    """Return the mean of estimates by the same examples; half widths are averaged.

    Estimates on the same examples are not independent, so their mean is no more certain than each of them.

    Example:
        >>> average_on_same([Estimate(0.2, 0.1, 0.3), Estimate(0.4, 0.3, 0.5)]).low.__round__(3)
        0.2
    """
    columns = zip(*((estimate.value, estimate.low, estimate.high) for estimate in values), strict=True)
    centre, low, high = (math.fsum(column) / len(values) for column in columns)
    return Estimate(centre, low, high)


def difference(one: Estimate, other: Estimate) -> Estimate:
    """Return one estimate less another (Newcombe's interval for shares).

    Example:
        >>> [round(end, 3) for end in difference(Estimate(0.8, 0.77, 0.83), Estimate(0.7, 0.66, 0.74))[:3]]
        [0.1, 0.05, 0.15]
    """
    centre = one.value - other.value
    down = ((one.value - one.low) ** 2 + (other.high - other.value) ** 2) ** 0.5
    up = ((one.high - one.value) ** 2 + (other.value - other.low) ** 2) ** 0.5
    return Estimate(centre, centre - down, centre + up)


def paired_drop(before: Tensor, after: Tensor) -> Estimate:
    """Return the share of hits before less that after, over the same rows, with a paired 95 % interval.

    Half a row is added to each of the four counts (Agresti and Min 2005), so that the interval is never empty.

    Example:
        >>> import torch
        >>> paired_drop(torch.tensor([True] * 8 + [False] * 2), torch.tensor([True] * 6 + [False] * 4)).value
        0.2
    """
    n, lost, won = before.numel(), int((before & ~after).sum()), int((after & ~before).sum())
    size, gap, moved = n + 2, (lost - won) / (n + 2), lost + won + 1
    radius = Z * math.sqrt(moved - (lost - won) ** 2 / size) / size
    return Estimate((lost - won) / n, gap - radius, gap + radius)


def p_above(estimate: Estimate, bound: float, freedom: int = 0) -> float:
    """Return the one-sided p-value of `value <= bound`, by the lower half of its 95 % interval.

    The interval is a normal one, or with degrees of freedom Student's.

    Example:
        >>> round(p_above(Estimate(0.6, 0.5, 0.7), 0.5), 3), p_above(Estimate(0.6, 0.6, 0.6), 0.5)
        (0.025, 0.0)
    """
    radius = estimate.value - estimate.low
    if radius <= 0:
        return 0.0 if estimate.value > bound else 1.0
    if freedom:
        from scipy.stats import t

        return float(t.sf((estimate.value - bound) / radius * t.ppf(0.975, freedom), freedom))
    return 0.5 * math.erfc((estimate.value - bound) / radius * Z / math.sqrt(2))


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number (Holm 1979): a level for each is then a level for all together.

    Example:
        >>> [round(p, 3) for p in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = worst
    return adjusted


def correlation(pairs: Sequence[tuple[float, float]], spent: int = 0) -> Estimate | None:
    """Return Pearson's r with Fisher's 95 % interval; None where one side does not vary.

    The interval needs four pairs. `spent` are degrees of freedom that were used elsewhere, such as the means of groups.
    """
    n = len(pairs)
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return None
    dx, dy = ([value - math.fsum(side) / n for value in side] for side in (xs, ys))
    scale = math.sqrt(math.fsum(x * x for x in dx) * math.fsum(y * y for y in dy))
    r = max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(dx, dy, strict=True)) / scale))
    if n - spent < 4:
        return Estimate(r, -1.0, 1.0)
    z, radius = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r))), Z / math.sqrt(n - spent - 3)
    return Estimate(r, math.tanh(z - radius), math.tanh(z + radius))


def mean_correlation(values: Sequence[float]) -> Estimate | None:
    """Return the mean of the seeds' correlations, with Student's 95 % interval inside [-1, 1]; None without any.

    Example:
        >>> r = mean_correlation([0.2, 0.4])
        >>> round(r.value, 3), round(r.low, 3), round(r.high, 3)
        (0.3, -0.971, 1.0)
    """
    if not values:
        return None
    mean = mean_of(values)
    return Estimate(mean.value, max(-1.0, mean.low), min(1.0, mean.high))


def exposure_correlation(clients: Sequence[tuple[int, float]], smallest: int = SMALLEST) -> Correlation | None:
    """Return Pearson's r of log10 dataset size and advantage, over clients of at least `smallest` examples.

    This is mapp_fl Table 3. None where fewer than four clients are left or one side does not vary: then there is no
    interval.
    """
    from scipy.stats import pearsonr

    kept = [(math.log10(size), advantage) for size, advantage in clients if size >= smallest]
    r = correlation(kept) if len(kept) >= 4 else None
    if r is None:
        return None
    return Correlation(r, float(pearsonr(*zip(*kept, strict=True)).pvalue), len(kept), len(clients) - len(kept))
