"""BlindMI-Diff: members are what lies far from generated non-members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Generator, Tensor
from torch.nn.functional import conv2d, pad

from secateur.attacks.membership.reference_models import content
from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.inference import probabilities
from secateur.interfaces import Batch, BlackBox, Candidates, Guesses, InOut, Shadow

# the squared widths of the 19 Gaussian kernels
WIDTHS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 5, 10, 15, 20, 25, 30, 35, 100, 1e3, 1e4, 1e5, 1e6)
SMALLEST = 1e-4  # distances below this one count as equal
ROUNDING = 1e-12  # sums in another order differ by less, and this must not pass for a rise


def features(answers: Tensor, labels: Tensor) -> Tensor:
    """(N, 3) the true label's probability and the two largest."""
    p = answers.double()
    return torch.cat([p.gather(1, labels[:, None]), p.topk(2, 1).values], 1)


def kernel(points: Tensor) -> Tensor:
    """(..., n, d) points -> (..., n, n): the sum of 19 Gaussian kernels exp(-|x - y|^2 / (2 w))."""
    squares = (points.unsqueeze(-2) - points.unsqueeze(-3)).square().sum(-1)
    total = torch.zeros_like(squares)
    for width in WIDTHS:
        total += torch.exp(squares / (-2 * width))
    return total


def mmd2(kernels: Tensor, inside: Tensor, outside: Tensor) -> Tensor:
    """(B, n, n) kernels and two sets as (B, n) zeros and ones -> (B,) MMD^2, the biased estimate, at least 1e-4.

    NaN where a set is empty. The means over pairs inside, outside and across are one quadratic form.
    """
    weight = inside / inside.sum(1, keepdim=True) - outside / outside.sum(1, keepdim=True)
    return (weight.unsqueeze(1) @ kernels @ weight.unsqueeze(2)).flatten().clamp_min(SMALLEST)


def compare(points: Tensor, generated: Tensor, size: int) -> Tensor:
    """Decide (N, 3) points in batches of `size` by differential comparison with generated non-members: (N,) bool.

    In each batch all begin as members. One after the other is moved to the non-members where that strictly raises
    MMD^2 between the two sets, until none moves; the last member of a batch stays. All batches step together.
    """
    batches = -(-len(points) // size)
    padded = pad(points, (0, 0, 0, batches * size - len(points))).view(batches, size, -1)
    kernels = kernel(torch.cat([padded, generated.expand(batches, -1, -1)], 1))  # (batches, size + G, size + G)
    place = torch.arange(kernels.shape[1], device=points.device).expand(batches, -1)
    filled = torch.full((batches, 1), size, device=points.device)
    filled[-1] = len(points) - (batches - 1) * size  # what pads the last batch is in neither set
    inside, outside = (place < filled).to(points), (place >= size).to(points)
    now, moved = mmd2(kernels, inside, outside), True
    while moved:
        moved = False
        for i in range(size):
            one = inside * (place == i)
            then = mmd2(kernels, inside - one, outside + one)
            moves = then > now + ROUNDING  # never where there is nothing to move, or nothing would be left
            now = torch.where(moves, then, now)
            inside, outside = inside - one * moves[:, None], outside + one * moves[:, None]
            moved |= bool(moves.any())
    return inside[:, :size].reshape(-1)[: len(points)] > 0


def sobel(images: Tensor) -> Tensor:
    """(N, C, H, W) -> the same shape: the mean of the absolute horizontal and vertical Sobel slopes, per channel."""
    down = torch.tensor([[-1.0, -2.0, -1.0], [0.0, 0.0, 0.0], [1.0, 2.0, 1.0]]).to(images)
    channels = images.flatten(0, 1).unsqueeze(1)
    slopes = conv2d(pad(channels, (1, 1, 1, 1), mode="replicate"), torch.stack([down.T, down]).unsqueeze(1))
    return slopes.abs().mean(1).view_as(images)


def shuffled_columns(rows: Tensor, number: int, rng: Generator) -> Tensor:
    """New rows whose columns are drawn each by itself: a column of bits is one with its mean as the probability."""
    flat = rows.flatten(1)
    drawn = torch.randint(len(flat), (number, flat.shape[1]), generator=rng).to(rows.device)
    return flat.gather(0, drawn).view(number, *rows.shape[1:])


@dataclass(frozen=True)
class BlindMI:
    """The attack with its settings; `seed` stands for the generator it was fitted with."""

    generated: int
    batch: int
    seed: int = 0

    def fit(self, shadows: Sequence[Shadow] | InOut, rng: Generator) -> Self:
        """Needs no shadow models: only takes its chance from the generator."""
        return replace(self, seed=int(torch.randint(2**62, (), generator=rng)))

    def score(self, box: BlackBox, candidates: Candidates) -> Guesses:
        """Decide every candidate; the score is the decision, 0 or 1, because the attack has no other output.

        Candidates are sorted by content, equal ones decided once, so that their order does not matter.
        """
        inputs, labels = candidates.batch
        keys = [key + bytes(str(y), "ascii") for key, y in zip(content(inputs), labels.tolist(), strict=True)]
        rows = dict(zip(keys, range(len(keys)), strict=True))
        places = {key: place for place, key in enumerate(sorted(rows))}
        order = torch.tensor([rows[key] for key in places]).to(labels.device)
        nonmembers = self._generate(candidates.batch.take(order))
        points = features(probabilities(box, inputs), labels)[order]
        anchors = features(probabilities(box, nonmembers.inputs), nonmembers.labels)
        decided = compare(points, anchors, self.batch)[torch.tensor([places[key] for key in keys]).to(labels.device)]
        return Guesses(decided.double(), decided)

    def _generate(self, candidates: Batch) -> Batch:
        """Inputs that no model was trained on, with the labels of the rows they were made from."""
        rng = torch.Generator().manual_seed(self.seed)
        some = candidates.take(torch.randperm(candidates.size, generator=rng)[: self.generated].to(candidates.labels))
        if candidates.inputs.ndim == 4:
            return Batch(sobel(some.inputs), some.labels)
        return Batch(shuffled_columns(candidates.inputs, some.size, rng), some.labels)


@method("attack", "blindmi", "samia_ppb", sees="probabilities", shadows="none")
def blindmi(generated: int = 20, batch: int = 20) -> BlindMI:
    """Member unless moving it to generated non-members raises MMD^2 (samia_ppb 5.1, BlindMI-Diff-w).

    `generated` non-members are queried: candidates' Sobel-filtered images, or for tabular data rows whose columns are
    drawn each by itself. Candidates are decided in batches of `batch`.
    """
    if generated < 1 or batch < 2:
        raise WrongInput("attack blindmi", "generated must be at least 1 and batch at least 2")
    return BlindMI(generated, batch)
