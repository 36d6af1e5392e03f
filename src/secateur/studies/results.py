"""Results of a study: its rows by key, with means and differences over seeds, and claims; the results of an audit.

A key is a record of the settings that rows are measured in, such as a model or a federation. Each paper's results have
a key of their own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import sub
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from secateur.catalogue import name_of
from secateur.metrics.estimates import Measure, combine, mean, pick_highest
from secateur.metrics.membership import Estimate
from secateur.report.summary import estimate
from secateur.runs.rows import Row
from secateur.studies import read_data
from secateur.studies.table import Cases, Finding, judge

K = TypeVar("K", bound=tuple[Any, ...])


@dataclass(frozen=True)
class Results(ABC, Generic[K]):
    """The rows of one study by key, metric and attack."""

    rows: Sequence[Row]
    paper: ClassVar[str]  # the package that has the claims

    @abstractmethod
    def key_of(self, row: Row) -> K | None:
        """Return the key of a row; None for a row that is left out."""

    def under_strongest(self) -> Self | None:
        """Return the same results, every defense under the strongest attacker that it met; None if there is none."""
        return None

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
        """Yield the keys with these labels; a list has all values that a label may have."""
        for key in self.cells:
            if all(self.label(key, x) in (y if isinstance(y, list) else [y]) for x, y in labels.items()):
                yield key

    def label(self, key: K, name: str) -> Any:
        """Return a label of a key, as `select` compares it; a defense is named without settings (priprune+dp)."""
        value = getattr(key, name)
        return self.name_defense(value) if name == "defense" else value

    def name_defense(self, defense: str) -> str:
        """Return the name by which `select` knows a defense."""
        return names_of(defense)

    def title(self, key: K) -> str:
        """Return the name of a key among the cases of a claim."""
        return str(getattr(key, "title", key))

    def one(self, **labels: Any) -> K | None:
        """Return the first key with these labels; None if there is none."""
        return next(self.select(**labels), None)

    def other(self, key: K, **changes: Any) -> K | None:
        """Return the key that differs from another by these labels alone; None if there is none."""
        names: Sequence[str] = getattr(key, "_fields", ())
        return self.one(**({name: self.label(key, name) for name in names} | changes)) if changes else key

    def contrast(self, one: K | None, other: K | None, metric: str, case: str) -> Cases:
        """Return the metric of one key less that of another, as one or more cases of a claim."""
        return {case: self.less(one, other, metric)}

    def compare(self, claim: Mapping[str, Any], words: Mapping[str, str]) -> Cases:
        """Return the cases of a claim: a metric of two keys, for each key with the labels of `each`.

        `higher` and `lower` are the labels in which the two differ from that key, or the name of a related key.
        """
        cases: Cases = {}
        for key in self.select(**claim["each"]):
            one, other = (self._find_related(key, claim.get(side, {})) for side in ("higher", "lower"))
            case = claim.get("case", "{title}").format(key=key, title=self.title(key))
            cases |= self.contrast(one, other, claim["metric"].format(**words), case)
        return cases

    def _find_related(self, key: K, related: str | Mapping[str, Any]) -> K | None:
        if isinstance(related, str):
            other: K = getattr(key, related)
            return other
        return self.other(key, **{x: y.format(key=key) if isinstance(y, str) else y for x, y in related.items()})

    def judge(
        self, table: str, words: Mapping[str, str] | None = None, /, **cases: Mapping[str, Estimate | None]
    ) -> list[Finding]:
        """Judge all claims of a table in claims.json, in their order.

        Args:
            table: The table.
            words: Texts for the placeholders of the claims.
            cases: Cases of the claims that do not say what they compare, by the name of the claim.
        """
        findings, texts = [], words or {}
        for name, claim in read_data(self.paper, "claims")[table].items():
            measured = cases[name] if name in cases else self.compare(claim, texts)
            unit = claim.get("unit", "points").format(**texts)
            sentence, need, bound = claim["claim"].format(**texts), claim.get("need", "most"), claim.get("bound", 0.0)
            findings.append(judge(sentence, measured, need, bound, unit, f"{table}.{name}"))
        return findings


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
        if not self.pruned:
            return f"original ({self.original})" if self.original else "original"
        return f"{self.pruner} {self.sparsity:g}" + ("" if self.defense == "basic" else f" {self.defense}")

    @property
    def pruned(self) -> bool:
        """True if the model is no original."""
        return self.pruner != "none"

    @property
    def source(self) -> VictimKey:
        """The original that the model was pruned from."""
        return VictimKey("none", 0.0, "basic", self.original)

    @property
    def defended(self) -> bool:
        """True if a pruned model has a defense."""
        return self.defense != "basic"

    @property
    def basic(self) -> VictimKey:
        """The same model without a defense."""
        return self._replace(defense="basic")


@dataclass(frozen=True)
class AuditResults(Results[VictimKey]):
    """The rows and figures of one audit, by victim."""

    paper: ClassVar[str] = "samia"
    figures: Sequence[Mapping[str, Any]] = ()
    strongest: bool = False  # samia stands for the best of all attacks on each victim

    def key_of(self, row: Row) -> VictimKey:
        """Return the victim of a row."""
        return VictimKey(row.pruner or "none", row.sparsity or 0.0, row.defense or "basic", row.extra.get("original"))

    @cached_property
    def pruned(self) -> list[VictimKey]:
        """The pruned victims."""
        return [model for model in self.cells if model.pruned]

    def under_strongest(self) -> Self | None:
        """Return the same results in which samia stands for the best attack on each victim, by each measure.

        The best has the highest mean, among those of most seeds. None if no attack met a defense.
        """
        if not any(model.defended and self.attacks_on(model) for model in self.keys):
            return None
        rows = [row for row in self.rows if row.attack is None]
        for model, cell in self.cells.items():
            for metric in ("attack_accuracy", "auc"):
                best = pick_highest({attack: self.of(model, metric, attack) for attack in self.attacks_on(model)})
                if best is not None:
                    rows += [replace(row, attack="samia") for row in cell[metric, best]]
        return replace(self, rows=rows, strongest=True)

    def figures_of(self, model: VictimKey, kind: str, quantity: str) -> dict[int, Mapping[str, Any]]:
        """Return one figure of a model, by seed."""
        return {
            figure["seed"]: figure
            for figure in self.figures
            if (figure["kind"], figure.get("quantity")) == (kind, quantity)
            and (figure["pruner"], figure["sparsity"], figure["defense"], figure.get("original")) == model
        }
