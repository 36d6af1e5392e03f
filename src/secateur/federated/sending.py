"""What an Upload needs of the loop around it: noise drawn outside, ADGP's broadcast, a CUDA graph that can hold it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Generator

from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.top_k import TopK
from secateur.interfaces import Params, Turning, Upload


@dataclass(frozen=True)
class SendAll:
    """Sends the gradient as it is: collaborative SGD without a defense."""

    def init(self, params: Params) -> Params:
        """Nothing is kept."""
        return {}

    def __call__(self, grads: Params, state: Params, turning: Turning) -> tuple[Params, Params]:
        """All of it."""
        return grads, state


CAPTURED = (SendAll, TopK, DualGradientPruning, AlignedDualGradientPruning, GaussianNoise)


def inner_of(upload: Upload) -> Upload:
    """What acts inside error feedback."""
    return upload.inner if isinstance(upload, ErrorFeedback) else upload


def capturable(upload: Upload) -> bool:
    """Whether a CUDA graph may hold it, mapped over the users: it reads no number back, draws by its `noise` alone.

    Of its Turning it looks at nothing. soteria and dp copy the network to the device at every call and outpost's chance
    falls with the round, so these run eager on a GPU, one by one after captured gradients. A class of the user's own
    says it by `captured = True`; one that overrides error feedback is called as it is.
    """
    inner = inner_of(upload)
    if isinstance(upload, ErrorFeedback) and type(upload) is not ErrorFeedback:
        return False
    return bool(getattr(inner, "captured", isinstance(inner, CAPTURED)))


def makes_anew(upload: Upload) -> bool:
    """Whether it makes its gradient from the examples itself, by BatchNorm's running statistics (dp)."""
    return bool(getattr(inner_of(upload), "anew", False))


def aligned(upload: Upload) -> AlignedDualGradientPruning | None:
    """ADGP, where that is what acts."""
    inner = inner_of(upload)
    return inner if isinstance(inner, AlignedDualGradientPruning) else None


def drawn(upload: Upload, params: Params, rng: Generator) -> Params:
    """The noise of one call; empty where an upload has none, or draws it itself."""
    draw = getattr(inner_of(upload), "noise", None)
    return {} if draw is None else draw(params, rng)


def accumulated(upload: Upload, grads: Params, state: Params) -> Params:
    """X, what is compressed: gradient + residual with error feedback, else the gradient."""
    return upload.accumulated(grads, state) if isinstance(upload, ErrorFeedback) else grads
