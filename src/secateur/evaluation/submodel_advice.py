"""Advice on a client's model size: expected accuracy and exposure of each size from pilot runs, and a recommendation.

experiments/submodel_pilots.py runs the pilots.

The recommended size has the highest accuracy minus advantage, so a point of accuracy counts as a point of advantage.
The words state the gain and loss in both. Where the pilots cannot decide between two sizes, none is recommended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.metrics.estimates import average_on_same, difference
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

ACCURACY, ADVANTAGE = "test_accuracy", "advantage"
NORMAL = 1.96  # standard errors of a 95 % interval


@dataclass(frozen=True)
class Option:
    """Accuracy and exposure that a client may expect of one model size."""

    rate: float  # the share of the server's channels
    accuracy: Estimate
    advantage: Estimate | None  # None: the client is too small to be attacked

    @property
    def worth(self) -> float:
        """Accuracy minus advantage; an unknown advantage counts as 0."""
        return self.accuracy.value - (0.0 if self.advantage is None else self.advantage.value)


@dataclass(frozen=True)
class Advice:
    """Advice for one client: all model sizes, the recommended one, and the reason."""

    client: int
    data_size: int
    options: tuple[Option, ...]  # the largest model first
    rate: float | None  # the recommended model size; None: the pilots cannot decide
    words: str


def advise(rows: Sequence[Row]) -> list[Advice]:
    """Return advice for every client from the pilots' rows of its accuracy and of the attack on it."""
    by_client: dict[int, dict[float, dict[str, list[Row]]]] = {}
    sizes: dict[int, int] = {}
    for row in rows:
        if row.extra.get("scope") == "client" and row.metric in (ACCURACY, ADVANTAGE) and row.value is not None:
            client = row.extra["client"]
            sizes[client] = row.extra["data_size"]
            by_client.setdefault(client, {}).setdefault(row.extra["rate"], {}).setdefault(row.metric, []).append(row)
    return [_advise_client(client, sizes[client], by_client[client]) for client in sorted(by_client)]


def rows_of(advice: Sequence[Advice], labels: dict[str, Any]) -> list[Row]:
    """Return advice as rows: the expected values of each size, and the recommended size with the reason."""
    rows = []
    for one in advice:
        extra = labels["extra"] | {"client": one.client, "data_size": one.data_size, "advice": True}
        for option in one.options:
            option_labels = labels | {"extra": extra | {"rate": option.rate}}
            for name, estimate in (("accuracy", option.accuracy), ("advantage", option.advantage)):
                if estimate is not None:
                    rows.append(Row(**option_labels, metric=f"expected_{name}", **estimate._asdict()))
        rows.append(Row(**labels | {"extra": extra}, metric="recommended_rate", value=one.rate, note=one.words))
    return rows


