"""What a collaborative training measures of itself: kept on the device between two rows, so that no step waits for it.

gamma_1 and the bounds of Assumption 3 are largest values over all users and steps since the last row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from secateur.defenses.error_feedback import RESIDUAL, never_yet, starvation
from secateur.interfaces import Mask, Params
from secateur.tree import count

Row = dict[str, float]
LARGEST = ("gamma_1", "gamma_1_whole", "gradient_square", "gradient_variance")


class Measured(NamedTuple):
    """Of one user's step, () each."""

    square: Tensor  # ||gradient||^2
    gamma: Tensor  # the largest over tensors of ||X - C(X)||^2 / ||X||^2
    gamma_whole: Tensor  # the same of all tensors together


def measure(grads: Params, whole: Params, sent: Params) -> Measured:
    """Compare what was to be sent, X = gradient + residual, with what was."""
    lost = torch._foreach_sub(list(whole.values()), list(sent.values()))
    before, missing = _squares(list(whole.values())), _squares(lost)
    square = before.sum() if whole is grads else _squares(list(grads.values())).sum()
    return Measured(square, _share(missing, before).amax(), _share(missing.sum(), before.sum()))


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

    def __init__(self, params: Params, users: int) -> None:
        first = next(iter(params.values()))
        self.values = {name: first.new_zeros((), dtype=torch.float64) for name in ("loss", "inside", "lies", *LARGEST)}
        self.unsent: list[Mask] = [never_yet(params) for _ in range(users)]
        self.entries = count(params)

    def sent(self, user: int, sent: Params) -> None:
        """One more round of a user."""
        for name, where in self.unsent[user].items():
            where.logical_and_(sent[name] == 0)

    def step(self, losses: Sequence[Tensor], sizes: Sequence[int], users: Sequence[Measured], average: Params) -> None:
        """One more step of all; `average` is that of the users' gradients."""
        for loss, size in zip(losses, sizes, strict=True):
            self.values["loss"].add_(loss, alpha=size)
        squares = torch.stack([user.square for user in users]).double()
        variance = squares.mean() - _squares(list(average.values())).double().sum()  # E||g - Eg||^2
        largest = (
            torch.stack([user.gamma for user in users]).amax(),
            torch.stack([user.gamma_whole for user in users]).amax(),
            squares.amax(),
            variance.clamp_min(0),
        )
        for name, value in zip(LARGEST, largest, strict=True):
            kept = self.values[name]
            kept.copy_(torch.maximum(kept, value.double()))

    def broadcast(self, inside: Mask) -> None:
        """One more broadcast."""
        self.values["inside"].add_(torch.stack([where.sum() for where in inside.values()]).sum())

    def row(self, examples: int, steps: int, states: Sequence[Params], aligned: bool) -> Row:
        """What the epoch that just ended was, and everything at zero again but the entries never sent."""
        found = dict(zip(self.values, torch.stack(list(self.values.values())).tolist(), strict=True))
        for value in self.values.values():
            value.zero_()
        row = {"train_loss": found["loss"] / examples} | {name: found[name] for name in LARGEST}
        row |= self._residuals(states)
        unsent = [torch.cat([where.flatten() for where in mask.values()]) for mask in self.unsent]
        row["never_sent"] = sum(int(each.sum()) for each in unsent) / len(unsent)
        row["never_sent_by_any"] = float(torch.stack(unsent).all(0).sum())
        row["entries"] = float(self.entries)
        if aligned:
            row |= {"broadcast": found["inside"] / (steps * self.entries), "lies": found["lies"]}
        return row

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
