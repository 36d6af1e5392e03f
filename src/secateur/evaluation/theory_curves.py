"""Attacked updates with what theory says of them, and how both go with rate, batch size, model size and rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import correlation, mean_of
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

THEORY = "leakage-bound"  # what these rows say their study is
MEASURED = (
    *("nmi_256", "nmi_256_chance", "ami_256", "nmi_100", "nmi_100_chance", "ami_100"),
    *("psnr", "psnr_grey"),
)
Values = dict[str, float]


class Update(NamedTuple):
    """One client's update that was attacked."""

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
    """What a figure lets vary, and whether the paper has leakage rise with it."""

    title: str
    field: str
    rises: bool


RATE = Axis("pruning rate p", "rate", rises=False)
BATCH = Axis("batch size B", "batch", rises=False)
SIZE = Axis("model size d", "parameters", rises=True)
ROUNDS = Axis("round T", "round", rises=True)
AXES = (RATE, BATCH, SIZE, ROUNDS)


@dataclass(frozen=True)
class Curve:
    """The updates of federations that differ in one thing alone, by its value."""

    axis: Axis
    labels: dict[str, Any]  # what they have in common, but for seeds and rounds
    points: dict[float, list[Values]]
    networks: dict[float, str]  # by the same

    @property
    def title(self) -> str:
        """What a person calls it."""
        told = (f"{name} {value:g}" if isinstance(value, float | int) else value for name, value in self.labels.items())
        return " ".join(told)

    def together(self, first: str, second: str) -> Estimate | None:
        """The rank correlation of two measures; `x` is what the curve goes along.

        Each is taken less its mean over a client's turn in a round, as the same pictures of it were attacked at every
        point, so that what pictures differ in does not count.
        """
        groups: dict[tuple[float, ...], list[tuple[float, float]]] = {}
        for x, own in self.points.items():
            for values in ({"x": x} | each for each in own):
                if first in values and second in values:
                    turn = () if self.axis is ROUNDS else (values["round"], values["client"])
                    group = (values["seed"], *turn)
                    groups.setdefault(group, []).append((values[first], values[second]))
        pairs = [pair for group in groups.values() for pair in _centred(group)]
        return rank_correlation(pairs, max(0, len(groups) - 1))

    def at(self, x: float, metric: str) -> Estimate | None:
        """The mean of a measure over a point's updates, with Student's interval."""
        known = [values[metric] for values in self.points[x] if metric in values]
        return mean_of(known) if known else None


def updates(rows: Iterable[Row]) -> dict[Update, Values]:
    """Every attacked update: what was measured of it, and the terms of the theory where they are of this client."""
    found: dict[Update, Values] = {}
    theory: dict[Update, Values] = {}
    sizes: dict[tuple[str, str], int] = {}
    for row in rows:
        extra = row.extra
        if row.value is None or extra.get("client") is None:
            continue
        place = (row.dataset, row.model, name_of(row.pruner or "none"), row.sparsity or 0.0)
        if extra.get("study") == THEORY:
            key = Update(*place, extra["local_batch"], "", row.seed, extra["at_round"], extra["client"])
            theory.setdefault(key, {})[row.metric] = row.value
            sizes[row.dataset, row.model] = extra["parameters"]
        elif row.attack and row.metric in MEASURED:
            key = Update(*place, extra["batch_size"], name_of(row.attack), row.seed, extra["round"], extra["client"])
            found.setdefault(key, {"seed": key.seed, "round": key.round, "client": key.client})[row.metric] = row.value
    for key, values in found.items():
        values |= theory.get(key._replace(attack=""), {})
        if size := sizes.get((key.data, key.model)):
            values["parameters"] = size
    return found


def curves(known: dict[Update, Values], axis: Axis) -> Iterator[Curve]:
    """Every set of updates that differ in the axis alone, and in seed and turn; of each data set the longest ones.

    Updates of all its points are of the same rounds: leakage changes while a model is trained.
    """
    groups: dict[tuple[tuple[str, Any], ...], list[tuple[float, Update]]] = {}
    hidden = {"seed", "round", "client", axis.field, *(["model"] if axis is SIZE else [])}
    for update, values in known.items():
        own = update._asdict() | {"parameters": values.get("parameters")}
        labels = tuple((name, own[name]) for name in Update._fields if name not in hidden)
        if own[axis.field] is not None:
            groups.setdefault(labels, []).append((own[axis.field], update))
    longest: dict[str, int] = {}
    made = [
        Curve(axis, dict(labels), _points(known, own, axis), {x: update.model for x, update in own})
        for labels, own in groups.items()
    ]
    for curve in made:
        longest[curve.labels["data"]] = max(longest.get(curve.labels["data"], 2), len(curve.points))
    yield from (curve for curve in made if len(curve.points) > longest[curve.labels["data"]] / 2)


def _points(known: dict[Update, Values], own: Sequence[tuple[float, Update]], axis: Axis) -> dict[float, list[Values]]:
    rounds: dict[float, set[int]] = {}
    for x, update in own:
        rounds.setdefault(x, set()).add(update.round)
    shared = set.intersection(*rounds.values())
    points: dict[float, list[Values]] = {x: [] for x in sorted(rounds)}
    for x, update in own:
        if axis is ROUNDS or update.round in shared:
            points[x].append(known[update])
    return {x: found for x, found in points.items() if found}


def _centred(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Less their means, rounded so that equal values stay equal."""
    a, b = (sum(side) / len(pairs) for side in zip(*pairs, strict=True))
    return [(round(x - a, 9), round(y - b, 9)) for x, y in pairs]


def rank_correlation(pairs: Sequence[tuple[float, float]], spent: int = 0) -> Estimate | None:
    """Spearman's rho, which is Pearson's r of the ranks, with Fisher's interval; None where one side does not vary.

    Example:
        >>> rank_correlation([(1, 1), (2, 8), (3, 27), (4, 64), (5, 125)]).value
        1.0
    """
    from scipy.stats import rankdata

    if not pairs:
        return None
    ranks = (rankdata(side).tolist() for side in zip(*pairs, strict=True))
    return correlation(list(zip(*ranks, strict=True)), spent)
