"""Yeom: a member's loss is lower than that of the members one knows; and who is asked, as MaPP-FL asks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor

from secateur.attacks.membership.thresholds import best_threshold, class_thresholds, shadow_features
from secateur.attacks.membership.xent import negative_cross_entropy
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.interfaces import BlackBox, Candidates, Guesses, InOut, Shadow
from secateur.queries import probabilities

THRESHOLDS = ("mean", "tuned", "class")
MOST = 5000  # members asked about, and as many non-members (mapp_fl 3.2)
FEWEST = 3  # known members


@dataclass(frozen=True)
class Yeom:
    """The attack, and after `fit` the thresholds of log p_y by class."""

    way: str
    thresholds: Tensor | None = None  # (K,)
    note: str | None = None

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn from known members and others: the attacker's own models', or the target's own as a shadow of it."""
        return self.learn(*shadow_features(shadows, negative_cross_entropy))

    def learn(self, values: Tensor, labels: Tensor, is_member: Tensor, classes: int) -> Self:
        """The thresholds that follow from what is known: (N,) log p_y, labels and membership."""
        if self.way == "class":
            thresholds, missing = class_thresholds(values, labels, is_member, classes)
            note = f"global threshold for the classes {missing}: none known on both sides" if missing else None
            return replace(self, thresholds=thresholds, note=note)
        inside, outside = values[is_member], values[~is_member]
        one = float(inside.mean()) if self.way == "mean" else best_threshold(inside, outside)
        return replace(self, thresholds=values.new_full((classes,), one))

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the loss, decide by the threshold."""
        labels = candidates.batch.labels
        return self.decide(negative_cross_entropy(probabilities(box, candidates.batch.inputs), labels), labels)

    def decide(self, values: Tensor, labels: Tensor) -> Guesses:
        """The same for (N,) log p_y: of one model, or their mean over several of a client's updates."""
        if self.thresholds is None:
            raise WrongInput("attack", "fit it on shadow models first")
        limit = self.thresholds[labels]
        return Guesses(values, values > limit if self.way == "mean" else values >= limit, self.note)


@method("attack", "yeom", "mapp_fl", sees="probabilities", shadows="needed")
def yeom(threshold: str = "mean") -> Yeom:
    """Member where the loss is below the mean loss of known members (Yeom et al. 2018; mapp_fl Eq. 2).

    `threshold` is `mean`, or `tuned`: the one that tells known members from known others best, or `class`: one tuned
    for each class. In an audit the shadows' members stand for the known ones; in a federation they are the client's.
    """
    if threshold not in THRESHOLDS:
        raise unknown("attack yeom threshold", threshold, THRESHOLDS)
    return Yeom(threshold)


# Who is asked (mapp_fl 3.2) --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Trial:
    """Rows: those whose membership the attacker knows, and those it is asked about, as many inside as outside."""

    known: Tensor
    known_outside: Tensor
    members: Tensor
    nonmembers: Tensor


def known_count(size: int, printed: bool = False) -> int:
    """How many of a training set's rows the attacker knows: 1 %, at least 3; as the paper prints it, at most 3.

    Example:
        >>> known_count(17020), known_count(120), known_count(17020, printed=True)
        (170, 3, 3)
    """
    return (min if printed else max)(FEWEST, size // 100)


def trial(rows: Tensor, outside: Tensor, rng: Generator, *, printed: bool = False, whole: bool = False) -> Trial:
    """Draw who is known and who is asked; `whole` asks about known members too, as the paper does.

    Raises WrongInput for a set that is too small for the rule, or that leaves nobody to ask about.
    """
    number = known_count(len(rows), printed)
    left, free = len(rows) - (0 if whole else number), len(outside) - number
    if number < 1 or left < 1 or free < 1:
        raise WrongInput("client", f"{len(rows)} rows and {len(outside)} others are too few to know {number} of both")
    asked = min(MOST, left, free)
    inside, others = (part[torch.randperm(len(part), generator=rng)] for part in (rows, outside))
    candidates = rows[torch.randperm(len(rows), generator=rng)] if whole else inside[number:]
    return Trial(inside[:number], others[:number], candidates[:asked], others[number : number + asked])
