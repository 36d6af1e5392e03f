"""Rows of one or many seeds, gathered into the lines of a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from secateur.rows import Row


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
        """What a person calls this model."""
        if self.labels["pruner"] == "none":
            own = self.labels.get("original")
            return f"original ({own})" if own else "original"
        return f"{self.labels['pruner']} {self.labels['sparsity']:g}"


def lines(rows: Iterable[Row]) -> list[Line]:
    """One line per model and attack, in the order they were measured; seeds are gathered."""
    groups: dict[tuple[tuple[str, Any], ...], dict[str, list[Row]]] = {}
    for row in rows:
        names = ("model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack")
        labels = {name: getattr(row, name) for name in names} | row.extra
        groups.setdefault(tuple(labels.items()), {}).setdefault(row.metric, []).append(row)
    return [
        Line(
            dict(labels),
            {metric: _cell(found) for metric, found in metrics.items()},
            tuple(sorted({row.seed for found in metrics.values() for row in found})),
        )
        for labels, metrics in groups.items()
    ]


def attacks(table: Sequence[Line]) -> list[Line]:
    """The lines of attacks, each with its model's utility and cost beside what the attack found."""
    models = {_model(line): line.cells for line in table if line.labels["attack"] is None}
    return [
        Line(line.labels, models.get(_model(line), {}) | line.cells, line.seeds)
        for line in table
        if line.labels["attack"] is not None
    ]


def strongest(table: Sequence[Line], metric: str = "auc") -> list[Line]:
    """For each model the attack that does best against it."""
    best: dict[tuple[tuple[str, Any], ...], Line] = {}
    for line in attacks(table):
        score = line.cells[metric].value if metric in line.cells else None
        if score is None:
            continue
        held = best.get(_model(line))
        if held is None or score > (held.cells[metric].value or 0):
            best[_model(line)] = line
    return list(best.values())


def _model(line: Line) -> tuple[tuple[str, Any], ...]:
    return tuple(item for item in line.labels.items() if item[0] != "attack")


def _cell(rows: Sequence[Row]) -> Cell:
    notes = "; ".join(sorted({row.note for row in rows if row.note})) or None
    values = [row.value for row in rows if row.value is not None]
    if not values:
        return Cell(None, None, None, notes)
    if len(rows) == 1:
        return Cell(rows[0].value, rows[0].low, rows[0].high, notes)
    return Cell(sum(values) / len(values), min(values), max(values), notes)
