"""ADGP: aligned dual gradient pruning."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from secateur.catalogue import method
from secateur.defenses.selection import Sizes, end_to_end, ranks_of, slices, top_and_between
from secateur.errors import WrongInput
from secateur.interfaces import Mask, Params, Turning


@method("defense", "adgp", "dgp", acts_on="upload", adaptive=("support", "reapply"))
@dataclass(frozen=True)
class AlignedDualGradientPruning:
    """Drops a gradient's largest k1 and sends the k largest inside positions that all users share (dgp 6.4).

    Acts on: the upload. Each round one user, drawn at random, broadcasts I = `positions(its gradient + residual)`: of
    every tensor the places of the largest 2k, its own largest k1 among them. Every user drops its own largest k1 and
    sends the k largest of the rest that lie inside I; fewer, where I holds fewer. What is not sent goes into its
    residual: use it inside error feedback. The average is 0 outside I, so I is all that is downloaded; momentum and
    weight decay move the entries outside too, and every user takes that step by itself.

    Trust: the user that broadcasts is believed. I shows everybody where that user's gradient is large, its top k1
    included; and a user that lies decides alone what is learnt: with an empty I nothing is sent by anyone, with I in
    one corner only that corner is trained, and all else waits in the residuals for an honest round.

    `secateur invert` attacks the user that broadcasts, or one that follows another's I (`adgp:chosen=false`).
    """

    k1: float = 0.05
    k: float = 0.2
    # of one client that is attacked: it broadcasts I itself, else I is another user's; nothing to a training
    chosen: bool = field(default=True, repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.k1 < self.k <= 0.5:
            raise WrongInput("k1, k", f"{self.k1} and {self.k} are not allowed; give 0 <= k1 < k <= .5 (2k are shared)")

    def init(self, params: Params) -> Params:
        """Nothing is kept."""
        return {}

    def __call__(
        self, grads: Params, state: Params, turning: Turning, inside: Mask | None = None
    ) -> tuple[Params, Params]:
        """What is sent when `inside` was broadcast; None: this client is the one that broadcasts."""
        if inside is None and not self.chosen:
            raise WrongInput("inside", "must be given to a user that does not broadcast: another's positions")
        if inside is None:
            return self.compress(grads), state
        _check(inside, grads)
        return end_to_end(self._sent, grads, inside)[0], state

    def compress(self, grads: Params) -> Params:
        """What a client that broadcasts sends of any gradient, for an attacker who applies it to a trial's."""
        return end_to_end(lambda sizes, flat: self._sent(sizes, flat, *self._shared(sizes, flat)), grads)[0]

    def positions(self, grads: Params) -> Mask:
        """I, as an honest user broadcasts it."""
        return end_to_end(self._shared, grads)[0]

    def _shared(self, sizes: Sizes, flat: Tensor) -> tuple[Tensor]:
        return (top_and_between(sizes, flat, 0, 1 - 2 * self.k)[1],)

    def _sent(self, sizes: Sizes, flat: Tensor, inside: Tensor) -> tuple[Tensor]:
        """The k largest that are inside and not among the largest k1; outside ones rank below a magnitude of 0."""
        magnitudes = flat.detach().abs()
        (top,) = slices(sizes, magnitudes, tuple((first,) for first, _ in ranks_of(sizes, self.k1, 0)))
        allowed = inside & ~top
        numbers = tuple((kept,) for _, kept in ranks_of(sizes, 0, 1 - self.k))
        (found,) = slices(sizes, torch.where(allowed, magnitudes, -1), numbers)
        return (torch.where(found & allowed, flat, 0),)


def _check(inside: Mask, grads: Params) -> None:
    """Refuse a broadcast that cannot be followed: another form than the gradient's."""
    for name, value in grads.items():
        if name not in inside or inside[name].shape != value.shape or inside[name].dtype != torch.bool:
            wanted = f"positions of {name} as bool of the shape {tuple(value.shape)}"
            raise WrongInput("inside", f"the broadcast must hold {wanted}")
