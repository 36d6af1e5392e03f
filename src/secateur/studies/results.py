"""Results of a study: its rows by key, with means and differences over seeds; the results of an audit.

A key is a record of the settings that rows are measured in, such as a model or a federation. Each paper's results have
a key of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import sub
from typing import Any, Generic, NamedTuple, TypeVar

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, combine, mean
from secateur.metrics.membership import Estimate
from secateur.report.summary import estimate
from secateur.runs.rows import Row

K = TypeVar("K", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Results(ABC, Generic[K]):
    """The rows of one study by key, metric and attack."""

    rows: Sequence[Row]

    @abstractmethod
    def key_of(self, row: Row) -> K | None:
        """Return the key of a row; None for a row that is left out."""

    def attack_of(self, row: Row) -> Hashable:
        """Return the attack of a row by the name that tables have for it; None without an attack."""
        return None if row.attack is None else name_of(row.attack)

    @cached_property
    def cells(self) -> dict[K, dict[tuple[str, Any], list[Row]]]:
        """Rows by key, then by metric and attack, in the order of measurement."""
        cells: dict[K, dict[tuple[str, Any], list[Row]]] = {}
        for row in self.rows:
            if (key := self.key_of(row)) is not None:
                cells.setdefault(key, {}).setdefault((row.metric, self.attack_of(row)), []).append(row)
        return cells

    def rows_of(self, key: K | None, metric: str, attack: Hashable = None, **extra: Any) -> list[Row]:
        """Return the rows that have a value; `extra` are labels that they must have."""
        cells = {} if key is None else self.cells.get(key, {})
        return [
            row
            for row in cells.get((metric, attack), ())
            if row.value is not None and all(row.extra.get(name) == value for name, value in extra.items())
        ]

    def of(self, key: K | None, metric: str, attack: Hashable = None, **extra: Any) -> Measure:
        """Return one measure by seed; it is empty if it was not measured."""
        return {row.seed: estimate(row) for row in self.rows_of(key, metric, attack, **extra)}

    def mean(self, key: K | None, metric: str, attack: Hashable = None) -> Estimate | None:
        """Return the mean of a measure over seeds; None if it was not measured."""
        return mean(self.of(key, metric, attack))

    def less(self, one: K | None, other: K | None, metric: str, attack: Hashable = None) -> Estimate | None:
        """Return the measure of one key minus that of another; None if one was not measured."""
        return combine(sub, self.of(one, metric, attack), self.of(other, metric, attack))

    @cached_property
    def keys(self) -> list[K]:
        """All keys, in the order of measurement."""
        return list(self.cells)

    @cached_property
    def attacks(self) -> list[Any]:
        """All attacks, by the names that tables have for them."""
        return self.attacks_on(*self.cells)

    def attacks_on(self, *keys: K) -> list[Any]:
        """Return the attacks on these keys."""
        cells = [self.cells[key] for key in keys]
        return list(dict.fromkeys(attack for cell in cells for _, attack in cell if attack is not None))

    def select(self, **labels: Any) -> Iterator[K]:
        """Yield the keys with these labels; a defense is named without settings (priprune+dp)."""
        for key in self.cells:
            if all(value == self.label(key, name) for name, value in labels.items()):
                yield key

    def label(self, key: K, name: str) -> Any:
        """Return a label of a key, as `select` compares it."""
        value = getattr(key, name)
        return names_of(value) if name == "defense" else value

    def one(self, **labels: Any) -> K | None:
        """Return the first key with these labels; None if there is none."""
        return next(self.select(**labels), None)

    def other(self, key: K, **changes: Any) -> K | None:
        """Return the key that differs from another by these labels alone; None if there is none."""
        labels: Any = key
        return self.one(**(labels._asdict() | changes))


def names_of(defense: str) -> str:
    """Return a defense without its settings, also of several that act together.

    Example:
        >>> names_of("priprune:accuracy=10.0:privacy=1.0+dp:delta=0.1"), names_of("none")
        ('priprune+dp', 'none')
    """
    return "+".join(map(name_of, defense.split("+")))


class VictimKey(NamedTuple):
    """A victim model, named by its pruner, sparsity, defense and original."""

    pruner: str  # none: an original
    sparsity: float
    defense: str
    original: str | None  # the pruner whose loss term the original was trained with (network slimming)

    @property
    def title(self) -> str:
        """Title of the model for readers."""
        if self.pruner == "none":
            return f"original ({self.original})" if self.original else "original"
        return f"{self.pruner} {self.sparsity:g}" + ("" if self.defense == "basic" else f" {self.defense}")

    @property
    def source(self) -> VictimKey:
        """The original that the model was pruned from."""
        return VictimKey("none", 0.0, "basic", self.original)


@dataclass(frozen=True)
class AuditResults(Results[VictimKey]):
    """The rows and figures of one audit, by victim."""

    figures: Sequence[Mapping[str, Any]] = ()

    def key_of(self, row: Row) -> VictimKey:
        """Return the victim of a row."""
        return VictimKey(row.pruner or "none", row.sparsity or 0.0, row.defense or "basic", row.extra.get("original"))

    @cached_property
    def pruned(self) -> list[VictimKey]:
        """The pruned victims."""
        return [model for model in self.cells if model.pruner != "none"]

    def figures_of(self, model: VictimKey, kind: str, quantity: str) -> dict[int, Mapping[str, Any]]:
        """Return one figure of a model, by seed."""
        return {
            figure["seed"]: figure
            for figure in self.figures
            if (figure["kind"], figure.get("quantity")) == (kind, quantity)
            and (figure["pruner"], figure["sparsity"], figure["defense"], figure.get("original")) == model
        }
