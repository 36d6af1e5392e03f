"""Row query of the report: rows and figures by their labels, groups, means over seeds, and the lines of tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from secateur.catalogue import name_of
from secateur.evaluation.limits import average_trainings
from secateur.metrics.membership import Estimate
from secateur.runs.rows import Row

NAMES = ("model", "dataset", "pruner", "sparsity", "defense", "adaptive", "attack")
MODEL = ("run", "model", "dataset", "pruner", "sparsity", "defense", "original")  # other labels describe the attacker
CONTENT = (
    "kind",
    "quantity",
    "fpr",
    "tpr",
    "edges",
    "members",
    "nonmembers",
    "member_mean",
    "nonmember_mean",
    "records",
)
APART = ("valid", "layer_sparsity")  # metrics of a check or a layer: no line of a table
SIGNED = ("advantage", "gap", "drop", "change", "ami", "psnr")  # words in the names of measures that may be below 0
GRID = 120  # points of a mean curve
DEEDS = {"int8": "quantisation", "distil": "distillation", "none": "none"}  # other compressors prune
MOST_NAMES = 40  # names that a sentence lists
Key = tuple[tuple[str, Any], ...]
Labels = Mapping[str, Any]
Item = TypeVar("Item")
GroupKey = TypeVar("GroupKey", bound=Hashable)


@dataclass(frozen=True)
class SummaryCell:
    """Measure over the seeds: the mean, and the interval of a single seed or over the trainings of several."""

    value: float | None
    low: float | None
    high: float | None
    note: str | None = None


@dataclass(frozen=True)
class SummaryLine:
    """A line of a table: measures of one model, of one attack, of a client or of a federation."""

    labels: dict[str, Any]
    cells: dict[str, SummaryCell] = field(default_factory=dict)
    rows: Sequence[Row] = ()  # the rows that were summarised

    @property
    def title(self) -> str:
        """The name of the model, without its defense."""
        return name_compression(self.labels)

    @property
    def pruned(self) -> bool:
        """True if the model was pruned."""
        return is_pruned(self.labels)

    def value(self, metric: str) -> float | None:
        """Return a measure's mean; None if it was not measured."""
        return self.cells[metric].value if metric in self.cells else None

    def rank(self, metric: str) -> float:
        """Return a measure's mean for comparisons; a missing value is below every other."""
        value = self.value(metric)
        return -math.inf if value is None else value


@dataclass(frozen=True)
class Record:
    """One curve, histogram or set of class means, with the labels of its row."""

    kind: str
    quantity: str | None
    labels: dict[str, Any]
    content: dict[str, Any]


def read_labels(row: Row) -> dict[str, Any]:
    """Return all labels of a row, those in `extra` included, without its seed."""
    return {name: getattr(row, name) for name in NAMES} | row.extra


def select_rows(rows: Iterable[Row], *metrics: str, **labels: Any) -> list[Row]:
    """Return the rows that have a value, one of the metrics and all of the labels.

    Args:
        rows: the rows to select from.
        metrics: names of metrics; any metric if there are none.
        labels: the value of each label; None also selects rows without the label.

    Example:
        >>> row = Row(model="m", dataset="d", seed=0, metric="auc", value=0.5, extra={"round": 3})
        >>> len(select_rows([row], "auc", model="m", round=3)), len(select_rows([row], round=4))
        (1, 0)
    """
    return [
        row
        for row in rows
        if row.value is not None
        and (not metrics or row.metric in metrics)
        and all((getattr(row, name) if name in NAMES else row.extra.get(name)) == x for name, x in labels.items())
    ]


