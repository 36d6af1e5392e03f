"""What a study of defenses measured beside its attacks, as tables of the page: trainings, costs, theorems."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from secateur.report.measures import ordered
from secateur.report.summary import Line, lines
from secateur.rows import Row

TITLES = {  # by the kind of measurement
    "training": "What training under each defense came to",
    "cost": "What each defense costs",
    "bounds": "Theorems beside what a training came to",
    "overheard": "What the broadcast alone tells",
}
FIRST = ("test_accuracy", "bytes", "ratio", "paper_ratio", "defense_seconds", "user_seconds")
PLACES = {"run": "run", "model": "network", "dataset": "data", "defense": "defense"}


@dataclass(frozen=True)
class Table:
    """One kind of measurement, a line for each network, data set and defense."""

    title: str
    lines: list[Line]

    @property
    def places(self) -> dict[str, str]:
        """What tells the lines apart, and how it is called; the defense always."""
        several = {name for name in PLACES if len({line.labels.get(name) for line in self.lines}) > 1}
        return {name: title for name, title in PLACES.items() if name in several | {"defense"}}

    @property
    def measures(self) -> list[str]:
        """The columns."""
        return ordered((name for line in self.lines for name in line.cells), FIRST)


def tables(rows: Iterable[Row]) -> list[Table]:
    """A table for each kind of measurement; of a training its last epoch."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        kind, extra = row.extra.get("study"), row.extra
        if kind in TITLES and extra.get("epoch") == extra.get("epochs"):
            own = {name: extra[name] for name in ("run",) if name in extra}
            kinds.setdefault(kind, []).append(replace(row, extra=own, note=None))
    return [Table(title, lines(kinds[kind])) for kind, title in TITLES.items() if kind in kinds]
