"""Measured and theoretical leakage of attacked updates, against pruning rate, batch size, model size and rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import correlation, mean_correlation, mean_of
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

THEORY = "leakage-bound"  # the study's name in its rows
MEASURED = ("nmi_256", "nmi_256_chance", "ami_256", "nmi_100", "nmi_100_chance", "ami_100", "psnr", "psnr_grey")
Values = dict[str, float]


class UpdateKey(NamedTuple):
    """Key of one attacked update of a client."""

    data: str
    model: str
    base: str  # the base pruning
    rate: float
    batch: int
    attack: str
    seed: int
    round: int
    client: int


@dataclass(frozen=True)
class Axis:
    """Quantity that varies in a figure, and the direction in which the paper has leakage change with it."""

    title: str
    field: str
    rises: bool  # leakage rises with the quantity, according to the paper


RATE = Axis("pruning rate p", "rate", rises=False)
BATCH = Axis("batch size B", "batch", rises=False)
SIZE = Axis("model size d", "parameters", rises=True)
ROUNDS = Axis("round T", "round", rises=True)
AXES = (RATE, BATCH, SIZE, ROUNDS)


@dataclass(frozen=True)
class LeakageCurve:
    """Updates of federations that differ in one quantity alone, by its value."""

    axis: Axis
    labels: dict[str, Any]  # common to all points; without seeds and rounds
    points: dict[float, list[Values]]
    networks: dict[float, str]  # names of the models, by the same value

    @property
    def title(self) -> str:
        """The common labels in words."""
        labels = self.labels.items()
        return " ".join(f"{name} {value:g}" if isinstance(value, float | int) else value for name, value in labels)

    @property
    def seeds(self) -> set[float]:
        """The seeds of all updates."""
        return {values["seed"] for point in self.points.values() for values in point}

    def correlate(self, first: str, second: str) -> Estimate | None:
        """Return the rank correlation of two measures; `x` names the quantity of the axis.

        It is taken within each seed and averaged over seeds, with Student's interval over them: the updates of a seed
        share a federation. With one seed the interval is Fisher's over its updates.

        The same pictures of a client's turn in a round were attacked at every point. So each measure is centred by its
        mean over that turn, which removes differences between pictures.
        """
        seeds: dict[float, dict[tuple[float, ...], list[tuple[float, float]]]] = {}
        for x, point in self.points.items():
            for values in ({"x": x} | measured for measured in point):
                if first in values and second in values:
                    turn = () if self.axis is ROUNDS else (values["round"], values["client"])
                    pair = values[first], values[second]
                    seeds.setdefault(values["seed"], {}).setdefault(turn, []).append(pair)
        correlations = [_correlate_turns(list(turns.values())) for turns in seeds.values()]
        known = [r for r in correlations if r is not None]
        if len(self.seeds) == 1:
            return known[0] if known else None
        return mean_correlation([r.value for r in known])

    def average_at(self, x: float, metric: str) -> Estimate | None:
        """Return the mean of a measure over seeds, with Student's interval; with one seed, that over its updates."""
        seeds: dict[float, list[float]] = {}
        for values in self.points[x]:
            if metric in values:
                seeds.setdefault(values["seed"], []).append(values[metric])
        means = [fmean(values) for values in seeds.values()]
        if len(self.seeds) == 1:
            return mean_of(*seeds.values()) if seeds else None
        return mean_of(means) if means else None


def updates(rows: Iterable[Row]) -> dict[UpdateKey, Values]:
    """Return the measured values of every attacked update, with the terms of the theory for the same client."""
    measured: dict[UpdateKey, Values] = {}
    theory: dict[UpdateKey, Values] = {}
    sizes: dict[tuple[str, str], int] = {}
    for row in rows:
        extra = row.extra
        if row.value is None or (client := extra.get("client")) is None:
            continue
        federation = (row.dataset, row.model, name_of(row.pruner or "none"), row.sparsity or 0.0)
        if extra.get("study") == THEORY:
            key = UpdateKey(*federation, extra["local_batch"], "", row.seed, extra["at_round"], client)
            theory.setdefault(key, {})[row.metric] = row.value
            sizes[row.dataset, row.model] = extra["parameters"]
        elif row.attack and row.metric in MEASURED:
            key = UpdateKey(*federation, extra["batch_size"], name_of(row.attack), row.seed, extra["round"], client)
            values = measured.setdefault(key, {"seed": key.seed, "round": key.round, "client": key.client})
            values[row.metric] = row.value
    for key, values in measured.items():
        values |= theory.get(key._replace(attack=""), {})
        if size := sizes.get((key.data, key.model)):
            values["parameters"] = size
    return measured


def curves(known: dict[UpdateKey, Values], axis: Axis) -> Iterator[LeakageCurve]:
    """Yield the sets of updates that differ only in the axis, the seed and the turn; for each data set the longest.

    All points of a curve use the same rounds, because leakage changes during training.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[float, UpdateKey]]] = {}
    hidden = {"seed", "round", "client", axis.field, *(["model"] if axis is SIZE else [])}
    for update, values in known.items():
        fields = update._asdict() | {"parameters": values.get("parameters")}
        labels = tuple((name, fields[name]) for name in UpdateKey._fields if name not in hidden)
        if fields[axis.field] is not None:
            groups.setdefault(labels, []).append((fields[axis.field], update))
    longest: dict[str, int] = {}
    all_curves = [
        LeakageCurve(axis, dict(labels), _points(known, group, axis), {x: update.model for x, update in group})
        for labels, group in groups.items()
    ]
    for curve in all_curves:
        longest[curve.labels["data"]] = max(longest.get(curve.labels["data"], 2), len(curve.points))
    yield from (curve for curve in all_curves if len(curve.points) > longest[curve.labels["data"]] / 2)


def _points(
    known: dict[UpdateKey, Values], group: Sequence[tuple[float, UpdateKey]], axis: Axis
) -> dict[float, list[Values]]:
    rounds: dict[float, set[int]] = {}
    for x, update in group:
        rounds.setdefault(x, set()).add(update.round)
    shared = set.intersection(*rounds.values())
    points: dict[float, list[Values]] = {x: [] for x in sorted(rounds)}
    for x, update in group:
        if axis is ROUNDS or update.round in shared:
            points[x].append(known[update])
    return {x: values for x, values in points.items() if values}


def _correlate_turns(turns: Sequence[Sequence[tuple[float, float]]]) -> Estimate | None:
    """Return the rank correlation of pairs that are centred turn by turn; None if one side does not vary."""
    pairs = [pair for turn in turns for pair in _centre(turn)]
    return rank_correlation(pairs, max(0, len(turns) - 1))


def _centre(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Subtract the means, and round so that equal values stay equal."""
    a, b = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    return [(round(x - a, 9), round(y - b, 9)) for x, y in pairs]


def rank_correlation(pairs: Sequence[tuple[float, float]], spent: int = 0) -> Estimate | None:
    """Return Spearman's rho, Pearson's r of the ranks, with Fisher's interval; None if one side does not vary.

    Example:
        >>> rank_correlation([(1, 1), (2, 8), (3, 27), (4, 64), (5, 125)]).value
        1.0
    """
    from scipy.stats import rankdata

    if not pairs:
        return None
    ranks = (rankdata(side).tolist() for side in zip(*pairs, strict=True))
    return correlation(list(zip(*ranks, strict=True)), spent)
