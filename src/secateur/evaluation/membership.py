"""Evaluation of membership guesses on a run's model, a user's model or saved predictions.

Single records: the score and rank of every example by every attack, and the most exposed groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.interfaces import BlackBox, Guesses, Predict
from secateur.metrics.epsilon import Counts
from secateur.metrics.membership import Estimate, Z, evaluate, roc, roc_figure
from secateur.runs.rows import Row, join_notes

BOUND = "lower bound on epsilon, for one record; delta {:g}"
COUNTS = tuple(f"epsilon_{name}" for name in Counts._fields)
NO_THRESHOLD = "needs shadow models: without them the attack ranks examples, but has no threshold to decide by"


def evaluate_guesses(guesses: Guesses, is_member: Tensor) -> dict[str, Any]:
    """Evaluate an attack's guesses; return plain values: measures with intervals, the ROC curve, the note."""
    measures = evaluate(guesses, is_member)
    estimates = {name: estimate._asdict() for name, estimate in measures.items()}
    figure = roc_figure(roc(guesses.scores.cpu().double(), is_member))
    return {"estimates": estimates, "figure": figure, "note": guesses.note}


def attack_rows(labels: dict[str, Any], result: dict[str, Any], unmet: str = "") -> list[Row]:
    """Return the result of `evaluate_guesses` as rows; a TPR of 0 only because the score ties has no value.

    Args:
        labels: of the rows.
        result: of `evaluate_guesses`.
        unmet: stronger attackers that the model's defense did not meet; the row of AUC says so.
    """
    rows = []
    for name, estimate in result["estimates"].items():
        note = join_notes(estimate["note"], result["note"], unmet if name == "auc" else None)
        tied = estimate["value"] == 0 and "by the score" in (estimate["note"] or "")
        numbers = {"value": None, "low": None, "high": None} if tied else {}
        rows.append(Row(**labels, metric=name, **(estimate | {"note": note} | numbers)))
    if "balanced_accuracy" not in result["estimates"]:
        rows.append(Row(**labels, metric="balanced_accuracy", value=None, note=NO_THRESHOLD))
    for measure, group, (value, low, high), number in result.get("groups", ()):
        note = join_notes(f"{group}, the worst of {number}", result["small_groups"])
        rows.append(Row(**labels, metric=f"worst_group_{measure}", value=value, low=low, high=high, note=note))
    return rows + bound_rows(labels, result["bound"]) if "bound" in result else rows


def bound_rows(labels: dict[str, Any], bound: dict[str, Any]) -> list[Row]:
    """Return the measured epsilon, and the counts from which the bound at any other level and delta follows."""
    row = Row(**labels, metric="measured_epsilon", value=bound["value"], note=BOUND.format(bound["delta"]))
    counts = zip(COUNTS, bound["counts"], strict=True)
    return [row, *(Row(**labels, metric=name, value=float(count)) for name, count in counts)]


def cache_answers(predict: Predict) -> BlackBox:
    """Wrap a model as a black box that caches its answers, by input tensor."""
    answers = WeakTensorKeyDictionary()

    def answer(inputs: Tensor) -> Tensor:
        if inputs not in answers:
            answers[inputs] = predict(inputs)
        answered: Tensor = answers[inputs]
        return answered

    return BlackBox(answer)


def flat_labels(labels: dict[str, Any]) -> dict[str, Any]:
    """Return the labels of a figure: the entries of `extra` beside the others."""
    extra: dict[str, Any] = labels["extra"]
    return {name: value for name, value in labels.items() if name != "extra"} | extra


SMALLEST_GROUP = 20  # members, and non-members, of a group that is measured
AT_ONCE = 1 << 14  # lines of records.csv that are made at a time
GROUP_MEASURES = ("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.1")


@dataclass(frozen=True)
class ModelRecords:
    """Examples that attacks asked one model about, and their scores."""

    model: str  # its title: pruner, sparsity and defense
    seed: int
    ids: Tensor  # (N,) rows of the data set
    labels: Tensor  # (N,)
    is_member: Tensor  # (N,) bool, the truth
    groups: Sequence[str] | None = None  # (N,) the user's own column
    scores: dict[str, Tensor] = field(default_factory=dict)  # (N,) by attack, high = member


class GroupExposure(NamedTuple):
    """A measure of the group in which an attack does best."""

    measure: str
    group: str
    estimate: Estimate
    groups: int  # that were compared


def ranks(scores: Tensor) -> Tensor:
    """Return the rank of every score (N,), 1 for the highest; ties share the best rank.

    Example:
        >>> ranks(torch.tensor([0.2, 0.9, 0.9, 0.1])).tolist()
        [3, 1, 1, 4]
    """
    level, counts = _count_levels(scores)
    return (counts.cumsum(0) - counts)[level] + 1


def nonmembers_above(scores: Tensor, is_member: Tensor) -> Tensor:
    """Return for every example the share of non-members that score at least as high.

    It is the false-positive rate at which this example is accused. A non-member counts itself.

    Example:
        >>> nonmembers_above(torch.tensor([0.9, 0.5, 0.7, 0.1]), torch.tensor([True, True, False, False])).tolist()
        [0.0, 0.5, 0.5, 1.0]
    """
    level, counts = _count_levels(scores, ~is_member)
    above = counts.cumsum(0)
    return above[level].double() / max(1, int(above[-1]))


