"""How an attack on sub-models asked: the view that the tables show, and what the others found beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from secateur.report.submodels import Asker, asker_of, name, plain_views, way_of
from secateur.rows import Row


class Found(NamedTuple):
    """What one way of asking came to, as means over clients and seeds."""

    batches: str  # with whom an example is scored
    updates: int  # that the attacker holds
    server: float | None  # advantage
    clients: float | None
    auc: float | None  # of the clients


@dataclass(frozen=True)
class Asked:
    """One attack on one federation, asked in several ways: as in the other tables, then the others."""

    labels: Mapping[str, Any]
    attack: str
    found: Sequence[Found]

    @property
    def name(self) -> str:
        """Its federation's rule and network."""
        return name(self.labels)


def asked(rows: Sequence[Row]) -> list[Asked]:
    """Every attack that was asked in several ways."""
    plain = plain_views(rows)
    groups: dict[Asker, dict[tuple[str, int], list[Row]]] = {asker: {view: []} for asker, view in plain.items()}
    for row in rows:
        if (way := way_of(row)) is not None:
            groups[asker_of(row)].setdefault(way, []).append(row)
    return [
        Asked(dict(asker.labels), asker.attack, [_found(*way, own) for way, own in ways.items()])
        for asker, ways in groups.items()
        if len(ways) > 1
    ]


def _found(batches: str, updates: int, rows: Sequence[Row]) -> Found:
    def mean(metric: str, scope: str) -> float | None:
        own = [row.value for row in rows if row.metric == metric and row.extra["scope"] == scope]
        values = [value for value in own if value is not None]
        return sum(values) / len(values) if values else None

    return Found(batches, updates, mean("advantage", "server"), mean("advantage", "client"), mean("auc", "client"))
