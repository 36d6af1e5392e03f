"""Label-only: a member keeps its label when it is turned, shifted or disturbed a little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from secateur.attacks.membership.reference_models import sides
from secateur.attacks.membership.thresholds import best_threshold
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

RULES = ("logistic", "share")
AT_ONCE = 4096  # rows: a turned copy of a CIFAR's candidates would be large


def rotated(images: Tensor, degrees: float) -> Tensor:
    """(N, C, H, W) images turned about their centre, the border repeated."""
    height, width = images.shape[-2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    turn = torch.tensor([[[cos, -sin * height / width, 0], [sin * width / height, cos, 0]]]).to(images)
    grid = affine_grid(turn, [1, *images.shape[1:]], align_corners=False)
    grids = grid.expand(len(images), -1, -1, -1)
    return grid_sample(images, grids, padding_mode="border", align_corners=False)


def shifted(images: Tensor, down: int, right: int) -> Tensor:
    """(N, C, H, W) images moved by whole pixels, the border repeated."""
    reach = max(abs(down), abs(right))
    wide = pad(images, (reach,) * 4, mode="replicate")
    height, width = images.shape[-2:]
    return wide[..., reach - down : reach - down + height, reach - right : reach - right + width]


def shifts(distance: int) -> list[tuple[int, int]]:
    """The 4d steps (down, right) with |down| + |right| = d.

    Example:
        >>> shifts(1)
        [(-1, 0), (0, -1), (0, 1), (1, 0)]
    """
    rest = {down: distance - abs(down) for down in range(-distance, distance + 1)} if distance else {}
    return [(down, right) for down, reach in rest.items() for right in sorted({-reach, reach})]


@dataclass(frozen=True)
class Disturbance:
    """The same small changes for every row of a table: values * scale + shift."""

    scale: Tensor  # (flips, D): -1 turns a bit over, together with its shift
    shift: Tensor  # (flips, D)


def disturbance(rows: Tensor, flips: int, rate: float, noise: float, rng: Generator) -> Disturbance:
    """Draw the changes: bits flip with the probability `rate`, other columns move by `noise` of their deviations.

    A column with at most two different values in the attacker's own rows holds bits.
    """
    flat = rows.flatten(1).cpu()
    low, high = flat.amin(0), flat.amax(0)
    bits = ((flat == low) | (flat == high)).all(0)
    turned = bits & (torch.rand(flips, flat.shape[1], generator=rng) < rate)
    moves = noise * flat.std(0, correction=0) * torch.randn(flips, flat.shape[1], generator=rng)
    scale = torch.where(turned, -1.0, 1.0)
    shift = torch.where(turned, low + high, torch.where(bits, 0.0, moves))
    return Disturbance(scale.to(rows), shift.to(rows))


@dataclass(frozen=True)
class LabelOnly:
    """The attack with its settings, and after `fit` what it learnt from the attacker's models."""

    rotations: int
    degrees: float
    translations: int
    flips: int
    rate: float
    noise: float
    rule: str
    disturbance: Disturbance | None = None
    weights: Tensor | None = None  # (queries,)
    threshold: float = 0.0

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Learn the threshold, and by the rule `logistic` the weight of each query, from shadows' own rows."""
        own = sides(shadows, rng)
        attack, rows = self, torch.cat([batch.inputs for _, batch, _ in own])
        if rows.ndim != 4:
            changes = disturbance(rows, self.flips, self.rate, self.noise, rng)
            attack = replace(self, disturbance=changes)
        kept = torch.cat([attack.correct(box, batch) for box, batch, _ in own])  # (N, queries)
        truth = torch.cat([torch.full_like(batch.labels, truth, dtype=torch.bool) for _, batch, truth in own])
        weights = torch.full_like(kept[0], 1 / kept.shape[1]) if self.rule == "share" else _logistic(kept, truth)
        votes = kept @ weights
        return replace(attack, weights=weights, threshold=best_threshold(votes[truth], votes[~truth]))

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Rank by the weighted share of queries that were answered with the true label."""
        if self.weights is None:
            raise WrongInput("attack", "fit it on shadow models first")
        votes = self.correct(box, candidates.batch) @ self.weights
        return Guesses(votes, votes >= self.threshold)

    def correct(self, box: BlackBox, batch: Batch) -> Tensor:
        """(N, queries): 1 where the label that the box answers is the true one."""
        parts = zip(*(torch.split(side, AT_ONCE) for side in batch), strict=True)
        return torch.cat([torch.stack(self._hits(box, *part), 1) for part in parts]).double()

    def _hits(self, box: BlackBox, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        return [box.predict(view).argmax(1) == labels for view in self.views(inputs)]

    def views(self, inputs: Tensor) -> Iterator[Tensor]:
        """The inputs themselves, then each disturbed form of them."""
        yield inputs
        if self.disturbance is not None:
            flat = inputs.flatten(1)
            for scale, shift in zip(self.disturbance.scale, self.disturbance.shift, strict=True):
                yield (flat * scale + shift).view_as(inputs)
            return
        for step in range(1, self.rotations + 1):
            for sign in (-1, 1):
                yield rotated(inputs, sign * step * self.degrees)
        for down, right in shifts(self.translations):
            yield shifted(inputs, down, right)


@method("attack", "label-only", "-", sees="labels", shadows="needed")
def label_only(
    rotations: int = 4,
    degrees: float = 4.0,
    translations: int = 1,
    flips: int = 20,
    rate: float = 0.05,
    noise: float = 0.5,
    rule: str = "logistic",
) -> LabelOnly:
    """Member where disturbed copies keep the true label (augmentation attack, Choquette-Choo et al. 2021).

    Sees only labels. Of an image it asks 2r + 1 `rotations`, in steps of `degrees`, and 4d + 1 `translations` by d
    pixels (the image itself once). Of a row of a table it asks `flips` copies: bits turned over with the probability
    `rate`, other columns moved by Gaussian noise of `noise` deviations; every row gets the same changes. `rule` is a
    `logistic` regression on which answers were true, learnt from shadows as the threshold is, or just their `share`.
    """
    if rule not in RULES:
        raise unknown("attack label-only rule", rule, RULES)
    for name, value in (("rotations", rotations), ("translations", translations), ("flips", flips), ("noise", noise)):
        if value < 0:
            raise WrongInput(f"attack label-only {name}", f"{value} is not allowed; give 0 or more")
    if not 0 <= rate <= 1:
        raise WrongInput("attack label-only rate", f"{rate} is not allowed; give a probability from 0 to 1")
    return LabelOnly(rotations, degrees, translations, flips, rate, noise, rule)


def _logistic(kept: Tensor, truth: Tensor) -> Tensor:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=1000, class_weight="balanced").fit(kept.cpu().numpy(), truth.cpu().numpy())
    return torch.from_numpy(model.coef_[0]).to(kept)
