"""Error feedback: entries that were not sent are added to the next gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from secateur.catalogue import Defense, method
from secateur.defenses import NATURAL
from secateur.errors import WrongInput
from secateur.interfaces import Mask, Params, Upload, UploadContext

RESIDUAL, INNER = "residual.", "inner."  # prefixes of the state's names: e, and the inner upload's state


@dataclass(frozen=True)
class ErrorFeedback:
    """Upload that sends inner(gradient + residual) and keeps the unsent part (dgp Algorithm 2, lines 5-7).

    Nothing is lost: a sent entry leaves P - P = 0, an unsent entry P - 0 = P. Both are exact, so sent + next residual
    equals gradient + residual bitwise. Around an upload that adds noise, the noise is fed back too: over the rounds all
    noise but the last round's cancels.
    """

    inner: Upload

    def __post_init__(self) -> None:
        if getattr(self.inner, "anew", False):
            reason = "it computes its gradient anew from the examples, so a residual cannot be added"
            name = type(self.inner).__name__
            raise WrongInput("defense", f"error-feedback cannot be combined with {name}: {reason}")
        if getattr(self.inner, "no_residual", False):
            reason = "it feeds the noise back, so that the noise cancels over the rounds"
            raise WrongInput("defense", f"error-feedback cannot be combined with {type(self.inner).__name__}: {reason}")

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    def init(self, params: Params) -> Params:
        """Return a residual of zeros, and the inner upload's state."""
        residual = {RESIDUAL + name: torch.zeros_like(value) for name, value in params.items()}
        return residual | {INNER + name: value for name, value in self.inner.init(params).items()}

    def __call__(
        self, grads: Params, state: Params, context: UploadContext, **outside: Params
    ) -> tuple[Params, Params]:
        """Return the upload and the next state; `outside` goes to the inner upload: drawn `noise`, ADGP's `inside`."""
        accumulated = self.accumulate(grads, state)
        kept = {name.removeprefix(INNER): value for name, value in state.items() if name.startswith(INNER)}
        sent, kept = self.inner(accumulated, kept, context, **outside)
        residual = {RESIDUAL + name: value - sent[name] for name, value in accumulated.items()}
        return sent, residual | {INNER + name: value for name, value in kept.items()}

    def accumulate(self, grads: Params, state: Params) -> Params:
        """Return P = gradient + residual, the input of the inner upload and of ADGP's positions."""
        return {name: value + state[RESIDUAL + name] for name, value in grads.items()}


@method(
    "defense",
    "error-feedback",
    "dgp",
    acts_on="residual",
    adaptive=("support+follows",),
    strongest=f"adaptive=reapply or support:follows=true, {NATURAL}, on a trained residual (--rounds-before)",
)
def error_feedback() -> Callable[[Upload], ErrorFeedback]:
    """Adds what an upload did not send to the client's next gradient (Karimireddy et al. 2019; dgp Algorithm 2).

    Equation: `P = gradient + residual; sent = upload(P); next residual = P - sent`.

    Acts on: the residual of the upload it is combined with, as in `dgp+error-feedback`.
    """
    return ErrorFeedback


def upload_of(defense: Defense) -> Upload | None:
    """Return the upload of a defense, inside error feedback if that is a part; None if no part rewrites uploads."""
    upload, feedback = defense.find_part("upload"), defense.find_part("residual")
    if upload is None and feedback is not None:
        raise WrongInput("defense", "error-feedback needs an upload to act on; use for example dgp+error-feedback")
    if upload is None:
        return None
    inner: Upload = upload.make()
    return inner if feedback is None else feedback.make()(inner)


class Starvation(NamedTuple):
    """The amount that error feedback holds back."""

    residual_norm: float  # ||e||_2 over all tensors
    never_sent: int  # entries
    starved: int  # of these, the entries whose residual is not 0
    entries: int


def starvation(state: Params, unsent: Mask) -> Starvation:
    """Return the norm of a client's residual, and the number of entries that were never sent."""
    residual = torch.cat([state[RESIDUAL + name].flatten() for name in unsent])
    never = torch.cat([where.flatten() for where in unsent.values()])
    norm = float(torch.linalg.vector_norm(residual, dtype=torch.float64))
    return Starvation(norm, int(never.sum()), int((never & (residual != 0)).sum()), never.numel())
