"""Label-only attack: the label of a member survives rotation, translation and small perturbations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.functional import affine_grid, grid_sample, pad

from secateur.attacks.membership.reference_models import ROWS
from secateur.attacks.membership.thresholds import best_threshold, shadow_sides
from secateur.catalogue import method
from secateur.errors import WrongInput, check_number, check_wholes, unknown
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

RULES = ("logistic", "share")
AT_ONCE = 4096  # rows: a rotated copy of all CIFAR candidates would be large


def rotate(images: Tensor, degrees: float) -> Tensor:
    """Return images (N, C, H, W) rotated about their centre, with the border repeated."""
    height, width = images.shape[-2:]
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    rotation = torch.tensor([[[cos, -sin * height / width, 0], [sin * width / height, cos, 0]]]).to(images)
    grid = affine_grid(rotation, [1, *images.shape[1:]], align_corners=False)
    grids = grid.expand(len(images), -1, -1, -1)
    return grid_sample(images, grids, padding_mode="border", align_corners=False)


def shift_pixels(images: Tensor, down: int, right: int) -> Tensor:
    """Return images (N, C, H, W) moved by whole pixels, with the border repeated."""
    reach = max(abs(down), abs(right))
    wide = pad(images, (reach,) * 4, mode="replicate")
    height, width = images.shape[-2:]
    return wide[..., reach - down : reach - down + height, reach - right : reach - right + width]


def shifts(distance: int) -> list[tuple[int, int]]:
    """Return the 4d steps (down, right) with |down| + |right| = d.

    Example:
        >>> shifts(1)
        [(-1, 0), (0, -1), (0, 1), (1, 0)]
    """
    rest = {down: distance - abs(down) for down in range(-distance, distance + 1)} if distance else {}
    return [(down, right) for down, reach in rest.items() for right in sorted({-reach, reach})]


@dataclass(frozen=True)
class Disturbance:
    """Perturbations that are the same for every row of a table: values * scale + shift."""

    scale: Tensor  # (flips, D): -1 flips a bit, together with its shift
    shift: Tensor  # (flips, D)


def disturbance(rows: Tensor, flips: int, rate: float, noise: float, rng: Generator) -> Disturbance:
    """Draw perturbations: bits flip with probability `rate`, other columns get Gaussian noise.

    The noise has `noise` times the standard deviation of the column. A column with at most two different values in the
    attacker's rows holds bits.
    """
    flat = rows.flatten(1).cpu()
    low, high = flat.amin(0), flat.amax(0)
    bits = ((flat == low) | (flat == high)).all(0)
    flipped = bits & (torch.rand(flips, flat.shape[1], generator=rng) < rate)
    moves = noise * flat.std(0, correction=0) * torch.randn(flips, flat.shape[1], generator=rng)
    scale = torch.where(flipped, -1.0, 1.0)
    shift = torch.where(flipped, low + high, torch.where(bits, 0.0, moves))
    return Disturbance(scale.to(rows), shift.to(rows))


@dataclass(frozen=True)
class LabelOnly:
    """Label-only attack: its settings and, after `fit`, the weights and the threshold."""

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
        """Learn the threshold, and for the rule `logistic` the weight of each query, from the shadows' own rows."""
        samples = shadow_sides(shadows, ROWS, rng)
        attack, rows = self, torch.cat([batch.inputs for _, batch, _ in samples])
        if rows.ndim != 4:
            changes = disturbance(rows, self.flips, self.rate, self.noise, rng)
            attack = replace(self, disturbance=changes)
        kept = torch.cat([attack.correct(box, batch) for box, batch, _ in samples])  # (N, queries)
        truth = torch.cat([torch.full_like(batch.labels, truth, dtype=torch.bool) for _, batch, truth in samples])
        weights = torch.full_like(kept[0], 1 / kept.shape[1]) if self.rule == "share" else _logistic(kept, truth)
        votes = kept @ weights
        return replace(attack, weights=weights, threshold=best_threshold(votes[truth], votes[~truth]))

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Score by the weighted share of queries that were answered with the true label."""
        if self.weights is None:
            raise WrongInput("attack", "fit it on shadow models first")
        votes = self.correct(box, candidates.batch) @ self.weights
        return Guesses(votes, votes >= self.threshold)

    def correct(self, box: BlackBox, batch: Batch) -> Tensor:
        """Return (N, queries): 1 if the box answers the query with the true label, else 0."""
        parts = zip(*(torch.split(side, AT_ONCE) for side in batch), strict=True)
        return torch.cat([torch.stack(self._hits(box, *part), 1) for part in parts]).double()

    def _hits(self, box: BlackBox, inputs: Tensor, labels: Tensor) -> list[Tensor]:
        return [box.predict(view).argmax(1) == labels for view in self.views(inputs)]

    def views(self, inputs: Tensor) -> Iterator[Tensor]:
        """Yield the inputs, then each perturbed form of the inputs."""
        yield inputs
        if self.disturbance is not None:
            flat = inputs.flatten(1)
            for scale, shift in zip(self.disturbance.scale, self.disturbance.shift, strict=True):
                yield (flat * scale + shift).view_as(inputs)
            return
        for step in range(1, self.rotations + 1):
            for sign in (-1, 1):
                yield rotate(inputs, sign * step * self.degrees)
        for down, right in shifts(self.translations):
            yield shift_pixels(inputs, down, right)


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

    The attack sees only labels. For an image it queries 2r + 1 `rotations`, in steps of `degrees`, and 4d + 1
    `translations` by d pixels. The image itself is queried once. For a row of a table it queries `flips` copies. Bits
    flip with probability `rate`; other columns get Gaussian noise of `noise` deviations; all rows get the same changes.
    The score is a `logistic` regression on the correctness of the answers, learnt from shadows like the threshold. With
    `rule` `share` it is the share of correct answers.

    Equation: `score = logistic(b + sum over copies i of a_i [label(x_i) = y]); share: mean over i of [label(x_i) = y]`.
    """
    if rule not in RULES:
        raise unknown("attack label-only rule", rule, RULES)
    attack = LabelOnly(rotations, degrees, translations, flips, rate, noise, rule)
    check_wholes(attack, "rotations", "translations", "flips", least=0, prefix="attack label-only ")
    check_number("attack label-only noise", noise, "[0, inf)")
    check_number("attack label-only rate", rate, "[0, 1]")
    return attack


def _logistic(kept: Tensor, truth: Tensor) -> Tensor:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(max_iter=1000, class_weight="balanced").fit(kept.cpu().numpy(), truth.cpu().numpy())
    return torch.from_numpy(model.coef_[0]).to(kept)
