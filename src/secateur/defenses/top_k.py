"""Top-k: only the largest entries of a gradient are sent."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from secateur.catalogue import method
from secateur.defenses import AGAINST_PRUNING
from secateur.defenses.selection import Sizes, keep_between, keep_rows
from secateur.errors import check_number
from secateur.interfaces import Params, Upload, UploadContext


@method("defense", "top-k", "dgp", acts_on="upload", adaptive=("support", "reapply"), strongest=AGAINST_PRUNING)
@dataclass(frozen=True)
class TopK(Upload):
    """Sends of every tensor the largest entries by magnitude and zeros for the others (Alistarh et al. 2018; dgp 6.1).

    Acts on: the upload. Exactly n - int((1 - keep) n) of n entries stay; of equal ones the earlier counts as larger.

    Equation: `sent_i = g_i if |g_i| is among the largest n - int((1 - keep) n) of its tensor, else 0`.
    """

    keep: float = 0.2  # the paper's Table 7 also keeps .05

    def __post_init__(self) -> None:
        check_number("keep", self.keep, "(0, 1]")

    def __call__(self, grads: Params, state: Params, context: UploadContext) -> tuple[Params, Params]:
        """Return the largest entries."""
        return self.compress(grads), state

    def compress(self, grads: Params) -> Params:
        """Keep the largest entries of any gradient; an attacker applies this to a trial's gradient."""
        return keep_between(grads, 0, 1 - self.keep)

    def compress_rows(self, rows: Tensor, sizes: Sizes, aligned: int) -> Tensor:
        """Apply `compress` to many users at once, (users, N), laid out as for `selection.keep_rows`."""
        return keep_rows(rows, sizes, aligned, 0, 1 - self.keep)
