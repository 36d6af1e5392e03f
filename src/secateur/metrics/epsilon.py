"""Measured epsilon: lower bounds on the privacy loss of a training, shown by an attack.

An (epsilon, delta)-private training has TPR <= e^epsilon FPR + delta at every threshold of every attack, and the same
for non-members. So an attack that does better refutes a claimed epsilon.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

LEVEL = 0.05  # a bound is wrong at most this often
BLOCK = 256  # thresholds that are compared by one bound on all of them


class Counts(NamedTuple):
    """Numbers of the half that tested the threshold: the accused side, and the others."""

    hits: int  # of the accused side beyond the threshold
    inside: int
    alarms: int  # of the others beyond it
    outside: int


class EpsilonBound(NamedTuple):
    """Lower bound on epsilon at 95 % confidence, and the rates that it comes from."""

    value: float  # 0: the attack shows nothing
    tpr: float  # share of members (or of non-members, whichever are accused) beyond the threshold
    fpr: float
    rows: int  # rows of the half that tested the threshold
    counts: Counts  # from which the bound at any other level and delta follows

    def refutes(self, claimed: float) -> bool:
        """Return True if a training with the claimed epsilon would not leak as much."""
        return self.value > claimed


def bound_of(counts: Counts, delta: float = 0.0, level: float = LEVEL) -> float:
    """Return the least epsilon that allows such counts: log((TPR - delta) / FPR) at the rates' ends, at least 0.

    Example:
        >>> round(bound_of(Counts(60, 100, 10, 100)), 3), round(bound_of(Counts(60, 100, 10, 100), delta=0.1), 3)
        (1.037, 0.813)
    """
    hits, alarms = np.array([counts.hits]), np.array([counts.alarms])
    return float(_bounds(hits, counts.inside, alarms, counts.outside, delta, level)[0])


def epsilon_bound(
    scores: Tensor, is_member: Tensor, rng: Generator, delta: float = 0.0, level: float = LEVEL
) -> EpsilonBound:
    """Return a lower bound on epsilon from an attack's scores (N,), high = member.

    One random half of the rows chooses the threshold and the accused side, the other half tests it. Each of the two
    rates has a one-sided Clopper-Pearson bound at half the level.
    """
    order = torch.randperm(len(scores), generator=rng)
    halves = [order[: len(order) // 2], order[len(order) // 2 :]]
    chosen, tested = ((scores[half].double().cpu().numpy(), is_member[half].cpu().numpy()) for half in halves)
    best = {side: _best_threshold(*_split_accused(*chosen, side), delta, level) for side in (1, -1)}
    side = max(best, key=lambda accused: best[accused][0])
    inside, outside = _split_accused(*tested, side)
    hits, alarms = int((inside >= best[side][1]).sum()), int((outside >= best[side][1]).sum())
    counts = Counts(hits, len(inside), alarms, len(outside))
    rates = hits / max(1, len(inside)), alarms / max(1, len(outside))
    return EpsilonBound(bound_of(counts, delta, level), *rates, len(tested[0]), counts)


def one_run_bound(canaries: int, guesses: int, correct: int, delta: float = 0.0, level: float = LEVEL) -> float:
    """Return a lower bound on epsilon from one training with canaries (Steinke et al. 2023, Theorem 5.2).

    Each canary is trained on or not by a fair coin of its own; the attacker guesses for some of them.

    Args:
        canaries: number of canaries, m.
        guesses: number of canaries for which the attacker guesses, r.
        correct: number of correct guesses, v.
        delta: delta of the claim.
        level: chance that the bound is above the true epsilon.
    """

    def refuted(epsilon: float) -> bool:
        return one_run_p_value(canaries, guesses, correct, epsilon, delta) <= level

    if not refuted(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high < 64 and refuted(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if refuted(middle) else (low, middle)
    return low


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Return the largest chance of so many correct guesses under (epsilon, delta)-privacy (Theorem 5.2).

    It is `P[B >= v] + 2 m delta max over i of P[v > B >= v - i] / i`. B is binomial over r guesses, each right with the
    chance e^epsilon / (1 + e^epsilon).
    """
    from scipy.stats import binom

    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    steps = np.arange(1, correct + 1)
    below = np.cumsum(binom.pmf(correct - steps, guesses, right))
    return min(1.0, tail + 2 * canaries * delta * float((below / steps).max()))


def _split_accused(scores: np.ndarray, is_member: np.ndarray, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return scores of the accused and of the others: members by high scores, or non-members by low ones."""
    turned, accused = side * scores, is_member if side == 1 else ~is_member
    return turned[accused], turned[~accused]


def _best_threshold(inside: np.ndarray, outside: np.ndarray, delta: float, level: float) -> tuple[float, float]:
    """Return the highest bound over all thresholds, and its threshold."""
    if not len(inside) or not len(outside):
        return 0.0, math.inf
    thresholds = np.unique(np.concatenate([inside, outside]))
    hits = len(inside) - np.searchsorted(np.sort(inside), thresholds)
    alarms = len(outside) - np.searchsorted(np.sort(outside), thresholds)
    best, value = _find_highest(hits, len(inside), alarms, len(outside), delta, level)
    return value, float(thresholds[best])


def _find_highest(
    hits: np.ndarray, inside: int, alarms: np.ndarray, outside: int, delta: float, level: float
) -> tuple[int, float]:
    """Return the place of the highest of all `_bounds`, the first of equal ones, and its value.

    Hits and alarms fall along the thresholds, and the bound rises with hits and falls with alarms. So no bound of a
    block exceeds that of its first hits and last alarms; blocks that cannot hold the highest are not computed.
    """
    starts = np.arange(0, len(hits), BLOCK)
    ends = np.minimum(starts + BLOCK, len(hits))
    ceilings = _bounds(hits[starts], inside, alarms[ends - 1], outside, delta, level)
    floor = _bounds(hits[starts], inside, alarms[starts], outside, delta, level).max()
    possible = ceilings >= floor - 1e-9 if floor > 0 else ceilings > 0
    possible[0] = True  # the first of many that show nothing
    places = np.flatnonzero(np.repeat(possible, ends - starts))
    bounds = _bounds(hits[places], inside, alarms[places], outside, delta, level)
    best = int(bounds.argmax())
    return int(places[best]), float(bounds[best])


def _bounds(hits: np.ndarray, inside: int, alarms: np.ndarray, outside: int, delta: float, level: float) -> np.ndarray:
    """Return log((TPR - delta) / FPR) with a lower bound for TPR and an upper bound for FPR; at least 0."""
    from scipy.stats import beta

    if not inside or not outside:
        return np.zeros(len(hits))
    low = np.where(hits > 0, beta.ppf(level / 2, hits, inside - hits + 1), 0.0)
    high = np.where(alarms < outside, beta.ppf(1 - level / 2, alarms + 1, outside - alarms), 1.0)
    bounds: np.ndarray = np.log(np.maximum(low - delta, high) / high)
    return bounds
