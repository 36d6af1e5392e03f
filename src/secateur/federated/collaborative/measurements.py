"""What a collaborative training measures of itself: kept on the device between two rows, so that no step waits for it.

gamma_1 and the bounds of Assumption 3 are largest values over all users and steps since the last row.
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
    """Of a user's step, () each, or of all users', (users,)."""

    square: Tensor  # ||gradient||^2
    gamma: Tensor  # the largest over tensors of ||X - C(X)||^2 / ||X||^2
    gamma_whole: Tensor  # the same of all tensors together


def measure(grads: Params, whole: Params, sent: Params) -> Measured:
    """Compare what was to be sent, X = gradient + residual, with what was."""
    lost = torch._foreach_sub(list(whole.values()), list(sent.values()))
    before = _squares(list(whole.values()))
    return measured(before.sum() if whole is grads else square(grads), before, _squares(list(lost)))


def measured(own: Tensor, before: Tensor, missing: Tensor) -> Measured:
    """The gradient's ||.||^2; (..., tensors) of what was to be sent, and of what was not."""
    return Measured(own, _share(missing, before).amax(-1), _share(missing.sum(-1), before.sum(-1)))


def square(values: Params) -> Tensor:
    """() ||.||^2 of all tensors together."""
    return _squares(list(values.values())).sum()


def _squares(values: Sequence[Tensor]) -> Tensor:
    """(tensors,) ||.||^2."""
    return torch.stack(torch._foreach_norm(list(values))).square()


def _share(missing: Tensor, before: Tensor) -> Tensor:
    """Their ratio; 0 / 0 lost nothing."""
    return torch.nan_to_num(missing / before, nan=0.0, posinf=torch.inf)


def mean(trees: Sequence[Params]) -> Params:
    """The users' average, in new tensors."""
    total = [value.clone() for value in trees[0].values()]
    for tree in trees[1:]:
        torch._foreach_add_(total, list(tree.values()))
    torch._foreach_div_(total, len(trees))
    return dict(zip(trees[0], total, strict=True))


class Tally:
    """Sums and largest values since the last row, and which entries were never sent."""

    def __init__(self, flat: Flat, users: int) -> None:
        def new(*shape: int) -> Tensor:
            return flat.zeros.new_zeros(shape, dtype=torch.float64)

        self.sums, self.largest = {name: new() for name in ("loss", "inside", "lies")}, new(len(LARGEST))
        self.rows = flat.new(users, torch.bool).logical_not_()
        self.unsent: list[Mask] = [flat.views(row) for row in self.rows]
        self.entries = sum(shape.numel() for shape in flat.shapes.values())

    def sent(self, user: int, sent: Params) -> None:
        """One more round of a user."""
        for name, where in self.unsent[user].items():
            where.logical_and_(sent[name] == 0)

    def sent_by_all(self, rows: Tensor) -> None:
        """One more round of everybody, (users, N)."""
        self.rows.logical_and_(rows == 0)

    def losses(self, losses: Sequence[Tensor], sizes: Sequence[int]) -> None:
        """The mean losses of batches of these sizes."""
        weighted = torch._foreach_mul(list(losses), [float(size) for size in sizes])
        self.sums["loss"].add_(torch.stack(weighted).sum(dtype=torch.float64))

    def step(self, users: Measured, average: Tensor) -> None:
        """One more step of all, (users,) each; `average` is ||.||^2 of the users' average gradient."""
        squares = users.square.double()
        variance = squares.mean() - average  # E||g - Eg||^2
        found = (users.gamma.amax().double(), users.gamma_whole.amax().double(), squares.amax(), variance.clamp_min(0))
        self.largest.copy_(torch.maximum(self.largest, torch.stack(found)))

    def broadcast(self, inside: Mask) -> None:
        """One more broadcast."""
        self.sums["inside"].add_(torch.cat([where.flatten() for where in inside.values()]).sum())

    def row(self, examples: int, steps: int, states: Sequence[Params], aligned: bool) -> Row:
        """What the epoch that just ended was, and everything at zero again but the entries never sent."""
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
        """How many are True in (..., N), without the gaps, which nobody ever sends."""
        gaps = rows.shape[-1] - self.entries
        return int(rows.sum()) - gaps * (rows.numel() // rows.shape[-1])

    def _residuals(self, states: Sequence[Params]) -> Row:
        """How much the users hold back: nothing, without error feedback."""
        residuals = [{n: v for n, v in state.items() if n.startswith(RESIDUAL)} for state in states]
        if not residuals[0]:
            return dict.fromkeys(("residual_mean", "residual_max", "error_norm", "starved"), 0.0)
        each = [starvation(state, mask) for state, mask in zip(states, self.unsent, strict=True)]
        norms = [one.residual_norm for one in each]
        return {
            "residual_mean": sum(norms) / len(norms),
            "residual_max": max(norms),
            "error_norm": float(_squares(list(mean(residuals).values())).double().sum().sqrt()),  # Lemma 1's ||e_t||
            "starved": sum(one.starved for one in each) / len(each),
        }
