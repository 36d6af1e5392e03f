"""Yeom's attack by a loss threshold from known members, and the candidates of MaPP-FL's evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor

from secateur.attacks.membership.thresholds import (
    best_threshold,
    class_thresholds,
    negative_cross_entropy,
    shadow_features,
)
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.inference import probabilities
from secateur.interfaces import BlackBox, Candidates, Guesses, InOut, Shadow
from secateur.metrics.membership import Estimate
from secateur.seeding import spawn

THRESHOLDS = ("mean", "tuned", "class")
MOST = 5000  # candidate members, and as many non-members (mapp_fl 3.2)
FEWEST = 3  # known members
AT_ONCE = 50  # bootstrap draws at a time; bounds the memory


@dataclass(frozen=True)
class Yeom:
    """Yeom attack and, after `fit`, the thresholds of log p_y by class."""

    rule: str  # one of THRESHOLDS
    thresholds: Tensor | None = None  # (K,)
    note: str | None = None

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn the thresholds from members and non-members of shadow models.

        A target with known members may serve as its own shadow.
        """
        return self.learn(*shadow_features(shadows, negative_cross_entropy))

    def learn(self, values: Tensor, labels: Tensor, is_member: Tensor, classes: int) -> Self:
        """Learn the thresholds from known examples: log p_y (N,), labels and membership."""
        if self.rule == "class" and bool(torch.isin(labels[is_member], labels[~is_member]).any()):
            thresholds, missing = class_thresholds(values, labels, is_member, classes)
            note = f"global threshold for the classes {missing}: none known on both sides" if missing else None
            return replace(self, thresholds=thresholds, note=note)
        inside, outside = values[is_member], values[~is_member]
        threshold = float(inside.mean()) if self.rule == "mean" else best_threshold(inside, outside)
        note = "global threshold: no class is known on both sides" if self.rule == "class" else None
        return replace(self, thresholds=values.new_full((classes,), threshold), note=note)

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score by the loss; decide by the threshold."""
        labels = candidates.batch.labels
        return self.decide(negative_cross_entropy(probabilities(box, candidates.batch.inputs), labels), labels)

    def decide(self, values: Tensor, labels: Tensor) -> Guesses:
        """Return the guesses for log p_y (N,): of one model, or the mean over several updates of a client."""
        if self.thresholds is None:
            raise WrongInput("attack", "fit it on shadow models first")
        limit = self.thresholds[labels]
        return Guesses(values, values > limit if self.rule == "mean" else values >= limit, self.note)


@method("attack", "yeom", "mapp_fl", sees="probabilities", shadows="needed")
def yeom(threshold: str = "mean") -> Yeom:
    """Member where the loss is below the mean loss of known members (Yeom et al. 2018; mapp_fl Eq. 2).

    Equation: `member if -log p_y(x) < mean of -log p_y over the known members`.

    `threshold` is `mean`; or `tuned`, the best one between known members and known non-members; or `class`, one tuned
    for each class. In an audit the known members are those of the shadows, in a federation those of the client.
    """
    if threshold not in THRESHOLDS:
        raise unknown("attack yeom threshold", threshold, THRESHOLDS)
    return Yeom(threshold)


def mean_advantage(known: Tensor, members: Tensor, others: Tensor, rng: Generator, resamples: int = 1000) -> Estimate:
    """Return the advantage of the mean threshold, 2 (accuracy - 1/2), with a 95 % bootstrap interval (mapp_fl Eq. 4).

    Known members are resampled too: if they are few, the threshold contributes most of the variance.
    """
    noise = spawn(rng, known.device)

    def resample(values: Tensor, number: int) -> Tensor:
        drawn = torch.randint(len(values), (number, len(values)), generator=noise, device=values.device)
        return values[drawn]

    draws = []
    for start in range(0, resamples, AT_ONCE):
        number = min(AT_ONCE, resamples - start)
        limit = resample(known, number).mean(1, keepdim=True)
        sides = [(resample(side, number) > limit).double().mean(1) for side in (members, others)]
        draws.append(sides[0] - sides[1])
    low, high = torch.cat(draws).quantile(known.new_tensor([0.025, 0.975]).double()).tolist()
    limit = known.mean()
    value = float((members > limit).double().mean() - (others > limit).double().mean())
    return Estimate(value, min(low, value), max(high, value))


def average_over_knowledge(inside: Tensor, outside: Tensor, known: int, rng: Generator, draws: int = 200) -> Estimate:
    """Return the mean advantage of the mean threshold over draws of the known members, with their 95 % range.

    A threshold from three known members depends strongly on the draw; an interval over the candidates alone does not
    show that. `inside` and `outside` are log p_y, (N,).
    """
    drawn = torch.stack([torch.randperm(len(inside), generator=rng)[:known] for _ in range(draws)])
    chosen = inside[drawn.to(inside.device)]
    limit = chosen.mean(1, keepdim=True)
    above, of_known, of_others = ((values > limit).double().sum(1) for values in (inside, chosen, outside))
    advantages = (above - of_known) / (len(inside) - known) - of_others / len(outside)
    low, high = advantages.quantile(advantages.new_tensor([0.025, 0.975])).tolist()
    return Estimate(float(advantages.mean()), low, high)


# Known members and candidates (mapp_fl 3.2) ------------------------------------------------------------------------
@dataclass(frozen=True)
class Trial:
    """Rows whose membership the attacker knows, and candidate rows, as many members as non-members."""

    known: Tensor
    outsiders: Tensor  # the attacker's data, non-members
    members: Tensor
    nonmembers: Tensor

    @property
    def known_outside(self) -> Tensor:
        """Rows of known non-members, as many as known members."""
        return self.outsiders[: len(self.known)]


def count_known(size: int, printed: bool = False) -> int:
    """Return the number of known members of a training set: 1 %, at least 3; as printed in the paper, at most 3.

    Example:
        >>> count_known(17020), count_known(120), count_known(17020, printed=True)
        (170, 3, 3)
    """
    return (min if printed else max)(FEWEST, size // 100)


def trial(rows: Tensor, outside: Tensor, rng: Generator, *, printed: bool = False, whole: bool = False) -> Trial:
    """Draw the known rows and the candidates; with `whole` known members are candidates too, as in the paper.

    One half of `outside` is the attacker's own data, the other half are candidates. Raise WrongInput if the sets are
    too small for the rule.
    """
    number, half = count_known(len(rows), printed), len(outside) // 2
    left = len(rows) - (0 if whole else number)
    if number < 1 or left < 1 or half < 1 or len(outside) - half < number:
        few = f"{len(rows)} members and {len(outside)} non-members are too few"
        rule = f"1 % of the members, at {'most' if printed else 'least'} {FEWEST}"
        need = f"the attacker must know {number or 'some'} of each ({rule}) and be asked about others"
        raise WrongInput("client", f"{few}: {need}; mapp_fl leaves its smallest clients out too")
    asked = min(MOST, left, half)
    inside, others = (part[torch.randperm(len(part), generator=rng)] for part in (rows, outside))
    candidates = rows[torch.randperm(len(rows), generator=rng)] if whole else inside[number:]
    return Trial(inside[:number], others[half:], candidates[:asked], others[:asked])