def group_by(items: Iterable[Item], key: Callable[[Item], GroupKey]) -> dict[GroupKey, list[Item]]:
    """Group items by a key; groups and their items keep their order."""
    groups: dict[GroupKey, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def average(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known; None if there are none."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def average_cell(values: Iterable[float | None]) -> SummaryCell:
    """Return a mean without an interval."""
    return SummaryCell(average(values), None, None)


def average_along(rows: Iterable[Row], read: Callable[[Row], Any]) -> dict[Any, float]:
    """Return the mean value of rows at each point that `read` returns, in rising order; seeds and clients alike."""
    means = {at: average(row.value for row in same) for at, same in group_by(rows, read).items()}
    return {at: mean for at, mean in sorted(means.items()) if mean is not None}


def differ(labelled: Iterable[Labels], name: str) -> bool:
    """Return True if a label has several values."""
    return len({labels.get(name) for labels in labelled}) > 1


def join_distinct(values: Iterable[Any]) -> str:
    """Return the different values in their order, separated by commas, and how many more there are; without None."""
    names = list(
        dict.fromkeys(f"{x:g}" if isinstance(x, float) else str(x) for x in dict.fromkeys(values) if x is not None)
    )
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def is_pruned(labels: Labels) -> bool:
    """Return True if the labels are of a pruned model, not of an original."""
    return labels["pruner"] not in (None, "none")


def name_setting(labels: Labels) -> str:
    """Name a network and its data, and the run if the page has several."""
    name = f"{labels['model']} on {labels['dataset']}"
    return f"{labels['run']}: {name}" if labels.get("run") else name


def name_compression(labels: Labels) -> str:
    """Name a model by its pruner and sparsity, or as the original.

    Example:
        >>> name_compression({"pruner": "snip", "sparsity": 0.70})
        'snip 0.7'
    """
    if labels["sparsity"] and labels["pruner"] in ("none", "given"):
        return f"pruned as given, {100 * labels['sparsity']:.0f} % sparse"
    if labels["pruner"] == "given":
        return "the model"
    if not is_pruned(labels):
        training = labels.get("original")
        return f"original ({training})" if training else "original"
    return f"{labels['pruner']} {labels['sparsity']:g}" if labels["sparsity"] else str(labels["pruner"])


def name_deed(compressors: Iterable[tuple[str | None, float | None]]) -> str:
    """Return the word for what compressors did, each with its sparsity; compression where they did different things.

    Example:
        >>> name_deed([("none", 0.0), ("int8", 0.0)]), name_deed([("snip", 0.7), ("l1-structured", 0.5)])
        ('quantisation', 'pruning')
    """
    words = set()
    for name, sparsity in compressors:
        deeds = DEEDS if sparsity else DEEDS | {"given": "compression"}
        parts = [deeds.get(name_of(part), "pruning") for part in (name or "none").split("+")]
        words |= {" and ".join(dict.fromkeys(parts))} - {"none"}
    return words.pop() if len(words) == 1 else "compression"


def name_model(labels: Labels) -> str:
    """Name a model with its defense; an original has one only if trained with the defense from the start."""
    defense = labels["defense"]
    plain = defense in (None, labels["pruner"]) or (defense == "basic" and not is_pruned(labels))
    return name_compression(labels) if plain else f"{name_compression(labels)}, {labels['defense']}"


def model_key(labels: Labels) -> Key:
    """Return the key of a model, without the attack."""
    return tuple((name, labels.get(name)) for name in MODEL)


def attack_key(labels: Labels) -> Key:
    """Return the key of one attack on one model."""
    return tuple(sorted((k, v) for k, v in labels.items() if v is not None))


def setting_key(labels: Labels) -> Key:
    """Return the key of run, network and data; models of different settings are never compared."""
    return model_key(labels)[:3]


def summarise(rows: Iterable[Row], label: Callable[[Row], dict[str, Any]] = read_labels) -> list[SummaryLine]:
    """Return one line for each combination of labels over all seeds, in the order of the rows.

    Args:
        rows: the rows to summarise.
        label: returns the labels of a row; by default all of them, which gives a line per model and attack.
    """
    groups = group_by(rows, _label_key if label is read_labels else lambda row: tuple(label(row).items()))
    return [SummaryLine(label(group[0]), _summarise_cells(group), group) for group in groups.values()]


def _label_key(row: Row) -> tuple[Any, ...]:
    """Return the values of a row's labels, which is faster than a dictionary for each of many rows."""
    named = (row.model, row.dataset, row.pruner, row.sparsity, row.defense, row.adaptive, row.attack)
    return (*named, *row.extra.items()) if row.extra else named


def _summarise_cells(rows: Iterable[Row]) -> dict[str, SummaryCell]:
    return {metric: summarise_cell(same) for metric, same in group_by(rows, lambda row: row.metric).items()}


def summarise_cell(rows: Sequence[Row]) -> SummaryCell:
    """Return the mean of one measure over the seeds; rows without a value add their note only.

    Of several seeds its interval covers trainings and rows, as that of a limit does. A measure without intervals of its
    own has Student's interval over the trainings.
    """
    notes = "; ".join(sorted({row.note for row in rows if row.note})) or None
    known = [row for row in rows if row.value is not None]
    if len(known) == 1:
        return SummaryCell(known[0].value, known[0].low, known[0].high, notes)
    if not known:
        return SummaryCell(None, None, None, notes)
    return SummaryCell(*average_trainings([_estimate_alone(row) for row in known], _bounds(known))[:3], notes)


def _estimate_alone(row: Row) -> Estimate:
    """Return a row's value; a missing end of its interval is the value."""
    assert row.value is not None
    low, high = (row.value if end is None else end for end in (row.low, row.high))
    return Estimate(row.value, low, high)


def _bounds(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the range of a measure as far as its name and rows show it: shares lie between 0 and 1."""
    ends = [end for row in rows for end in (row.value, row.low, row.high) if end is not None]
    share = rows[0].metric.endswith("accuracy") or all(row.low is not None for row in rows)
    signed = min(ends) < 0 or any(word in rows[0].metric for word in SIGNED)
    return -math.inf if signed else 0.0, 1.0 if share and max(ends) <= 1 else math.inf


def select_models(lines: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the lines of models: utility, cost and gaps."""
    return [line for line in lines if line.labels["attack"] is None]


def select_attacks(lines: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the lines of attacks, each with the utility and cost of its model beside the attack's measures."""
    beside = {model_key(line.labels): line.cells for line in select_models(lines)}
    return [
        SummaryLine(line.labels, beside.get(model_key(line.labels), {}) | line.cells, line.rows)
        for line in lines
        if line.labels["attack"] is not None
    ]


def select_strongest(lines: Sequence[SummaryLine], metric: str = "auc") -> list[SummaryLine]:
    """Return for each model the line of its strongest attack, under any knowledge of the attacker.

    An attack without a value is never the strongest.
    """
    measured = [line for line in select_attacks(lines) if line.value(metric) is not None]
    by_model = group_by(measured, lambda line: model_key(line.labels))
    return [max(group, key=lambda line: line.rank(metric)) for group in by_model.values()]


def select_front(
    lines: Iterable[SummaryLine], accuracy: str, *leaks: str, keep_equal: bool = False
) -> list[SummaryLine]:
    """Return the Pareto front, in order of rising accuracy; lines without one of the measures are left out.

    For a line of the front, no other line is at least as accurate, leaks no more, and is better in one measure.

    Args:
        lines: the lines to compare.
        accuracy: the measure that is better if higher.
        leaks: the measures that are better if lower.
        keep_equal: True if lines with equal values are all on the front, else the first one is.
    """
    known = [line for line in lines if all(line.value(metric) is not None for metric in (accuracy, *leaks))]
    values = [(-line.rank(accuracy), *(line.rank(metric) for metric in leaks)) for line in known]
    best: dict[tuple[float, ...], list[int]] = {}  # the front, and the lines at each of its points
    for number in sorted(range(len(known)), key=lambda number: values[number]):  # whoever beats a line comes before it
        mine = values[number]
        if not any(x != mine and all(b <= a for a, b in zip(mine, x, strict=True)) for x in best):
            best.setdefault(mine, []).append(number)
    front = sorted(number for same in best.values() for number in (same if keep_equal else same[:1]))
    return sorted((known[number] for number in front), key=lambda line: line.rank(accuracy))


def group_by_setting(lines: Iterable[SummaryLine]) -> list[list[SummaryLine]]:
    """Group the lines by run, network and data set."""
    return list(group_by(lines, lambda line: setting_key(line.labels)).values())


def find_original(labels: Labels, originals: Iterable[Labels]) -> Labels | None:
    """Return the original of a pruned model: the one that its pruner trained if there is one, else the common one."""
    same = [model for model in originals if setting_key(model) == setting_key(labels) and not is_pruned(model)]

    def rank(model: Labels) -> tuple[int, bool]:
        by_training = {labels["pruner"]: 2, None: 1}.get(model.get("original"), 0)
        return by_training, model["defense"] == labels["defense"]

    return max(same, key=rank, default=None)


def estimate(row: Row) -> Estimate:
    """Return a row's value with its interval; a missing end is infinite."""
    assert row.value is not None
    low = -math.inf if row.low is None else row.low
    return Estimate(row.value, low, math.inf if row.high is None else row.high, row.note)


def gather_figures(figures: Iterable[Labels]) -> list[Record]:
    """Return one record for each kind, quantity and label. Seeds are averaged; of histograms the first is shown.

    Histograms of different seeds have different bins, which a mean would blur.
    """
    groups = group_by(
        figures, lambda figure: (figure["kind"], figure.get("quantity"), attack_key(figure_labels(figure)))
    )
    means = {"roc": _average_curves, "histogram": lambda same: dict(same[0]), "classes": _average_classes}
    return [
        Record(kind, quantity, figure_labels(same[0]), means[kind](same))
        for (kind, quantity, _), same in groups.items()
    ]


def figure_labels(figure: Labels) -> dict[str, Any]:
    """Return the labels of a figure, without its content and its seed."""
    return {k: v for k, v in figure.items() if k not in (*CONTENT, "schema", "seed")}


def _average_curves(figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the mean over seeds of the TPR at each FPR, on a grid that is even in the logarithm."""
    if len(figures) == 1:
        return {"fpr": figures[0]["fpr"], "tpr": figures[0]["tpr"]}
    least = min((x for figure in figures for x in figure["fpr"] if x > 0), default=1e-3)
    grid = np.concatenate([[0.0], np.logspace(math.log10(least), 0, GRID)])
    allowed = (np.searchsorted(figure["fpr"], grid + 1e-12, side="right") - 1 for figure in figures)
    rates = np.mean([np.take(figure["tpr"], last) for figure, last in zip(figures, allowed, strict=True)], axis=0)
    return {"fpr": grid.tolist(), "tpr": rates.tolist()}


def _average_classes(figures: Sequence[Labels]) -> dict[str, Any]:
    """Return the mean of each class over seeds, for members and non-members."""
    return {
        side: [average(values) for values in zip(*(figure[side] for figure in figures), strict=True)]
        for side in ("members", "nonmembers")
    }
