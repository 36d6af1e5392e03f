"""Evaluation of membership guesses on a run's model, a user's model or saved predictions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.interfaces import BlackBox, Guesses, Predict
from secateur.metrics.epsilon import Counts
from secateur.metrics.membership import evaluate, roc, roc_figure
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


def attack_rows(labels: dict[str, Any], result: dict[str, Any]) -> list[Row]:
    """Return the result of `evaluate_guesses` as rows; a TPR of 0 only because the score ties has no value."""
    rows = []
    for name, estimate in result["estimates"].items():
        note = join_notes(estimate["note"], result["note"])
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