def from_rows(rows: Sequence[Row]) -> list[tuple[Row, list[Advice]]]:
    """Read advice back from the rows of `rows_of`: the first row of each federation, and its advice."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.extra.get("advice"):
            key = (row.extra.get("run"), row.model, row.dataset, row.defense, row.seed, row.extra["submodels"])
            groups.setdefault(key, []).append(row)
    recommended = {key: [row for row in group if row.metric == "recommended_rate"] for key, group in groups.items()}
    return [(group[0], [_read(group, row) for row in recommended[key]]) for key, group in groups.items()]


def caution(row: Row) -> str | None:
    """Return the warning about pilots that are shorter than the federation, from one row of its advice."""
    pilots, rounds = (row.extra.get(name) for name in ("pilot_rounds", "rounds"))
    if pilots is None or rounds is None:
        return "Small models lag in early rounds, so short pilots favour the whole model."
    if pilots >= rounds:
        return None
    short = f"pilots of {pilots} round{'s' * (pilots > 1)} for a federation of {rounds} favour the whole model"
    return f"Small models lag in early rounds, so {short}; pilot_rounds makes them longer."


def _read(rows: Sequence[Row], recommended: Row) -> Advice:
    client, size = recommended.extra["client"], recommended.extra["data_size"]
    by_rate: dict[float, dict[str, Estimate]] = {}
    for row in rows:
        if row.extra["client"] == client and row.metric.startswith("expected_"):
            by_rate.setdefault(row.extra["rate"], {})[row.metric.removeprefix("expected_")] = _estimate(row)
    options = (Option(rate, known["accuracy"], known.get("advantage")) for rate, known in by_rate.items())
    return Advice(client, size, tuple(options), recommended.value, recommended.note or "")


def _advise_client(client: int, size: int, by_rate: Mapping[float, Mapping[str, Sequence[Row]]]) -> Advice:
    options = []
    for rate in sorted(by_rate, reverse=True):
        advantages = [_estimate(row) for row in by_rate[rate].get(ADVANTAGE, ())]
        accuracy = _average_pilots([_estimate(row) for row in by_rate[rate][ACCURACY]], least=0.0)
        options.append(Option(rate, accuracy, _average_pilots(advantages, least=-1.0) if advantages else None))
    known = [option for option in options if option.advantage is not None]
    if not known:
        words = f"{size} examples are too few to tell how exposed it is; the smallest model is the careful choice"
        return Advice(client, size, tuple(options), options[-1].rate, words)
    best = max(known, key=lambda option: option.worth)
    decided, words = _describe_best(best, known)
    return Advice(client, size, tuple(options), best.rate if decided else None, words)


def _average_pilots(pilots: Sequence[Estimate], least: float) -> Estimate:
    """Return the mean over pilots on the same examples; the spread between pilots widens the interval.

    The interval is cut at the measure's bounds, `least` and 1.

    Example:
        >>> pilots = [[Estimate(0.4, 0.3, 0.5), Estimate(x, x - 0.1, x + 0.1)] for x in (0.4, 0.6)]
        >>> alike, apart = (_average_pilots(pair, 0) for pair in pilots)
        >>> round(alike.high - alike.value, 3), round(apart.high - apart.value, 3)
        (0.1, 0.22)
    """
    centre, low, high, _ = average_on_same(pilots)
    n, squares = len(pilots), math.fsum((pilot.value - centre) ** 2 for pilot in pilots)
    spread = NORMAL * math.sqrt(squares / (n * max(1, n - 1)))
    down, up = math.hypot(centre - low, spread), math.hypot(high - centre, spread)
    return Estimate(centre, max(least, centre - down), min(1.0, centre + up))


def _describe_best(best: Option, known: Sequence[Option]) -> tuple[bool, str]:
    """Return whether the best option is better than the next best beyond chance, and the comparison in words."""
    others = [option for option in known if option is not best]
    if not others:
        return True, f"{describe_size(best.rate)}: no other size was tried"
    other = max(others, key=lambda option: option.worth)
    assert best.advantage is not None and other.advantage is not None
    accuracy, exposure = difference(best.accuracy, other.accuracy), difference(best.advantage, other.advantage)
    changes = (
        _describe_difference(accuracy, "accurate", "accuracy"),
        _describe_difference(exposure, "exposed", "exposure"),
    )
    gain = difference(accuracy, exposure)  # a point of accuracy counts as a point of advantage
    compared = "" if len(known) == 2 else f", compared with {describe_size(other.rate)}"
    words = f"{describe_size(best.rate)}: {', '.join(changes)}{compared}"
    return gain.low > 0, words if gain.low > 0 else f"no recommendation, as the pilots cannot decide; {words}"


def describe_size(rate: float) -> str:
    """Return a model size in words."""
    return "the whole model" if rate == 1 else f"{rate:g} of the channels"


def _describe_difference(apart: Estimate, what: str, noun: str) -> str:
    """Return a difference in words.

    Example:
        >>> _describe_difference(Estimate(0.03, 0.01, 0.05), "accurate", "accuracy")
        '3.0 points more accurate'
        >>> _describe_difference(Estimate(-0.01, -0.03, 0.01), "exposed", "exposure")
        'exposure not known to differ (-1.0 points, within chance)'
    """
    points = 100 * apart.value
    if apart.low <= 0 <= apart.high:
        return f"{noun} not known to differ ({points:+.1f} points, within chance)"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'} {what}"


def _estimate(row: Row) -> Estimate:
    value = row.value or 0.0
    return Estimate(value, value if row.low is None else row.low, value if row.high is None else row.high)
