"""Threshold attacks: a feature of the prediction, compared with thresholds learnt from shadow models.

Conf takes the probability of the true label, Top1-Conf the largest one. Xent, Entropy and Mentr take an entropy.
Correctness is the gap attack, for which a label is enough.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor

from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.inference import Feature, ask, ask_labels, probabilities, true_probability
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

FLOOR = 1e-30  # keeps log finite; needs double precision


@dataclass(frozen=True)
class ThresholdAttack:
    """A feature of the prediction, compared with a threshold learnt from shadows.

    The feature alone ranks the examples, so AUC and TPR at a fixed FPR need no shadows; a decision does.
    """

    feature: Feature
    per_class: bool = True  # a threshold for every class, or one for all
    thresholds: Tensor | None = None  # (K,) after fit
    note: str | None = None

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn the thresholds from the shadows' members and non-members; without shadows there are none."""
        if not isinstance(shadows, InOut) and not shadows:
            return replace(self, thresholds=None, note=None)
        values, labels, is_member, classes = shadow_features(shadows, self.feature)
        if not self.per_class:
            everyone = best_threshold(values[is_member], values[~is_member])
            return replace(self, thresholds=values.new_full((classes,), everyone))
        thresholds, missing = class_thresholds(values, labels, is_member, classes)
        note = f"global threshold for the classes {missing}: no shadow members or non-members" if missing else None
        return replace(self, thresholds=thresholds, note=note)

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the feature; decide by the class's threshold if there is one."""
        labels = candidates.batch.labels
        values = ask(box, candidates.batch, self.feature)
        return Guesses(values, None if self.thresholds is None else values >= self.thresholds[labels], self.note)


def shadow_features(shadows: Sequence[Shadow] | InOut, feature: Feature) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return feature, label and membership of every shadow's own examples, and the number of classes.

    Models over one pool are asked about the whole pool, once each.
    """
    if isinstance(shadows, InOut) and shadows.boxes:
        pool, inside = shadows.pool, shadows.membership.to(shadows.pool.labels.device)
        _require_both(inside)
        features = torch.cat([ask(box, pool, feature) for box in shadows.boxes])
        classes = probabilities(shadows.boxes[0], pool.inputs[:1]).shape[1]
        return features, pool.labels.repeat(len(shadows.boxes)), inside.flatten(), classes
    sides = shadow_sides(shadows)
    values = [ask(box, batch, feature) for box, batch, _ in sides]
    classes = probabilities(sides[0][0], sides[0][1].inputs[:1]).shape[1]
    labels = [batch.labels for _, batch, _ in sides]
    truths = [torch.full_like(batch.labels, truth, dtype=torch.bool) for _, batch, truth in sides]
    return torch.cat(values), torch.cat(labels), torch.cat(truths), classes


def _require_both(is_member: Tensor) -> None:
    """Refuse models of the attacker that have no members, or no non-members."""
    for truth, name in ((True, "members"), (False, "non-members")):
        if not bool((is_member == truth).any()):
            raise WrongInput("shadows", f"have no {name}; every attack that learns from shadows needs both sides")


def shadow_sides(
    shadows: Sequence[Shadow] | InOut, most: int | None = None, rng: Generator | None = None
) -> list[tuple[BlackBox, Batch, bool]]:
    """Return each of the attacker's models with its members (True), and again with its non-members (False).

    With `most` each side is a random sample, drawn by `rng`, such that all sides together have about `most` rows.
    """
    if isinstance(shadows, InOut):
        pairs = zip(shadows.boxes, shadows.membership.cpu(), strict=True)
        masks = [(box, inside == truth, truth) for box, inside in pairs for truth in (True, False)]
        sides = [(box, shadows.pool, mask.nonzero()[:, 0], truth) for box, mask, truth in masks]
    else:
        parts = [(s.box, s.members if truth else s.nonmembers, truth) for s in shadows for truth in (True, False)]
        sides = [(box, part, torch.arange(part.size), truth) for box, part, truth in parts]
    if not sides:
        raise WrongInput("shadows", "this attack needs at least one shadow model")
    _require_both(torch.tensor([truth for _, _, rows, truth in sides if rows.numel()]))
    if most is not None:
        number = max(1, most // len(sides))
        sides = [
            (box, batch, rows[torch.randperm(len(rows), generator=rng)[:number]], truth)
            for box, batch, rows, truth in sides
        ]

    def take_rows(batch: Batch, rows: Tensor) -> Batch:
        return batch if most is None and len(rows) == batch.size else batch.take(rows.to(batch.labels.device))

    return [(box, take_rows(batch, rows), truth) for box, batch, rows, truth in sides]


def class_thresholds(values: Tensor, labels: Tensor, is_member: Tensor, classes: int) -> tuple[Tensor, list[int]]:
    """Return (K,) the best threshold of each class, and the classes without both sides: these take the global one."""
    everyone = best_threshold(values[is_member], values[~is_member])
    thresholds = torch.full((classes,), everyone, dtype=values.dtype, device=values.device)
    missing = []
    order, sizes = labels.argsort(stable=True), torch.bincount(labels, minlength=classes)[:classes].tolist()
    for label, rows in enumerate(torch.split(order[: sum(sizes)], sizes)):
        truth = is_member[rows]
        inside, outside = values[rows[truth]], values[rows[~truth]]
        if inside.numel() and outside.numel():
            thresholds[label] = best_threshold(inside, outside)
        else:
            missing.append(label)
    if len(missing) == classes:
        raise WrongInput("shadows", "no class has both members and non-members; use shadows with both in a class")
    return thresholds, missing


def best_threshold(members: Tensor, nonmembers: Tensor) -> float:
    """Return the t for which `feature >= t means member` has the highest balanced accuracy; O(n log n).

    Only the features themselves need trying. Among equally good ones the highest is taken, which accuses least.

    Example:
        >>> best_threshold(torch.tensor([0.9, 0.8, 0.4]), torch.tensor([0.5, 0.3]))
        0.800000011920929
    """
    values, order = torch.cat([members, nonmembers]).sort(descending=True)
    is_member = (torch.arange(values.numel(), device=values.device) < members.numel())[order]
    gain = torch.where(is_member, 1 / members.numel(), -1 / nonmembers.numel()).double().cumsum(0)
    last_of_tie = torch.ones_like(is_member)
    last_of_tie[:-1] = values[1:] != values[:-1]  # examples that tie are accepted together
    return float(values[torch.where(last_of_tie, gain, -torch.inf).argmax()])


@method("attack", "conf", "samia_ppb", sees="probabilities", shadows="for a threshold")
def conf() -> ThresholdAttack:
    """Member where the true label's probability reaches its class's threshold (samia_ppb 5.1, Conf).

    Equation: `score = p_y(x); member if score >= t_y, the threshold of the class y`.
    """
    return ThresholdAttack(true_probability)


@method("attack", "mentr", "samia_ppb", sees="probabilities", shadows="for a threshold")
def mentr() -> ThresholdAttack:
    """Member where the modified entropy is at most its class's threshold (samia_ppb 5.1, Mentr).

    Equation: `score = (1 - p_y) log p_y + sum over k != y of p_k log(1 - p_k)`.
    """
    return ThresholdAttack(negative_modified_entropy)


def negative_modified_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return Mentr with its sign turned, so that high means member.

    This is (1-p_y) log p_y + sum over t != y of p_t log(1-p_t).
    """
    p = probabilities.double()
    p_true = true_probability(p, labels)
    others = p * (1 - p).clamp_min(FLOOR).log()
    others = others.scatter(1, labels[:, None], 0).sum(1)
    return (1 - p_true) * p_true.clamp_min(FLOOR).log() + others


