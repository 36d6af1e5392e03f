"""Whether clients with less data are exposed more (mapp_fl Fig. 1a and Table 3)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from secateur.metrics.membership import Estimate

SMALLEST = 400  # examples of a client that counts (mapp_fl 3.2)


class Correlation(NamedTuple):
    """Pearson's r of log10 dataset size and advantage over clients."""

    r: Estimate
    p: float  # of no correlation
    clients: int
    excluded: int  # too small


def correlation(clients: Sequence[tuple[int, float]], smallest: int = SMALLEST) -> Correlation | None:
    """Pearson's r of (dataset size, advantage) of clients with at least `smallest` examples (mapp_fl Table 3).

    None where fewer than four are left, or where one side does not vary: then there is no interval.
    """
    from scipy.stats import pearsonr

    kept = [(math.log10(size), advantage) for size, advantage in clients if size >= smallest]
    sizes, advantages = [size for size, _ in kept], [advantage for _, advantage in kept]
    if len(kept) < 4 or len(set(sizes)) == 1 or len(set(advantages)) == 1:
        return None
    found = pearsonr(sizes, advantages)
    low, high = found.confidence_interval(0.95)
    estimate = Estimate(float(found.statistic), float(low), float(high))
    return Correlation(estimate, float(found.pvalue), len(kept), len(clients) - len(kept))
