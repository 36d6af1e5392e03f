"""An attack's guesses against the truth, whatever was attacked: a run's model, a user's own, or saved predictions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from secateur.interfaces import BlackBox, Guesses, Predict
from secateur.metrics.curves import roc_figure
from secateur.metrics.membership import evaluate, roc
from secateur.runs.rows import Row
from secateur.seeding import derive


def judged(guesses: Guesses, is_member: Tensor, seed: int) -> dict[str, Any]:
    """An attack's guesses against the truth, as plain values: measures with intervals, the ROC curve, the note."""
    found = evaluate(guesses, is_member, derive(seed, "bootstrap"))
    estimates = {name: estimate._asdict() for name, estimate in found.items()}
    figure = roc_figure(roc(guesses.scores.cpu().double(), is_member))
    return {"estimates": estimates, "figure": figure, "note": guesses.note}


def attack_rows(labels: dict[str, Any], found: dict[str, Any]) -> list[Row]:
    """What `judged` found, as rows."""
    rows = []
    for name, estimate in found["estimates"].items():
        note = "; ".join(filter(None, (estimate["note"], found["note"]))) or None
        rows.append(Row(**labels, metric=name, **(estimate | {"note": note})))
    return rows


def remembering(predict: Predict) -> BlackBox:
    """A model as an attacker meets it; the same question is answered from memory."""
    answers = WeakTensorKeyDictionary()

    def answer(inputs: Tensor) -> Tensor:
        if inputs not in answers:
            answers[inputs] = predict(inputs)
        answered: Tensor = answers[inputs]
        return answered

    return BlackBox(answer)


def flat(labels: dict[str, Any]) -> dict[str, Any]:
    """Labels as a figure has them: extras beside the others."""
    extra: dict[str, Any] = labels["extra"]
    return {name: value for name, value in labels.items() if name != "extra"} | extra
