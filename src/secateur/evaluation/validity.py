"""Validity of an audit: checks of the data and the model, without which no verdict can be trusted.

Each check is a row of the run with the metric `valid`: 1 where it holds, 0 where it does not, and a sentence.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from secateur.attacks.membership.reference_models import content
from secateur.interfaces import Batch, Guesses
from secateur.metrics.estimates import difference, p_above
from secateur.metrics.membership import Estimate, evaluate, share
from secateur.runs.rows import Row
from secateur.seeding import derive

METRIC = "valid"
SWAPPED = "swapped"
MEMBERS_FIRST = (
    "members come first: the first train_size rows (or the file's member column) must be those that the model was "
    "trained on"
)
BLIND_LEVEL = 0.001  # chance of a false alarm of the blind baseline
BLIND_ROWS = 2000  # of each side: enough for an AUC of .53 to be seen
SIDE = 8  # pictures are averaged to at most 8 x 8 pixels for the blind baseline
TREES = 50
DUPLICATES = 0.01  # share of non-members that may be members too
LEARNT = 0.3  # share of the way from chance to 1 that a trained model's members reach
SWAPPED_LEVEL = 0.0005  # one side of a 99.9 % interval
SWAPPED_ACCURACY, SWAPPED_AUC = 0.01, 0.53  # others known better than members by less may be an easier sample
APART = 0.15  # difference in accuracy beyond which shadows do not resemble the victim


class Validity(NamedTuple):
    """One check: its name, the answer, and the answer as a sentence."""

    name: str
    holds: bool
    sentence: str


class Accuracy(NamedTuple):
    """Accuracy of a model on the rows that it was trained on, and on others."""

    train: float
    test: float


def check_rows(members: Batch, nonmembers: Batch, classes: int, seed: int) -> list[Validity]:
    """Return the checks of the data: duplicates, a blind baseline, and labels that skip classes."""
    return [duplicates(members, nonmembers), blind_baseline(members, nonmembers, seed), labels(members, classes)]


def duplicates(members: Batch, nonmembers: Batch) -> Validity:
    """Check that hardly any example is a member and a non-member; tables of few values have some by chance."""
    inside, outside = set(content(members.inputs)), content(nonmembers.inputs)
    shared = sum(key in inside for key in outside)
    if not shared:
        return Validity("duplicates", True, "no example is a member and a non-member")
    sentence = f"{shared} of {len(outside)} non-members are members too; leave them out"
    return Validity("duplicates", shared <= DUPLICATES * len(outside), sentence)


def blind_baseline(members: Batch, nonmembers: Batch, seed: int) -> Validity:
    """Check that members and non-members cannot be told apart without the model, by a forest on the inputs alone.

    A shifted population, such as other years or another camera, would be taken for leakage of the model.
    """
    estimate = blind_auc(members, nonmembers, seed)
    shown = f"AUC {estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
    if p_above(estimate, 0.5) > BLIND_LEVEL:
        return Validity("blind", True, f"a classifier that never asks the model is not shown to beat chance: {shown}")
    return Validity(
        "blind",
        False,
        f"members and non-members differ by themselves: a classifier that never asks the model reaches {shown}; "
        "draw both from the same population",
    )


def blind_auc(members: Batch, nonmembers: Batch, seed: int) -> Estimate:
    """Return the AUC of a random forest on inputs and labels, by trees that did not see the example."""
    from sklearn.ensemble import RandomForestClassifier

    rng = derive(seed, "blind")
    sides = [_sample(side, rng) for side in (members, nonmembers)]
    is_member = torch.cat([torch.ones(sides[0].size), torch.zeros(sides[1].size)]).bool()
    features = np.concatenate([_features(side) for side in sides])
    forest = RandomForestClassifier(
        TREES, oob_score=True, min_samples_leaf=3, class_weight="balanced", random_state=seed, n_jobs=1
    )
    forest.fit(features, is_member.numpy())
    scores = torch.from_numpy(np.nan_to_num(forest.oob_decision_function_[:, 1], nan=0.5))
    return evaluate(Guesses(scores, None), is_member)["auc"]


def labels(members: Batch, classes: int) -> Validity:
    """Check that every class of the model has members."""
    missing = sorted(set(range(classes)) - set(members.labels.tolist()))
    if not missing:
        return Validity("labels", True, f"all {classes} classes have members")
    listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
    return Validity("labels", False, f"no member has the label {listed}; labels must count the classes from 0")


def outputs(kind: str) -> list[Validity]:
    """Return a sentence on the kind of a model's outputs; none on logits, which everyone expects."""
    sentences = {
        "probabilities": "the model returns probabilities, so no second softmax was applied",
        "log-probabilities": "the model returns log-probabilities, whose softmax gives the probabilities",
    }
    return [Validity("outputs", True, sentences[kind])] if kind in sentences else []


def member_accuracy(accuracy: float, classes: int) -> Validity:
    """Check that a model that was brought along knows its members, which a wrong scaling of inputs prevents."""
    chance = 1 / classes
    if accuracy >= chance + LEARNT * (1 - chance):
        return Validity("members", True, f"the model is right on {100 * accuracy:.1f} % of its members")
    sentence = f"the model is right on {100 * accuracy:.1f} % of its members only; is the normalisation yours?"
    return Validity("members", False, sentence)


