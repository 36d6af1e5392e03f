"""ADGP: aligned dual gradient pruning."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from secateur.catalogue import method
from secateur.defenses import AGAINST_PRUNING
from secateur.defenses.selection import Sizes, end_to_end, ranks_of, slices, top_and_between
from secateur.errors import WrongInput
from secateur.interfaces import Mask, Params, Upload, UploadContext


@method("defense", "adgp", "dgp", acts_on="upload", adaptive=("support", "reapply"), strongest=AGAINST_PRUNING)
@dataclass(frozen=True)
class AlignedDualGradientPruning(Upload):
    """Drops a gradient's largest k1 and sends the k largest inside positions that all users share (dgp 6.4).

    Acts on: the upload. Each round one user, drawn at random, broadcasts the positions I = `positions(gradient +
    residual)`. In every tensor, I has the positions of that user's largest 2k entries, its largest k1 included. Every
    user drops its own largest k1 entries. It sends the k largest of its other entries inside I, fewer if I holds fewer.
    Entries that are not sent go into the user's residual: use ADGP inside error feedback. The average is 0 outside I,
    so only I is downloaded. Momentum and weight decay move the entries outside I too; every user computes that step by
    itself.

    Trust: the user that broadcasts is trusted. I shows all users the positions where that user's gradient is large, its
    top k1 included. A dishonest broadcaster alone decides what is learnt. With an empty I no user sends anything. With
    I in one corner only that corner is trained, and all other entries wait in the residuals for an honest round.

    `secateur invert` attacks the user that broadcasts, or with `adgp:chosen=false` a user that follows another's I.

    Equation: `P = g + residual; sent = the k largest of P without its largest k1, inside I; I: largest 2k of one user`.
    """

    k1: float = 0.05
    k: float = 0.2
    # for one attacked client: True if it broadcasts I, False if I is another user's; without effect on a training
    chosen: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.k1 < self.k <= 0.5:
            raise WrongInput("k1, k", f"{self.k1} and {self.k} are not allowed; must be 0 <= k1 < k <= .5")

    def __call__(
        self, grads: Params, state: Params, context: UploadContext, inside: Mask | None = None
    ) -> tuple[Params, Params]:
        """Return the upload for the broadcast positions `inside`; None: this client broadcasts."""
        if inside is None and not self.chosen:
            raise WrongInput("inside", "is missing; a user that does not broadcast needs the positions of another user")
        if inside is None:
            return self.compress(grads), state
        _check(inside, grads)
        return end_to_end(self._select_sent, grads, inside)[0], state

    def compress(self, grads: Params) -> Params:
        """Return a broadcasting client's upload for any gradient; an attacker applies this to a trial's gradient."""
        return end_to_end(lambda sizes, flat: self._select_sent(sizes, flat, *self._select_shared(sizes, flat)), grads)[
            0
        ]

    def positions(self, grads: Params) -> Mask:
        """Return I as an honest user broadcasts it."""
        return end_to_end(self._select_shared, grads)[0]

    def _select_shared(self, sizes: Sizes, flat: Tensor) -> tuple[Tensor]:
        return (top_and_between(sizes, flat, 0, 1 - 2 * self.k)[1],)

    def _select_sent(self, sizes: Sizes, flat: Tensor, inside: Tensor) -> tuple[Tensor]:
        """Keep the k largest entries that are inside and not among the largest k1.

        All other entries get the magnitude -1, which ranks below 0.
        """
        magnitudes = flat.detach().abs()
        (top,) = slices(sizes, magnitudes, tuple((first,) for first, _ in ranks_of(sizes, self.k1, 0)))
        allowed = inside & ~top
        numbers = tuple((kept,) for _, kept in ranks_of(sizes, 0, 1 - self.k))
        (largest,) = slices(sizes, torch.where(allowed, magnitudes, -1), numbers)
        return (torch.where(largest & allowed, flat, 0),)


def _check(inside: Mask, grads: Params) -> None:
    """Refuse a broadcast whose names, shapes or dtypes do not match the gradient."""
    for name, value in grads.items():
        if name not in inside or inside[name].shape != value.shape or inside[name].dtype != torch.bool:
            wanted = f"positions of {name} as bool of the shape {tuple(value.shape)}"
            raise WrongInput("inside", f"the broadcast must hold {wanted}")
