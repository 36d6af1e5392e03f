"""Lines of a table, gathered from the rows of one or many seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

NAMES = ("model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack")
MODEL = ("run", "model", "dataset", "pruner", "sparsity", "defense", "original")  # other labels describe the attacker
Key = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class SummaryCell:
    """Measure over the seeds: the mean, and the interval of a single seed or the range of several."""

    value: float | None
    low: float | None
    high: float | None
    note: str | None = None


@dataclass(frozen=True)
class SummaryLine:
    """Measures of one model, or of one attack on it."""

    labels: dict[str, Any]
    cells: dict[str, SummaryCell] = field(default_factory=dict)
    seeds: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """The name of the model, without its defense."""
        return compression(self.labels)

    @property
    def pruned(self) -> bool:
        """True if the model was pruned."""
        return is_pruned(self.labels)

    def value(self, metric: str) -> float | None:
        """Return a measure's mean; None if it was not measured."""
        return self.cells[metric].value if metric in self.cells else None


def is_pruned(labels: Mapping[str, Any]) -> bool:
    """Return True if the labels are of a pruned model, not of an original."""
    return labels["pruner"] not in (None, "none")


def compression(labels: Mapping[str, Any]) -> str:
    """Name a model by its pruner and sparsity, or as the original.

    Example:
        >>> compression({"pruner": "snip", "sparsity": 0.70})
        'snip 0.7'
    """
    if not is_pruned(labels):
        training = labels.get("original")
        return f"original ({training})" if training else "original"
    return f"{labels['pruner']} {labels['sparsity']:g}" if labels["sparsity"] else str(labels["pruner"])


def full_title(labels: Mapping[str, Any]) -> str:
    """Name a model with its defense; an original has one only if trained with the defense from the start."""
    defense = labels["defense"]
    plain = defense in (None, labels["pruner"]) or (defense == "basic" and not is_pruned(labels))
    return compression(labels) if plain else f"{compression(labels)}, {labels['defense']}"


def model_key(labels: Mapping[str, Any]) -> Key:
    """Return the key of a model, without the attack."""
    return tuple((name, labels.get(name)) for name in MODEL)


def attack_key(labels: Mapping[str, Any]) -> Key:
    """Return the key of one attack on one model."""
    return tuple(sorted((k, v) for k, v in labels.items() if v is not None))


def setting_key(labels: Mapping[str, Any]) -> Key:
    """Return the key of run, network and data; models of different settings are never compared."""
    return model_key(labels)[:3]


def lines(rows: Iterable[Row]) -> list[SummaryLine]:
    """Return one line per model and attack over all seeds, in the order of the rows."""
    groups: dict[Key, dict[str, list[Row]]] = {}
    for row in rows:
        labels = {name: getattr(row, name) for name in NAMES} | row.extra
        groups.setdefault(tuple(labels.items()), {}).setdefault(row.metric, []).append(row)
    return [
        SummaryLine(
            dict(labels),
            {metric: _cell(measured) for metric, measured in metrics.items()},
            tuple(sorted({row.seed for measured in metrics.values() for row in measured})),
        )
        for labels, metrics in groups.items()
    ]


def models(table: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the lines of models: utility, cost and gaps."""
    return [line for line in table if line.labels["attack"] is None]


def attacks(table: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the lines of attacks, each with the utility and cost of its model beside the attack's measures."""
    beside = {model_key(line.labels): line.cells for line in models(table)}
    return [
        SummaryLine(line.labels, beside.get(model_key(line.labels), {}) | line.cells, line.seeds)
        for line in table
        if line.labels["attack"] is not None
    ]


def strongest(table: Sequence[SummaryLine], metric: str = "auc") -> list[SummaryLine]:
    """Return for each model the line of its strongest attack, under any knowledge of the attacker."""
    best: dict[Key, SummaryLine] = {}
    for line in attacks(table):
        score, key = line.value(metric), model_key(line.labels)
        if score is not None and (key not in best or score > (best[key].value(metric) or 0)):
            best[key] = line
    return list(best.values())


def front(results: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the Pareto front, in order of rising accuracy.

    For a line of the front, no other line is at least as accurate and leaks no more.
    """
    points = [line for line in results if line.value("test_accuracy") is not None and line.value("auc") is not None]
    best: list[SummaryLine] = []
    for line in sorted(points, key=lambda line: (-(line.value("test_accuracy") or 0), line.value("auc") or 0)):
        if not best or (line.value("auc") or 0) < (best[-1].value("auc") or 0):
            best.append(line)
    return best[::-1]


def by_setting(table: Iterable[SummaryLine]) -> list[list[SummaryLine]]:
    """Group the lines by run, network and data set."""
    groups: dict[Key, list[SummaryLine]] = {}
    for line in table:
        groups.setdefault(setting_key(line.labels), []).append(line)
    return list(groups.values())


def original_of(labels: Mapping[str, Any], originals: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the original of a pruned model: the one that its pruner trained if there is one, else the common one."""
    same = [model for model in originals if setting_key(model) == setting_key(labels) and not is_pruned(model)]

    def nearness(model: Mapping[str, Any]) -> tuple[int, bool]:
        by_training = {labels["pruner"]: 2, None: 1}.get(model.get("original"), 0)
        return by_training, model["defense"] == labels["defense"]

    return max(same, key=nearness, default=None)


def _cell(rows: Sequence[Row]) -> SummaryCell:
    notes = "; ".join(sorted({row.note for row in rows if row.note})) or None
    values = [row.value for row in rows if row.value is not None]
    if not values:
        return SummaryCell(None, None, None, notes)
    if len(rows) == 1:
        return SummaryCell(rows[0].value, rows[0].low, rows[0].high, notes)
    return SummaryCell(sum(values) / len(values), min(values), max(values), notes)


def estimate(row: Row) -> Estimate:
    """Return a row's value with its interval; a missing end is infinite."""
    assert row.value is not None
    low = -math.inf if row.low is None else row.low
    return Estimate(row.value, low, math.inf if row.high is None else row.high, row.note)