def doubt_order(hits: Tensor, confidence: Tensor, is_member: Tensor) -> list[Validity]:
    """Return the doubt that members and others are swapped, for a model as it was trained; none if there is no sign.

    Args:
        hits: (N,) 1 where the model is right.
        confidence: (N,) probability of the true label.
        is_member: (N,) bool.
    """
    inside, outside = share(hits[is_member]), share(hits[~is_member])
    if outside.value < inside.value:
        return []  # a defense may leave members less confident, but not less often right
    shown = f"the model is right on {100 * inside.value:.1f} % of the members and {100 * outside.value:.1f} % of others"
    if p_above(difference(outside, inside), SWAPPED_ACCURACY) > SWAPPED_LEVEL:
        auc = evaluate(Guesses(confidence, None), ~is_member)["auc"]
        if p_above(auc, SWAPPED_AUC) > SWAPPED_LEVEL:
            return []
        shown += f", and is surer of others (AUC {auc.value:.3f} [{auc.low:.3f}, {auc.high:.3f}])"
    return [Validity(SWAPPED, False, f"members and others look swapped: {shown}; {MEMBERS_FIRST}")]


def resemblance(victim: Accuracy, shadows: Sequence[Accuracy], rows: Sequence[int]) -> Validity:
    """Check that the shadow models are like the victim: as accurate on their own members, and on others.

    Args:
        victim: accuracy of the audited model.
        shadows: accuracies of the attacker's models; on rows that they were trained on NaN if there are none.
        rows: number of rows that each of these was trained on; 0 if none of the rows is known.
    """
    measured = [[value for value in side if not math.isnan(value)] for side in zip(*shadows, strict=True)]
    named = zip(("train", "test"), measured, victim, strict=True)
    sides = [(name, sum(values) / len(values), accuracy) for name, values, accuracy in named if values]
    numbers = f"{min(rows)} to {max(rows)}" if len(set(rows)) > 1 else f"{rows[0]}"
    shadowed, known = (", ".join(f"{side[0]} {100 * side[i]:.1f} %" for side in sides) for i in (1, 2))
    trained = f"each trained on {numbers} rows" if max(rows) else "trained on none of the rows"
    shown = f"{len(shadows)} shadow models, {trained}: {shadowed}; the victim: {known}"
    if max(abs(mean - accuracy) for _, mean, accuracy in sides) <= APART:
        return Validity("shadows", True, f"the shadows resemble the victim ({shown})")
    return Validity("shadows", False, f"the shadows do not resemble the victim ({shown})")


def doubt_training(gain: Estimate, recipe: str) -> Validity:
    """Return the doubt about an original that fine-tuning alone makes more accurate."""
    shown = f"{gain.value:.3f} [{gain.low:.3f}, {gain.high:.3f}]"
    problem = f"the original is not trained out: {recipe} is more accurate by {shown}, on the rows that chose"
    return Validity("original", False, f"{problem}; train it longer (train: {{patience: 20, monitor: accuracy}})")


def count_shadows(rows: Sequence[Row]) -> int:
    """Return the largest number of shadow models that the sentences of `resemblance` name; 0 if there are none."""
    notes = [row.note or "" for row in rows if row.metric == METRIC and row.extra.get("check") == "shadows"]
    return max((int(match[1]) for note in notes if (match := re.search(r"(\d+) shadow models", note))), default=0)


def validity_rows(labels: dict[str, Any], checks: Sequence[Validity]) -> list[Row]:
    """Return checks as rows."""
    named = [labels | {"extra": labels.get("extra", {}) | {"check": check.name}} for check in checks]
    return [
        Row(**row, metric=METRIC, value=float(check.holds), note=check.sentence)
        for row, check in zip(named, checks, strict=True)
    ]


def failures(rows: Sequence[Row], name: str | None = None) -> list[str]:
    """Return the sentences of the checks that do not hold; of all, or of the one with this name."""
    failed = [row for row in rows if row.metric == METRIC and row.value == 0]
    return list(dict.fromkeys(row.note or "" for row in failed if name in (None, row.extra.get("check"))))


def doubt_leaks(rows: Sequence[Row]) -> list[str]:
    """Return the failures under which a leak may be none: members that differ by themselves, or are swapped."""
    return failures(rows, "blind") + failures(rows, SWAPPED)


def _sample(batch: Batch, rng: torch.Generator) -> Batch:
    if batch.size <= BLIND_ROWS:
        return batch
    return batch.take(torch.randperm(batch.size, generator=rng)[:BLIND_ROWS].to(batch.labels.device))


def _features(batch: Batch) -> np.ndarray:
    """Return (N, D) inputs, pictures averaged to few pixels, and the label."""
    inputs: Tensor = batch.inputs.detach().float().cpu()
    if inputs.ndim == 4 and min(inputs.shape[2:]) > SIDE:
        inputs = adaptive_avg_pool2d(inputs, SIDE)
    label = batch.labels.cpu().float()[:, None]
    table: np.ndarray = torch.cat([inputs.flatten(1), label], 1).numpy()
    return table
