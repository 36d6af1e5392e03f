"""DGP: dual gradient pruning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from secateur.catalogue import method
from secateur.defenses import AGAINST_PRUNING
from secateur.defenses.selection import Sizes, counts, end_to_end, keep_between, keep_rows, top_and_between
from secateur.errors import WrongInput, check_number, check_whole
from secateur.interfaces import Params, UploadContext

FORCE = {"k1": 0.05, "k2": 0.75, "total": None, "p": None, "release": None}  # the defaults as a list shows them


@method(
    "defense",
    "dgp",
    "dgp",
    acts_on="upload",
    adaptive=("support", "reapply"),
    defaults=FORCE,
    strongest=AGAINST_PRUNING,
)
@dataclass(frozen=True)
class DualGradientPruning:
    """Removes the largest k1 and the smallest k2 of every tensor's entries from a gradient (dgp Algorithm 1).

    Acts on: the upload. Set k1 and k2, or their sum `total` and their ratio p = k1 / k2, never both. Exactly
    n - ceil(k1 n) - int(k2 n) of n entries stay. k1 rounds up, so that a short bias loses its largest entry too. The
    earlier of equal entries counts as larger.

    `release` is our own variant. With error feedback, an entry that is always among the largest of gradient + residual
    is never sent. With `release`, an entry that the top rule held back for that many consecutive rounds is sent once.
    It comes on top of the exact number of others. The client's state counts the rounds.

    Equation: `sent_i = 0 if |g_i| is among the largest ceil(k1 n) or smallest int(k2 n) of its tensor, else g_i`.
    """

    k1: float | None = None  # .05 unless total or p is set
    k2: float | None = None  # .75
    total: float | None = None  # k1 + k2; .8 if only p is set
    p: float | None = None  # k1 / k2; 1/15 if only total is set
    release: int | None = None

    def __post_init__(self) -> None:
        if {self.k1, self.k2} != {None} and {self.total, self.p} != {None}:
            raise WrongInput("k1, k2, total, p", "are set twice; use k1 and k2, or total = k1 + k2 and p = k1 / k2")
        if self.p is not None:
            check_number("p", self.p, "[0, inf)")
        if self.total is not None:
            check_number("total", self.total, "[0, 1)")
        if self.release is not None:
            check_whole("release", self.release)
        counts(0, *self.shares)  # refuses k1 and k2

    @property
    def shares(self) -> tuple[float, float]:
        """(k1, k2), from whichever fields are set.

        Example:
            >>> [tuple(round(share, 9) for share in DualGradientPruning(p=p).shares) for p in (1 / 15, 1 / 7, 1 / 3)]
            [(0.05, 0.75), (0.1, 0.7), (0.2, 0.6)]
        """
        if self.total is None and self.p is None:
            return 0.05 if self.k1 is None else self.k1, 0.75 if self.k2 is None else self.k2
        total, p = 0.8 if self.total is None else self.total, 1 / 15 if self.p is None else self.p
        return total * p / (1 + p), total / (1 + p)

    @property
    def in_force(self) -> dict[str, float]:
        """The values of k1 and k2, from whichever fields are set."""
        return dict(zip(("k1", "k2"), self.shares, strict=True))

    def __str__(self) -> str:
        """Return the class name with the values in force, from whichever fields are set.

        Example:
            >>> str(DualGradientPruning(total=0.8, p=1 / 3)), str(DualGradientPruning(release=10))
            ('DualGradientPruning(k1=0.2, k2=0.6)', 'DualGradientPruning(k1=0.05, k2=0.75, release=10)')
        """
        k1, k2 = self.shares
        release = "" if self.release is None else f", release={self.release}"
        return f"{type(self).__name__}(k1={k1:.6g}, k2={k2:.6g}{release})"

    def init(self, params: Params) -> Params:
        """Return per entry the consecutive rounds that the top rule held it back; empty without `release`."""
        if self.release is None:
            return {}
        return {name: torch.zeros_like(value, dtype=torch.int32) for name, value in params.items()}

    def __call__(self, grads: Params, state: Params, context: UploadContext) -> tuple[Params, Params]:
        """Return the entries between the largest and the smallest, the released entries, and the next state."""
        release = self.release
        if release is None:
            return self.compress(grads), state

        def rule(sizes: Sizes, flat: Tensor, held: Tensor) -> tuple[Tensor, Tensor]:
            top, stays = top_and_between(sizes, flat, *self.shares)
            released = top & (held >= release)
            return torch.where(stays | released, flat, 0), torch.where(top & ~released, held + 1, 0)

        sent, rounds = end_to_end(rule, grads, state)
        return sent, rounds

    def compress(self, grads: Params) -> Params:
        """Apply Algorithm 1 to any gradient; an attacker applies it to a trial's gradient."""
        return keep_between(grads, *self.shares)

    def compress_rows(self, rows: Tensor, sizes: Sizes, aligned: int) -> Tensor:
        """Apply `compress` to many users at once, (users, N), laid out as for `selection.keep_rows`."""
        return keep_rows(rows, sizes, aligned, *self.shares)
