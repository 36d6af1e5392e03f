"""Which model size suits each client: what it may expect of each, by pilot runs, and advice in words.

experiments/submodel_pilots.py runs the pilots.

Of the sizes that were tried the one with the highest accuracy less advantage is recommended: a point of the one counts
as a point of the other, and the words say how much of each is gained and lost, and whether the pilots can tell at all.
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
    """What a client may expect of one model size."""

    rate: float  # the share of the server's channels
    accuracy: Estimate
    advantage: Estimate | None  # None: the client is too small to be attacked

    @property
    def worth(self) -> float:
        """Accuracy less advantage."""
        return self.accuracy.value - (0.0 if self.advantage is None else self.advantage.value)


@dataclass(frozen=True)
class Advice:
    """What to tell a client."""

    client: int
    data_size: int
    options: tuple[Option, ...]  # the largest model first
    rate: float  # that is recommended
    words: str


def advise(rows: Sequence[Row]) -> list[Advice]:
    """Advice for every client from the rows of pilots: of its accuracy, and of the attack on it."""
    found: dict[int, dict[float, dict[str, list[Row]]]] = {}
    sizes: dict[int, int] = {}
    for row in rows:
        if row.extra.get("scope") == "client" and row.metric in (ACCURACY, ADVANTAGE) and row.value is not None:
            client = row.extra["client"]
            sizes[client] = row.extra["data_size"]
            found.setdefault(client, {}).setdefault(row.extra["rate"], {}).setdefault(row.metric, []).append(row)
    return [_advised(client, sizes[client], found[client]) for client in sorted(found)]


def rows_of(advice: Sequence[Advice], labels: dict[str, Any]) -> list[Row]:
    """Advice as rows: what is expected of each size, and the size that is recommended with its reason."""
    rows = []
    for one in advice:
        own = labels["extra"] | {"client": one.client, "data_size": one.data_size, "advice": True}
        for option in one.options:
            extra = own | {"rate": option.rate}
            for name, estimate in (("accuracy", option.accuracy), ("advantage", option.advantage)):
                if estimate is not None:
                    rows.append(Row(**labels | {"extra": extra}, metric=f"expected_{name}", **estimate._asdict()))
        rows.append(Row(**labels | {"extra": own}, metric="recommended_rate", value=one.rate, note=one.words))
    return rows


def from_rows(rows: Sequence[Row]) -> list[tuple[Row, list[Advice]]]:
    """What `rows_of` made, read back: the first row of each federation, and its advice."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.extra.get("advice"):
            key = (row.extra.get("run"), row.model, row.dataset, row.defense, row.seed, row.extra["submodels"])
            groups.setdefault(key, []).append(row)
    return [(own[0], [_read(own, row) for row in own if row.metric == "recommended_rate"]) for own in groups.values()]


def caution(told: Row) -> str | None:
    """What a reader of advice must know of pilots that are shorter than the federation, by one of its rows."""
    pilots, whole = (told.extra.get(name) for name in ("pilot_rounds", "rounds"))
    if pilots is None or whole is None:
        return "Small models lag in early rounds, so short pilots favour the whole model."
    if pilots >= whole:
        return None
    short = f"pilots of {pilots} round{'s' * (pilots > 1)} for a federation of {whole} favour the whole model"
    return f"Small models lag in early rounds, so {short}; pilot_rounds makes them longer."


def _read(rows: Sequence[Row], told: Row) -> Advice:
    options: dict[float, dict[str, Estimate]] = {}
    for row in rows:
        if row.extra["client"] == told.extra["client"] and row.metric.startswith("expected_"):
            options.setdefault(row.extra["rate"], {})[row.metric] = _estimate(row)
    made = tuple(Option(rate, own["expected_accuracy"], own.get("expected_advantage")) for rate, own in options.items())
    return Advice(told.extra["client"], told.extra["data_size"], made, told.value or 0.0, told.note or "")


def _advised(client: int, size: int, found: Mapping[float, Mapping[str, Sequence[Row]]]) -> Advice:
    options = []
    for rate in sorted(found, reverse=True):
        attacked = [_estimate(row) for row in found[rate].get(ADVANTAGE, ())]
        accuracy = _expected([_estimate(row) for row in found[rate][ACCURACY]], least=0.0)
        options.append(Option(rate, accuracy, _expected(attacked, least=-1.0) if attacked else None))
    known = [option for option in options if option.advantage is not None]
    if not known:
        words = f"{size} examples are too few to tell how exposed it is; the smallest model is the careful choice"
        return Advice(client, size, tuple(options), options[-1].rate, words)
    best = max(known, key=lambda option: option.worth)
    return Advice(client, size, tuple(options), best.rate, _words(best, known))


def _expected(pilots: Sequence[Estimate], least: float) -> Estimate:
    """The mean over pilots, which ask about the same examples; how far they lie apart widens the interval.

    It ends at what a measure can be: `least` and 1.

    Example:
        >>> alike, apart = (_expected([Estimate(0.4, 0.3, 0.5), Estimate(x, x - 0.1, x + 0.1)], 0) for x in (0.4, 0.6))
        >>> round(alike.high - alike.value, 3), round(apart.high - apart.value, 3)
        (0.1, 0.22)
    """
    centre, low, high, _ = average_on_same(pilots)
    n, squares = len(pilots), math.fsum((pilot.value - centre) ** 2 for pilot in pilots)
    spread = NORMAL * math.sqrt(squares / (n * max(1, n - 1)))
    down, up = math.hypot(centre - low, spread), math.hypot(high - centre, spread)
    return Estimate(centre, max(least, centre - down), min(1.0, centre + up))


def _words(best: Option, known: Sequence[Option]) -> str:
    """The best against the next best."""
    others = [option for option in known if option is not best]
    if not others:
        return f"{sized(best.rate)}: no other size was tried"
    other = max(others, key=lambda option: option.worth)
    assert best.advantage is not None and other.advantage is not None
    accuracy, exposure = difference(best.accuracy, other.accuracy), difference(best.advantage, other.advantage)
    said = f"{sized(best.rate)}: {_said(accuracy, 'accurate', 'accuracy')}, {_said(exposure, 'exposed', 'exposure')}"
    return said if len(known) == 2 else f"{said}, compared with {sized(other.rate)}"


def sized(rate: float) -> str:
    """A model size in words."""
    return "the whole model" if rate == 1 else f"{rate:g} of the channels"


def _said(apart: Estimate, what: str, noun: str) -> str:
    """A difference in words.

    Example:
        >>> _said(Estimate(0.03, 0.01, 0.05), "accurate", "accuracy")
        '3.0 points more accurate'
        >>> _said(Estimate(-0.01, -0.03, 0.01), "exposed", "exposure")
        'exposure undecided (-1.0)'
    """
    points = 100 * apart.value
    if apart.low <= 0 <= apart.high:
        return f"{noun} undecided ({points:+.1f})"
    return f"{abs(points):.1f} points {'more' if points > 0 else 'less'} {what}"


def _estimate(row: Row) -> Estimate:
    value = row.value or 0.0
    return Estimate(value, value if row.low is None else row.low, value if row.high is None else row.high)