def _count_levels(scores: Tensor, chosen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return the place of every score among the distinct ones, highest first, and how many chosen rows are at each."""
    distinct, place = torch.unique(scores.double(), return_inverse=True)
    level = len(distinct) - 1 - place
    return level, torch.bincount(level if chosen is None else level[chosen], minlength=len(distinct))


def write_records(records: Sequence[ModelRecords]) -> Iterator[str]:
    """Yield records.csv: a line for every model and example, with score, rank and false-positive rate by attack."""
    attacks = list(dict.fromkeys(name for part in records for name in part.scores))
    head = ["model", "seed", "id", "label", "group", "member"]
    head += [f"{name} {column}" for name in attacks for column in ("score", "rank", "nonmembers_above")]
    yield ",".join(map(_quote, head)) + "\n"
    for part in records:
        yield from _list_lines(part, attacks)


def list_most_exposed(part: ModelRecords, attack: str, count: int = 10) -> list[dict[str, Any]]:
    """Return the members that an attack is surest of, surest first."""
    scores = part.scores[attack]
    above = nonmembers_above(scores, part.is_member)
    inside = part.is_member.nonzero().squeeze(1)
    order = inside[scores[inside].double().sort(descending=True, stable=True).indices][:count]
    return [
        {"id": int(part.ids[i]), "label": int(part.labels[i]), "score": float(scores[i]), "fpr": float(above[i])}
        | ({} if part.groups is None else {"group": part.groups[i]})
        for i in order.tolist()
    ]


def worst_groups(part: ModelRecords, scores: Tensor) -> tuple[list[GroupExposure], list[dict[str, Any]], str]:
    """Return the worst group by each measure of these scores (N,), all groups, and a note on those that are too small.

    Groups are the classes, and the user's own. As many groups are compared, the interval of the worst is widened to
    hold for all of them (Bonferroni).
    """
    measured: dict[str, dict[str, Estimate]] = {}
    sizes, small = {}, 0
    for name, rows in _groups(part).items():
        truth = part.is_member[rows]
        if min(int(truth.sum()), int((~truth).sum())) < SMALLEST_GROUP:
            small += 1
            continue
        sizes[name] = {"group": name, "members": int(truth.sum()), "nonmembers": int((~truth).sum())}
        estimates = evaluate(Guesses(scores[rows], None), truth)
        measured[name] = {key: estimates[key] for key in GROUP_MEASURES if estimates[key].note is None}
    worst = [
        GroupExposure(key, group, _widen(measured[group][key], len(measured)), len(measured))
        for key in GROUP_MEASURES
        if (group := _find_worst(measured, key)) is not None
    ]
    note = f"{small} groups have fewer than {SMALLEST_GROUP} members or non-members" if small else ""
    every = [
        sizes[name] | {key: list(_widen(value, len(measured))[:3]) for key, value in estimates.items()}
        for name, estimates in measured.items()
    ]
    return worst, every, note


def _groups(part: ModelRecords) -> dict[str, Tensor]:
    """Return the rows (n,) of every class and of every group of the user's own."""
    groups = {f"class {label}": part.labels == label for label in sorted(set(part.labels.tolist()))}
    numbers = {name: number for number, name in enumerate(dict.fromkeys(part.groups or ()))}
    rows = torch.tensor([numbers[name] for name in part.groups or ()])
    groups |= {f"group {name}": rows == number for name, number in numbers.items()}
    return {name: inside.nonzero().squeeze(1) for name, inside in groups.items()}


def _find_worst(measured: Mapping[str, Mapping[str, Estimate]], key: str) -> str | None:
    known = {group: estimates[key].value for group, estimates in measured.items() if key in estimates}
    return max(known, key=lambda group: known[group], default=None)


def _widen(estimate: Estimate, comparisons: int) -> Estimate:
    from scipy.stats import norm

    wider = float(norm.ppf(1 - 0.025 / max(1, comparisons))) / Z
    low = estimate.value - wider * (estimate.value - estimate.low)
    high = estimate.value + wider * (estimate.high - estimate.value)
    return Estimate(estimate.value, max(0.0, low), min(1.0, high), estimate.note)


def _list_lines(part: ModelRecords, attacks: Sequence[str]) -> Iterator[str]:
    """Yield lines of the file, some thousands at a time: a million rows as Python's numbers would fill the memory."""
    columns: list[Tensor] = [part.ids, part.labels, part.is_member.int()]
    cells = [_quote(part.model), str(part.seed), "%d", "%d", "%s", "%d"]
    for name in attacks:
        if name in part.scores:
            scores = part.scores[name].double().cpu()
            columns += [scores, ranks(scores), nonmembers_above(scores, part.is_member)]
        cells += ["%.6g", "%d", "%.6g"] if name in part.scores else [""] * 3
    line = ",".join([cells[0].replace("%", "%%"), *cells[1:]]) + "\n"
    for start in range(0, len(part.ids), AT_ONCE):
        ids, labels, *numbers = (column[start : start + AT_ONCE].tolist() for column in columns)
        groups = map(_quote, part.groups[start : start + AT_ONCE]) if part.groups else [""] * len(ids)
        yield "".join([line % row for row in zip(ids, labels, groups, *numbers, strict=True)])


def _quote(text: str) -> str:
    """Return a cell of a CSV file."""
    return '"' + text.replace('"', '""') + '"' if set(text) & set(',"\r\n') else text
