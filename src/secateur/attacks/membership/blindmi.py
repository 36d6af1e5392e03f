"""BlindMI-Diff: an example is a member if its answers are far from those of generated non-members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv2d, pad

from secateur.attacks.membership.reference_models import content
from secateur.catalogue import method
from secateur.errors import check_whole
from secateur.inference import probabilities
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow
from secateur.seeding import draw_seed

# Squared widths of the 19 Gaussian kernels.
WIDTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 5, 10, 15, 20, 25, 30, 35, 100, 1e3, 1e4, 1e5, 1e6)
SMALLEST = 1e-4  # smaller distances count as equal
ROUNDING = 1e-12  # sums in another order differ by less, which must not count as an increase


def features(answers: Tensor, labels: Tensor) -> Tensor:
    """Return the probability of the true label and the two largest probabilities, (N, 3); (N, 2) of one class."""
    p = answers.double()
    return torch.cat([p.gather(1, labels[:, None]), p.topk(min(2, p.shape[1]), 1).values], 1)


def kernel(points: Tensor) -> Tensor:
    """Return the sum of 19 Gaussian kernels exp(-|x - y|^2 / (2 w)), (..., n, n), of points (..., n, d)."""
    squares = (points.unsqueeze(-2) - points.unsqueeze(-3)).square().sum(-1)
    total = torch.zeros_like(squares)
    for width in WIDTHS:
        total += torch.exp(squares / (-2 * width))
    return total


def mmd2(kernels: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """Return the biased estimate of MMD^2 between two sets, (B,), at least 1e-4; NaN if a set is empty.

    The means over pairs inside, outside and across are one quadratic form.

    Args:
        kernels: (B, n, n) kernel values between all points.
        inside: (B, n) zeros and ones, the first set.
        outside: (B, n) zeros and ones, the second set.
    """
    weight = inside / inside.sum(1, keepdim=True) - outside / outside.sum(1, keepdim=True)
    return (weight.unsqueeze(1) @ kernels @ weight.unsqueeze(2)).flatten().clamp_min(SMALLEST)


def compare(points: Tensor, generated: Tensor, size: int) -> Tensor:
    """Return the decisions (N,) bool for points (N, 3) by differential comparison with generated non-members.

    Points are decided in batches of `size`; all points of a batch begin as members. In turn, a point is moved to the
    non-members if that strictly increases MMD^2 between the two sets, until no point moves. The last member of a batch
    stays. All batches are processed together.
    """
    batches = -(-len(points) // size)
    padded = pad(points, (0, 0, 0, batches * size - len(points))).view(batches, size, -1)
    kernels = kernel(torch.cat([padded, generated.expand(batches, -1, -1)], 1))  # (batches, size + G, size + G)
    position = torch.arange(kernels.shape[1], device=points.device).expand(batches, -1)
    filled = torch.full((batches, 1), size, device=points.device)
    filled[-1] = len(points) - (batches - 1) * size  # the padding of the last batch is in neither set
    inside, outside = (position < filled).to(points), (position >= size).to(points)
    now, moved = mmd2(kernels, inside, outside), True
    while moved:
        moved = False
        for i in range(size):
            point = inside * (position == i)
            then = mmd2(kernels, inside - point, outside + point)
            moves = then > now + ROUNDING  # False for NaN: no point to move, or no member would be left
            now = torch.where(moves, then, now)
            inside, outside = inside - point * moves[:, None], outside + point * moves[:, None]
            moved |= bool(moves.any())
    return inside[:, :size].reshape(-1)[: len(points)] > 0


def sobel(images: Tensor) -> Tensor:
    """Return the mean of the absolute horizontal and vertical Sobel gradients per channel, (N, C, H, W)."""
    down = torch.tensor([[-1.0, -2.0, -1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0]]).to(images)
    channels = images.flatten(0, 1).unsqueeze(1)
    slopes = conv2d(pad(channels, (1, 1, 1, 1), mode="replicate"), torch.stack([down.T, down]).unsqueeze(1))
    return slopes.abs().mean(1).view_as(images)


def shuffle_columns(rows: Tensor, number: int, rng: Generator) -> Tensor:
    """Return new rows whose columns are drawn independently; a column of bits is 1 with its mean as the probability."""
    flat = rows.flatten(1)
    drawn = torch.randint(len(flat), (number, flat.shape[1]), generator=rng).to(rows.device)
    return flat.gather(0, drawn).view(number, *rows.shape[1:])


@dataclass(frozen=True)
class BlindMI:
    """BlindMI-Diff attack with its settings; `seed` is drawn by `fit`."""

    generated: int
    batch: int
    seed: int = 0

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Draw the seed from `rng`; the attack needs no shadow models."""
        return replace(self, seed=draw_seed(rng))

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Decide every candidate; the score is the decision, 0 or 1, because the attack has no other output.

        Candidates are sorted by content and duplicates are decided once, so the result does not depend on their order.
        """
        inputs, labels = candidates.batch
        keys = [key + bytes(str(y), "ascii") for key, y in zip(content(inputs), labels.tolist(), strict=True)]
        rows = dict(zip(keys, range(len(keys)), strict=True))
        positions = {key: position for position, key in enumerate(sorted(rows))}
        order = torch.tensor([rows[key] for key in positions]).to(labels.device)
        nonmembers = self._generate(candidates.batch.take(order))
        points = features(probabilities(box, inputs), labels)[order]
        anchors = features(probabilities(box, nonmembers.inputs), nonmembers.labels)
        decided = compare(points, anchors, self.batch)[torch.tensor([positions[key] for key in keys]).to(labels.device)]
        return Guesses(decided.double(), decided)

    def _generate(self, candidates: Batch) -> Batch:
        """Return inputs that no model was trained on, with the labels of the rows they are derived from."""
        rng = torch.Generator().manual_seed(self.seed)
        sample = candidates.take(torch.randperm(candidates.size, generator=rng)[: self.generated].to(candidates.labels))
        if candidates.inputs.ndim == 4:
            return Batch(sobel(sample.inputs), sample.labels)
        return Batch(shuffle_columns(candidates.inputs, sample.size, rng), sample.labels)


@method("attack", "blindmi", "samia_ppb", sees="probabilities", shadows="none")
def blindmi(generated: int = 20, batch: int = 20) -> BlindMI:
    """Member unless moving it to generated non-members raises MMD^2 (samia_ppb 5.1, BlindMI-Diff-w).

    `generated` non-members are queried: Sobel-filtered candidates, or for tabular data rows with independently drawn
    columns. Candidates are decided in batches of `batch`. Its decisions depend on the generated rows: another seed can
    move its AUC by .06, which its interval, over the rows asked, does not cover.

    Equation: `member unless MMD^2(N + x, C - x) > MMD^2(N, C); N: generated non-members, C: candidates`.
    """
    check_whole("attack blindmi generated", generated)
    check_whole("attack blindmi batch", batch, 2)
    return BlindMI(generated, batch)
