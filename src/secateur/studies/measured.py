"""What an audit measured, asked by model and attack; means and intervals over its seeds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from secateur.metrics.membership import Estimate
from secateur.rows import Row

Measure = dict[int, Estimate]  # by seed; empty where it was not measured
INFINITE = math.inf


class Model(NamedTuple):
    """A victim: what was done to it."""

    pruner: str  # none: an original
    sparsity: float
    defense: str
    original: str | None  # the pruner whose term trained its original (network slimming)

    @property
    def title(self) -> str:
        """What a person calls it."""
        if self.pruner == "none":
            return f"original ({self.original})" if self.original else "original"
        return f"{self.pruner} {self.sparsity:g}" + ("" if self.defense == "basic" else f" {self.defense}")

    @property
    def source(self) -> Model:
        """The original that it was pruned from."""
        return Model("none", 0.0, "basic", self.original)


@dataclass(frozen=True)
class Found:
    """The rows and figures of one audit."""

    rows: Sequence[Row]
    figures: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def models(self) -> list[Model]:
        """Every victim, originals included, in the order in which they were measured."""
        return list(dict.fromkeys(map(_model, self.rows)))

    @cached_property
    def pruned(self) -> list[Model]:
        """The victims that were pruned."""
        return [model for model in self.models if model.pruner != "none"]

    @cached_property
    def attacks(self) -> list[str]:
        """The attacks' names, without their settings."""
        return list(dict.fromkeys(name_of(row.attack) for row in self.rows if row.attack))

    def of(self, model: Model, metric: str, attack: str | None = None, **extra: Any) -> Measure:
        """One measure of a model, or of an attack on it, by seed."""
        return {
            row.seed: Estimate(row.value, _or(row.low, -INFINITE), _or(row.high, INFINITE), row.note)
            for row in self.rows
            if row.metric == metric
            and row.value is not None
            and (None if row.attack is None else name_of(row.attack)) == attack
            and _model(row) == model
            and all(row.extra.get(name) == value for name, value in extra.items())
        }

    def drawn(self, model: Model, kind: str, quantity: str) -> dict[int, Mapping[str, Any]]:
        """One figure of a model, by seed."""
        return {
            figure["seed"]: figure
            for figure in self.figures
            if (figure["kind"], figure.get("quantity")) == (kind, quantity)
            and (figure["pruner"], figure["sparsity"], figure["defense"], figure.get("original")) == model
        }


def name_of(choice: str) -> str:
    """The name of a method that is written with its settings.

    Example:
        >>> name_of("samia:epochs=4")
        'samia'
    """
    return choice.partition(":")[0]


def combine(function: Callable[..., float], *measures: Measure) -> Estimate | None:
    """A function of measures with its 95 % interval; None where no seed has them all.

    Several seeds are compared seed by seed, and Student's interval is taken over them. With one seed each measure's
    own interval is carried through, one at a time, and the changes are added as squares; for a difference this is
    Newcombe's interval. It takes the measures for independent, which is too wide where they share their examples.

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
    return _carried(function, [measure[seeds[0]] for measure in measures])


def mean(measure: Measure) -> Estimate | None:
    """The mean over seeds."""
    return combine(lambda value: value, measure)


def mean_of(values: Sequence[float]) -> Estimate:
    """The mean of independent values with Student's 95 % interval; one value alone has none."""
    n = len(values)
    centre = math.fsum(values) / n
    if n == 1:
        return Estimate(centre, -INFINITE, INFINITE)
    from scipy.stats import t

    variance = math.fsum((value - centre) ** 2 for value in values) / (n - 1)
    radius = float(t.ppf(0.975, n - 1)) * math.sqrt(variance / n)
    return Estimate(centre, centre - radius, centre + radius)


def correlation(pairs: Sequence[tuple[float, float]], spent: int = 0) -> Estimate | None:
    """Pearson's r with Fisher's 95 % interval, which needs four pairs; None where one side does not vary.

    `spent` are degrees of freedom that something else took, such as the means of groups.
    """
    n = len(pairs)
    xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
    dx, dy = ([value - math.fsum(side) / n for value in side] for side in (xs, ys))
    scale = math.sqrt(math.fsum(x * x for x in dx) * math.fsum(y * y for y in dy))
    if n < 2 or scale == 0:
        return None
    r = max(-1.0, min(1.0, math.fsum(x * y for x, y in zip(dx, dy, strict=True)) / scale))
    if n - spent < 4:
        return Estimate(r, -1.0, 1.0)
    z, radius = math.atanh(max(-1 + 1e-12, min(1 - 1e-12, r))), 1.959964 / math.sqrt(n - spent - 3)
    return Estimate(r, math.tanh(z - radius), math.tanh(z + radius))


def lowest(found: Iterable[tuple[Model, Measure]]) -> tuple[Model, Measure] | None:
    """The model with the least mean of a measure."""
    known = [(estimate.value, pair) for pair in found if (estimate := mean(pair[1])) is not None]
    return min(known, key=lambda each: each[0])[1] if known else None


def _carried(function: Callable[..., float], measures: Sequence[Estimate]) -> Estimate:
    values = [measure.value for measure in measures]
    centre = function(*values)
    down = up = 0.0
    for place, measure in enumerate(measures):
        moved = [function(*values[:place], end, *values[place + 1 :]) for end in (measure.low, measure.high)]
        down += max(0.0, centre - min(moved)) ** 2
        up += max(0.0, max(moved) - centre) ** 2
    note = "; ".join(sorted({measure.note for measure in measures if measure.note})) or None
    return Estimate(centre, centre - math.sqrt(down), centre + math.sqrt(up), note)


def _model(row: Row) -> Model:
    return Model(row.pruner or "none", row.sparsity or 0.0, row.defense or "basic", row.extra.get("original"))


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value