@method("attack", "xent", "samia_ppb", sees="probabilities", shadows="for a threshold")
def xent() -> ThresholdAttack:
    """Member where the cross-entropy of the true label is at most its class's threshold (samia_ppb 5.1, Xent).

    Equation: `score = log p_y(x)`.

    The cross-entropy rises as p_y falls, so Xent ranks and decides as Conf does.
    """
    return ThresholdAttack(negative_cross_entropy)


def negative_cross_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return log p_y: the loss with its sign turned, so that high means member."""
    return true_probability(probabilities.double(), labels).clamp_min(FLOOR).log()


@method("attack", "entropy", "samia_ppb", sees="probabilities", shadows="for a threshold")
def entropy() -> ThresholdAttack:
    """Member where the prediction's entropy is at most its class's threshold (the code of samia_ppb for Xent).

    Equation: `score = sum over k of p_k log p_k`.
    """
    return ThresholdAttack(negative_entropy)


def negative_entropy(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of p_k log p_k: the entropy with its sign turned, so that high means member.

    The label is not used.
    """
    p = probabilities.double()
    return (p * p.clamp_min(FLOOR).log()).sum(1)


@method("attack", "top1-conf", "samia_ppb", sees="probabilities", shadows="for a threshold")
def top1_conf(form: str = "paper") -> ThresholdAttack:
    """Member where the largest probability reaches one threshold for all classes (samia_ppb 5.1, Top1-Conf).

    Equation: `score = max over k of p_k(x); member if score >= t`.

    `form` is `paper`, or `code`: the authors' code compares the true label's probability instead.
    """
    forms: dict[str, Feature] = {"paper": top_probability, "code": true_probability}
    if form not in forms:
        raise unknown("attack top1-conf form", form, forms)
    return ThresholdAttack(forms[form], per_class=False)


def top_probability(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Return the largest p_k; the label is not used."""
    return probabilities.amax(1)


@method("attack", "correctness", "samia_ppb", sees="labels", shadows="none")
@dataclass(frozen=True)
class Correctness:
    """Member where the model's label is right: as accurate as the generalisation gap is wide (Yeom et al. 2018).

    Equation: `member if argmax over k of p_k(x) is y`.
    """

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Return the attack unchanged: there is nothing to learn."""
        return self

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score one where argmax f(x) = y, zero elsewhere."""
        right = ask_labels(box, candidates.batch) == candidates.batch.labels
        return Guesses(right.double(), right)
