"""Rows of one or many seeds, gathered into the lines of a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

NAMES = ("model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack")
MODEL = ("run", "model", "dataset", "pruner", "sparsity", "defense", "original")  # the others are the attacker's
Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """A measure over the seeds: the mean, and the interval of the one seed or the range of several."""

    value: float | None
    low: float | None
    high: float | None
    note: str | None = None


@dataclass(frozen=True)
class Line:
    """One model (and one attack on it, or none) with all that was measured."""

    labels: dict[str, Any]
    cells: dict[str, Cell] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """What a person calls this model, its defense aside."""
        return compression(self.labels)

    @property
    def pruned(self) -> bool:
        """Whether anything was pruned."""
        return is_pruned(self.labels)

    def value(self, metric: str) -> float | None:
        """A measure's mean, where it was measured."""
        return self.cells[metric].value if metric in self.cells else None


def is_pruned(labels: Mapping[str, Any]) -> bool:
    """Whether these labels are a pruned model's, not an original's."""
    return labels["pruner"] not in (None, "none")


def compression(labels: Mapping[str, Any]) -> str:
    """A pruner at its sparsity, or the original.

    Example:
        >>> compression({"pruner": "snip", "sparsity": 0.70})
        'snip 0.7'
    """
    if not is_pruned(labels):
        own = labels.get("original")
        return f"original ({own})" if own else "original"
    return f"{labels['pruner']} {labels['sparsity']:g}" if labels["sparsity"] else str(labels["pruner"])


def full_title(labels: Mapping[str, Any]) -> str:
    """A model with its defense; an original has one only where it was trained with it from the start."""
    defense = labels["defense"]
    plain = defense in (None, labels["pruner"]) or (defense == "basic" and not is_pruned(labels))
    return compression(labels) if plain else f"{compression(labels)}, {labels['defense']}"


def model_key(labels: Mapping[str, Any]) -> Key:
    """What tells one model from another, whoever attacks it."""
    return tuple((name, labels.get(name)) for name in MODEL)


def attack_key(labels: Mapping[str, Any]) -> Key:
    """What tells one attack on one model from another."""
    return tuple(sorted((k, v) for k, v in labels.items() if v is not None))


def setting_key(labels: Mapping[str, Any]) -> Key:
    """The run, network and data: models of different settings are never compared."""
    return model_key(labels)[:3]


def lines(rows: Iterable[Row]) -> list[Line]:
    """One line per model and attack, in the order they were measured; seeds are gathered."""
    groups: dict[Key, dict[str, list[Row]]] = {}
    for row in rows:
        labels = {name: getattr(row, name) for name in NAMES} | row.extra
        groups.setdefault(tuple(labels.items()), {}).setdefault(row.metric, []).append(row)
    return [
        Line(
            dict(labels),
            {metric: _cell(found) for metric, found in metrics.items()},
            tuple(sorted({row.seed for found in metrics.values() for row in found})),
        )
        for labels, metrics in groups.items()
    ]


def models(table: Sequence[Line]) -> list[Line]:
    """The lines of models: utility, cost and gaps."""
    return [line for line in table if line.labels["attack"] is None]


def attacks(table: Sequence[Line]) -> list[Line]:
    """The lines of attacks, each with its model's utility and cost beside what the attack found."""
    beside = {model_key(line.labels): line.cells for line in models(table)}
    return [
        Line(line.labels, beside.get(model_key(line.labels), {}) | line.cells, line.seeds)
        for line in table
        if line.labels["attack"] is not None
    ]


def strongest(table: Sequence[Line], metric: str = "auc") -> list[Line]:
    """For each model the attack that does best against it, whatever the attacker knows."""
    best: dict[Key, Line] = {}
    for line in attacks(table):
        score, key = line.value(metric), model_key(line.labels)
        if score is not None and (key not in best or score > (best[key].value(metric) or 0)):
            best[key] = line
    return list(best.values())


def front(found: Sequence[Line]) -> list[Line]:
    """The Pareto front: no other line is at least as accurate and gives away no more. From least accurate up."""
    points = [line for line in found if line.value("test_accuracy") is not None and line.value("auc") is not None]
    best: list[Line] = []
    for line in sorted(points, key=lambda line: (-(line.value("test_accuracy") or 0), line.value("auc") or 0)):
        if not best or (line.value("auc") or 0) < (best[-1].value("auc") or 0):
            best.append(line)
    return best[::-1]


def by_setting(table: Iterable[Line]) -> list[list[Line]]:
    """The lines of each run, network and data set, apart."""
    groups: dict[Key, list[Line]] = {}
    for line in table:
        groups.setdefault(setting_key(line.labels), []).append(line)
    return list(groups.values())


def original_of(labels: Mapping[str, Any], originals: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The unpruned model that a pruned one was made from: its pruner's own where it trains one, else the common."""
    same = [each for each in originals if setting_key(each) == setting_key(labels) and not is_pruned(each)]

    def nearness(each: Mapping[str, Any]) -> tuple[int, bool]:
        own = {labels["pruner"]: 2, None: 1}.get(each.get("original"), 0)
        return own, each["defense"] == labels["defense"]

    return max(same, key=nearness, default=None)


def _cell(rows: Sequence[Row]) -> Cell:
    notes = "; ".join(sorted({row.note for row in rows if row.note})) or None
    values = [row.value for row in rows if row.value is not None]
    if not values:
        return Cell(None, None, None, notes)
    if len(rows) == 1:
        return Cell(rows[0].value, rows[0].low, rows[0].high, notes)
    return Cell(sum(values) / len(values), min(values), max(values), notes)


def estimate(row: Row) -> Estimate:
    """A row's value with its interval."""
    assert row.value is not None
    low = -math.inf if row.low is None else row.low
    return Estimate(row.value, low, math.inf if row.high is None else row.high, row.note)
