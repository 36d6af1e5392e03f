"""Results of an audit by model and attack, with means and intervals over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from secateur.catalogue import name_of
from secateur.metrics.estimates import INFINITE, Measure, mean
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row


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
class AuditResults:
    """The rows and figures of one audit."""

    rows: Sequence[Row]
    figures: Sequence[Mapping[str, Any]] = ()

    @cached_property
    def models(self) -> list[VictimKey]:
        """All victims, originals included, in the order of measurement."""
        return list(dict.fromkeys(map(_model, self.rows)))

    @cached_property
    def pruned(self) -> list[VictimKey]:
        """The pruned victims."""
        return [model for model in self.models if model.pruner != "none"]

    @cached_property
    def attacks(self) -> list[str]:
        """Names of the attacks, without settings."""
        return list(dict.fromkeys(name_of(row.attack) for row in self.rows if row.attack))

    def of(self, model: VictimKey, metric: str, attack: str | None = None, **extra: Any) -> Measure:
        """Return one measure of a model, or of an attack on the model, by seed."""
        return {
            row.seed: Estimate(row.value, _or(row.low, -INFINITE), _or(row.high, INFINITE), row.note)
            for row in self.rows
            if row.metric == metric
            and row.value is not None
            and (None if row.attack is None else name_of(row.attack)) == attack
            and _model(row) == model
            and all(row.extra.get(name) == value for name, value in extra.items())
        }

    def drawn(self, model: VictimKey, kind: str, quantity: str) -> dict[int, Mapping[str, Any]]:
        """Return one figure of a model, by seed."""
        return {
            figure["seed"]: figure
            for figure in self.figures
            if (figure["kind"], figure.get("quantity")) == (kind, quantity)
            and (figure["pruner"], figure["sparsity"], figure["defense"], figure.get("original")) == model
        }


def lowest(candidates: Iterable[tuple[VictimKey, Measure]]) -> tuple[VictimKey, Measure] | None:
    """Return the model with the smallest mean of a measure, and its measure; None if no model has one."""
    known = [(estimate.value, pair) for pair in candidates if (estimate := mean(pair[1])) is not None]
    return min(known, key=lambda scored: scored[0])[1] if known else None


def _model(row: Row) -> VictimKey:
    return VictimKey(row.pruner or "none", row.sparsity or 0.0, row.defense or "basic", row.extra.get("original"))


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
