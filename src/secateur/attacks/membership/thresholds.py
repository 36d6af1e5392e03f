"""Thresholds learnt from shadow models: the one search that every threshold attack shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor

from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow
from secateur.queries import probabilities

Feature = Callable[[Tensor, Tensor], Tensor]  # ((N, K) probabilities, (N,) labels) -> (N,), high = member


def best_threshold(members: Tensor, nonmembers: Tensor) -> float:
    """The t for which `feature >= t means member` has the highest balanced accuracy; O(n log n).

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


def shadow_sides(shadows: Sequence[Shadow] | InOut) -> list[tuple[BlackBox, Batch, bool]]:
    """Each of the attacker's models with its members (True), and again with its non-members (False)."""
    if not isinstance(shadows, InOut):
        sides = [(s.box, part, truth) for s in shadows for part, truth in ((s.members, True), (s.nonmembers, False))]
    else:
        sides = [
            (box, shadows.pool.take(rows), truth)
            for box, inside in zip(shadows.boxes, shadows.membership, strict=True)
            for rows, truth in ((inside, True), (~inside, False))
        ]
    if not sides:
        raise WrongInput("shadows", "this attack needs at least one shadow model")
    for truth, name in ((True, "members"), (False, "non-members")):
        if not sum(batch.size for _, batch, side in sides if side == truth):
            raise WrongInput("shadows", f"have no {name}; every attack that learns from shadows needs both sides")
    return sides


def shadow_features(shadows: Sequence[Shadow] | InOut, feature: Feature) -> tuple[Tensor, Tensor, Tensor, int]:
    """The feature, label and membership of every shadow's own examples, and the number of classes."""
    sides = shadow_sides(shadows)
    answers = [probabilities(box, batch.inputs) for box, batch, _ in sides]
    values = [feature(p, batch.labels) for p, (_, batch, _) in zip(answers, sides, strict=True)]
    labels = [batch.labels for _, batch, _ in sides]
    truths = [torch.full_like(batch.labels, truth, dtype=torch.bool) for _, batch, truth in sides]
    return torch.cat(values), torch.cat(labels), torch.cat(truths), answers[0].shape[1]


def class_thresholds(values: Tensor, labels: Tensor, is_member: Tensor, classes: int) -> tuple[Tensor, list[int]]:
    """(K,) the best threshold of each class, and the classes that take the global one for want of either side."""
    everyone = best_threshold(values[is_member], values[~is_member])
    thresholds = torch.full((classes,), everyone, dtype=values.dtype, device=values.device)
    missing = []
    for label in range(classes):
        inside, outside = values[is_member & (labels == label)], values[~is_member & (labels == label)]
        if inside.numel() and outside.numel():
            thresholds[label] = best_threshold(inside, outside)
        else:
            missing.append(label)
    if len(missing) == classes:
        raise WrongInput("shadows", "no class has both members and non-members; give shadows with both in a class")
    return thresholds, missing


@dataclass(frozen=True)
class ThresholdAttack:
    """A feature of the prediction, compared with a threshold that was learnt from shadows."""

    feature: Feature
    per_class: bool = True  # a threshold for every class, or one for all
    thresholds: Tensor | None = None  # (K,) after fit
    note: str | None = None

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn the thresholds from the shadows' members and non-members."""
        values, labels, is_member, classes = shadow_features(shadows, self.feature)
        if not self.per_class:
            everyone = best_threshold(values[is_member], values[~is_member])
            return replace(self, thresholds=values.new_full((classes,), everyone))
        thresholds, missing = class_thresholds(values, labels, is_member, classes)
        note = f"global threshold for the classes {missing}: no shadow members or non-members" if missing else None
        return replace(self, thresholds=thresholds, note=note)

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the feature, decide by the class's threshold."""
        if self.thresholds is None:
            raise WrongInput("attack", "fit it on shadow models first")
        labels = candidates.batch.labels
        values = self.feature(probabilities(box, candidates.batch.inputs), labels)
        return Guesses(values, values >= self.thresholds[labels], self.note)
