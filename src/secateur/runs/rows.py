"""One measurement of a run: a typed row, its flat JSON object, and its short line in results.jsonl.

A flat object repeats the settings of its experiment in every row. So results.jsonl holds short lines that name a
group, and groups.jsonl holds each group once: the fields that its rows share. Notes are there too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from secateur.errors import printable
from secateur.runs.artifacts import SCHEMA


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement. `low` and `high` bound its interval; `extra` has the labels that only some kinds of run have."""

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
        if not _TAKEN.isdisjoint(self.extra):
            raise ValueError(f"extra has names of fields: {sorted(_TAKEN & self.extra.keys())}")
        for name in _TEXTS:  # a name of the user's files may hold escapes, and rows reach terminals and pull requests
            if isinstance(text := getattr(self, name), str) and not text.isprintable():
                object.__setattr__(self, name, printable(text))
        for name, value in self.extra.items():
            if isinstance(value, str) and not value.isprintable():
                self.extra[name] = printable(value)

    def to_json(self) -> dict[str, Any]:
        """Return one flat object; JSON has no infinity, so infinite numbers become text that float() reads."""
        values = {name: getattr(self, name) for name in _FIELDS_IN_ORDER}
        for name in _NUMBERS:
            if values[name] is not None and not math.isfinite(values[name]):
                values[name] = str(values[name])
        return {"schema": SCHEMA} | values | self.extra

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Row:
        """Return the row of a flat object; names that are no fields of a row go to `extra`."""
        values = {name: value for name, value in row.items() if name in _FIELDS}
        numbers = {name: float(values[name]) for name in _NUMBERS if isinstance(values.get(name), str)}
        extra = {name: value for name, value in row.items() if name not in _FIELDS and name != "schema"}
        return cls(**(values | numbers), extra=extra)


_FIELDS_IN_ORDER = [f.name for f in fields(Row) if f.name != "extra"]
_FIELDS = frozenset(_FIELDS_IN_ORDER)
_TAKEN = _FIELDS | {"schema", "group", "extra"}  # no names of labels in `extra`
_NUMBERS = ("value", "low", "high")
_TEXTS = ("model", "dataset", "pruner", "defense", "attack", "metric", "note")
_PER_ROW = ("metric", *_NUMBERS, *("round", "stage", "epoch", "client", "target", "trial", "item"))  # not of the group


def select_comparable(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the rows that two runs of one configuration must share, as JSON: all that are not times."""
    return [row.to_json() for row in rows if not row.timing]


class Groups:
    """The groups and notes that short lines of rows refer to, by number.

    Example:
        >>> groups = Groups()
        >>> row = Row(model="mlp", dataset="digits", seed=0, metric="auc", value=0.5, extra={"round": 3})
        >>> groups.shorten(row)
        {'group': 0, 'metric': 'auc', 'value': 0.5, 'round': 3}
        >>> Groups(groups.lines).expand({"group": 0, "metric": "auc", "value": 0.5, "round": 3}) == row
        True
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self.lines: list[dict[str, Any]] = []  # of groups.jsonl; lines are added, never changed
        self._groups: list[dict[str, Any]] = []
        self._notes: list[str] = []
        self._numbers: dict[str, int] = {}
        self._split: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        for line in lines:
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Add the group or the note of a line of groups.jsonl."""
        if "group" in line:
            self._number_group({name: value for name, value in line.items() if name not in ("schema", "group")})
        else:
            self._number_note(line["text"])

    def shorten(self, row: Row) -> dict[str, Any]:
        """Return the short line of a row; add its group and its note if they are new."""
        shared = row.to_json()
        del shared["schema"]
        short = {name: shared.pop(name) for name in _PER_ROW if shared.get(name) is not None}
        note, timing = shared.pop("note"), shared.pop("timing")
        short |= {} if note is None else {"note": self._number_note(note)}
        return {"group": self._number_group(shared)} | short | ({"timing": True} if timing else {})

    def expand(self, line: Mapping[str, Any]) -> Row:
        """Return the row of a line: a short one, or a flat object as schema 1 wrote it."""
        if "group" not in line:
            return Row.from_json(line)
        fields, extra = self._split_group(line["group"])
        values, more = dict(fields), dict(extra)
        for name, value in line.items():
            if name in _NUMBERS and isinstance(value, str):
                values[name] = float(value)
            elif name == "note":
                values[name] = self._notes[value]
            elif name in _FIELDS:
                values[name] = value
            elif name != "group":
                more[name] = value
        return Row(**values, extra=more)

    def _split_group(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the fields of a group, and its other labels; split once, as a group has many rows."""
        if number not in self._split:
            row = Row.from_json({"metric": "", "value": None} | self._groups[number])
            fields = {name: value for name, value in vars(row).items() if name in self._groups[number]}
            self._split[number] = fields, row.extra
        return self._split[number]

    def _number_group(self, shared: dict[str, Any]) -> int:
        key = json.dumps(shared, sort_keys=True)
        if key not in self._numbers:
            self._numbers[key] = len(self._groups)
            self.lines.append({"schema": SCHEMA, "group": len(self._groups)} | shared)
            self._groups.append(shared)
        return self._numbers[key]

    def _number_note(self, note: str) -> int:
        key = f"note {note}"  # never JSON, so never a group's key
        if key not in self._numbers:
            self._numbers[key] = len(self._notes)
            self.lines.append({"schema": SCHEMA, "note": len(self._notes), "text": note})
            self._notes.append(note)
        return self._numbers[key]


def pack(rows: Iterable[Row]) -> dict[str, Any]:
    """Return rows as JSON, with the groups that they refer to."""
    groups = Groups()
    short = [groups.shorten(row) for row in rows]
    return {"groups": groups.lines, "rows": short}


def unpack(packed: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a result of `pack`."""
    groups = Groups(packed["groups"])
    return [groups.expand(line) for line in packed["rows"]]


def join_notes(*notes: str | None) -> str | None:
    """Join the notes of a row that are there; None if none is.

    Example:
        >>> join_notes("few targets", None, "no truth"), join_notes(None)
        ('few targets; no truth', None)
    """
    return "; ".join(filter(None, notes)) or None
