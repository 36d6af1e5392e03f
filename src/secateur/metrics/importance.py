"""Importance of settings: the share of an outcome's variance that goes with each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Generator

from secateur.metrics.membership import Estimate
from secateur.seeding import draw_seed

REPLICATES = 100  # bootstrap samples of the trials
SHUFFLES = 4  # of a setting, in each sample
FEWEST = 4  # trials: of fewer, nothing can be said


def importance(
    settings: Sequence[Mapping[str, str | float]],
    values: Sequence[float],
    rng: Generator,
    replicates: int = REPLICATES,
) -> dict[str, Estimate]:
    """Return for each setting its total effect on the outcome, with a 95 % interval over bootstrapped trials.

    A regression tree f is fitted to every bootstrap sample. The total effect of setting i is
    E[(f(x) - f(x with x_i of another trial))^2] / (2 Var f), the total Sobol index by Jansen's estimator (1999).
    Indices may sum to more than 1 where settings act together. A setting that never varied, and an outcome that does
    not vary, have the index 0.

    Args:
        settings: of each trial, by name; text is a category, a number is ordered.
        values: the outcome of each trial.
        rng: the source of the bootstrap samples.
        replicates: number of bootstrap samples.

    Example:
        >>> trials = [{"a": a, "b": b} for a in (0.0, 1.0) for b in ("x", "y") for _ in range(4)]
        >>> shares = importance(trials, [trial["a"] for trial in trials], Generator().manual_seed(0))
        >>> round(shares["a"].value, 1), round(shares["b"].value, 1)
        (1.0, 0.0)
    """
    from sklearn.tree import DecisionTreeRegressor

    if len(settings) < FEWEST:
        return {}
    columns = {name: _encode([trial[name] for trial in settings]) for name in settings[0]}
    table, outcome = np.concatenate(list(columns.values()), axis=1), np.asarray(values, dtype=float)
    widths = [block.shape[1] for block in columns.values()]
    ends = np.cumsum(widths)
    chance = np.random.default_rng(draw_seed(rng))
    effects = np.zeros((replicates, len(columns)))
    for number in range(replicates):
        sample = chance.integers(len(table), size=len(table))
        tree = DecisionTreeRegressor(random_state=int(chance.integers(2**31))).fit(table[sample], outcome[sample])
        answers = tree.predict(table)
        moved = np.tile(table, (len(widths), SHUFFLES, 1, 1))  # (settings, shuffles, trials, columns)
        for i, (end, width) in enumerate(zip(ends, widths, strict=True)):
            for copy in moved[i]:
                copy[:, end - width : end] = table[chance.permutation(len(table)), end - width : end]
        others = tree.predict(moved.reshape(-1, table.shape[1])).reshape(len(widths), -1, len(table))
        if answers.var() > 1e-24:
            effects[number] = ((others - answers) ** 2).mean(axis=(1, 2)) / (2 * answers.var())
    # a share is at most 1, which the estimate of few trials may exceed
    low, high = np.percentile(effects, [2.5, 97.5], axis=0).clip(max=1.0).tolist()
    means = effects.mean(axis=0).clip(max=1.0).tolist()
    return {name: Estimate(means[i], low[i], high[i]) for i, name in enumerate(columns)}


def _encode(values: Sequence[str | float]) -> np.ndarray:
    """Return a setting as columns: its numbers, or one column of zeros and ones for each category."""
    if all(isinstance(value, int | float) for value in values):
        return np.asarray(values, dtype=float)[:, None]
    categories = sorted({str(value) for value in values})
    return np.asarray([[float(str(value) == name) for name in categories] for value in values])
