"""One measurement of a run: a typed row, and its line in results.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from secateur.runs.artifacts import SCHEMA


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. `low` and `high` bound its interval; `extra` holds what only some kinds of run measure by."""

    model: str
    dataset: str
    pruner: str | None = None
    sparsity: float | None = None
    defense: str | None = None
    adaptive: bool | None = None
    attack: str | None = None
    seed: int
    metric: str
    value: float | None
    low: float | None = None
    high: float | None = None
    timing: bool = False  # a time: differs from run to run
    note: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if taken := self.extra.keys() & (_FIELDS | {"schema", "extra"}):
            raise ValueError(f"extra may not rename a row's own fields: {sorted(taken)}")

    def to_json(self) -> dict[str, Any]:
        """One flat object; JSON has no infinity, so numbers that aren't finite become strings that float() reads."""
        own = {name: getattr(self, name) for name in _FIELDS_IN_ORDER}
        numbers = {name: str(own[name]) for name in _NUMBERS if own[name] is not None and not math.isfinite(own[name])}
        return {"schema": SCHEMA} | own | numbers | self.extra

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Row:
        """The inverse of `to_json`; names that aren't a row's own go to `extra`."""
        own = {name: value for name, value in row.items() if name in _FIELDS}
        numbers = {name: float(own[name]) for name in _NUMBERS if isinstance(own.get(name), str)}
        extra = {name: value for name, value in row.items() if name not in _FIELDS and name != "schema"}
        return cls(**(own | numbers), extra=extra)


_FIELDS_IN_ORDER = [f.name for f in fields(Row) if f.name != "extra"]
_FIELDS = frozenset(_FIELDS_IN_ORDER)
_NUMBERS = ("value", "low", "high")


def comparable(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """What must be equal between two runs of one configuration: every row that isn't a time, as JSON."""
    return [row.to_json() for row in rows if not row.timing]
