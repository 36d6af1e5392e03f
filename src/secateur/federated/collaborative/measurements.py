"""Measurements of a collaborative training, kept on the device between two rows, so that no step waits for them.

gamma_1 and the bounds of Assumption 3 are maxima over all users and steps since the last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.defenses.error_feedback import RESIDUAL, starvation
from secateur.federated.collaborative.flat_tensors import Flat
from secateur.interfaces import Mask, Params

Row = dict[str, float]
LARGEST = ("gamma_1", "gamma_1_whole", "gradient_square", "gradient_variance")


class Measured(NamedTuple):
    """Measurements of one user's step, () each, or of all users' steps, (users,) each."""

    square: Tensor  # ||gradient||^2
    gamma: Tensor  # the maximum over tensors of ||X - C(X)||^2 / ||X||^2
    gamma_whole: Tensor  # the same ratio of all tensors together


def measure(grads: Params, whole: Params, sent: Params) -> Measured:
    """Compare X = gradient + residual (`whole`), which was to be sent, with the sent C(X)."""
    lost = torch._foreach_sub(list(whole.values()), list(sent.values()))
    before = _squares(list(whole.values()))
    return measure_norms(before.sum() if whole is grads else square(grads), before, _squares(list(lost)))


def measure_norms(gradient: Tensor, before: Tensor, missing: Tensor) -> Measured:
    """Return the measurements from squared norms.

    Args:
        gradient: (...) ||gradient||^2.
        before: (..., tensors) ||X||^2 of the values to be sent.
        missing: (..., tensors) ||X - C(X)||^2 of the values that were not sent.
    """
    return Measured(gradient, _share(missing, before).amax(-1), _share(missing.sum(-1), before.sum(-1)))


def square(values: Params) -> Tensor:
    """Return ||.||^2 () of all tensors together."""
    return _squares(list(values.values())).sum()


def _squares(values: Sequence[Tensor]) -> Tensor:
    """Return ||.||^2 of each tensor, (tensors,)."""
    return torch.stack(torch._foreach_norm(list(values))).square()


def _share(missing: Tensor, before: Tensor) -> Tensor:
    """Return missing / before; 0 / 0 counts as 0, because nothing was lost."""
    return torch.nan_to_num(missing / before, nan=0.0, posinf=torch.inf)


def mean(trees: Sequence[Params]) -> Params:
    """Return the average over users, in new tensors."""
    total = [value.clone() for value in trees[0].values()]
    for tree in trees[1:]:
        torch._foreach_add_(total, list(tree.values()))
    torch._foreach_div_(total, len(trees))
    return dict(zip(trees[0], total, strict=True))


class TrainingStats:
    """Sums and maxima since the last row, and the entries that were never sent."""

    def __init__(self, flat: Flat, users: int) -> None:
        def zeros(*shape: int) -> Tensor:
            return flat.zeros.new_zeros(shape, dtype=torch.float64)

        self.sums, self.largest = {name: zeros() for name in ("loss", "inside", "lies")}, zeros(len(LARGEST))
        self.rows = flat.allocate(users, torch.bool).logical_not_()
        self.unsent: list[Mask] = [flat.views(row) for row in self.rows]
        self.entries = sum(shape.numel() for shape in flat.shapes.values())

    def record_sent(self, user: int, sent: Params) -> None:
        """Record the entries that one user sent in a round."""
        for name, where in self.unsent[user].items():
            where.logical_and_(sent[name] == 0)

    def record_all_sent(self, rows: Tensor) -> None:
        """Record the entries that all users sent in a round, (users, N)."""
        self.rows.logical_and_(rows == 0)

    def losses(self, losses: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """Record the mean losses of batches of these sizes."""
        weighted = torch._foreach_mul(list(losses), [float(size) for size in sizes])
        self.sums["loss"].add_(torch.stack(weighted).sum(dtype=torch.float64))

    def step(self, users: Measured, average: Tensor) -> None:
        """Record a step of all users, (users,) each; `average` is ||.||^2 of the users' average gradient."""
        squares = users.square.double()
        variance = squares.mean() - average  # E||g - Eg||^2
        maxima = (users.gamma.amax().double(), users.gamma_whole.amax().double(), squares.amax(), variance.clamp_min(0))
        self.largest.copy_(torch.maximum(self.largest, torch.stack(maxima)))

    def broadcast(self, inside: Mask) -> None:
        """Record the positions of one broadcast."""
        self.sums["inside"].add_(torch.cat([where.flatten() for where in inside.values()]).sum())

    def row(self, examples: int, steps: int, states: Sequence[Params], aligned: bool) -> Row:
        """Return the row of the epoch that just ended, and reset everything but the entries never sent."""
        loss, inside, lies, *largest = torch.stack([*self.sums.values(), *self.largest]).tolist()
        torch._foreach_zero_([*self.sums.values(), self.largest])
        row = {"train_loss": loss / examples} | dict(zip(LARGEST, largest, strict=True)) | self._residuals(states)
        row["never_sent"] = self._count(self.rows) / len(self.unsent)
        row["never_sent_by_any"] = float(self._count(self.rows.all(0)))
        row["entries"] = float(self.entries)
        if aligned:
            row |= {"broadcast": inside / (steps * self.entries), "lies": lies}
        return row

    def _count(self, rows: Tensor) -> int:
        """Count the True entries of (..., N), without the gaps between tensors, which nobody ever sends."""
        gaps = rows.shape[-1] - self.entries
        return int(rows.sum()) - gaps * (rows.numel() // rows.shape[-1])

    def _residuals(self, states: Sequence[Params]) -> Row:
        """Return the residual columns of a row; all 0 without error feedback."""
        residuals = [{n: v for n, v in state.items() if n.startswith(RESIDUAL)} for state in states]
        if not residuals[0]:
            return dict.fromkeys(("residual_mean", "residual_max", "error_norm", "starved"), 0.0)
        users = [starvation(state, mask) for state, mask in zip(states, self.unsent, strict=True)]
        norms = [user.residual_norm for user in users]
        return {
            "residual_mean": sum(norms) / len(norms),
            "residual_max": max(norms),
            "error_norm": float(_squares(list(mean(residuals).values())).double().sum().sqrt()),  # Lemma 1's ||e_t||
            "starved": sum(user.starved for user in users) / len(users),
        }
