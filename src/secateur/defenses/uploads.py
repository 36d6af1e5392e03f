"""What an Upload needs of the loop around it: noise drawn outside, ADGP's broadcast, a CUDA graph that can hold it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Generator

from secateur.catalogue import Defense
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.dp import DifferentialPrivacy
from secateur.defenses.error_feedback import ErrorFeedback, upload_of
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.private_client import PrivateTurn
from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput
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


def protection_of(defense: Defense) -> dict[str, Any]:
    """A defense as fields of Terms; what does not act on what a client sends is refused."""
    client = defense.acting_on("client")
    for part in defense.parts:
        place = part.method.info["acts_on"]
        if part.name != "none" and place not in ("client", "upload", "residual"):
            raise WrongInput("defense", f"{part.name} acts on {place}; give one that acts on what a client sends")
    upload = upload_of(defense)
    _check_alone(upload)
    if client is None:
        return {"upload": upload}
    made = client.make()
    if len(defense.parts) > 1 and (upload is None or not makes_anew(upload)):
        raise WrongInput("defense", f"{client.name} acts alone, or with dp; leave the others out")
    if not hasattr(made, "turn"):
        return {"withholding": made, "upload": upload}
    return {"own": PrivateTurn(made, upload) if isinstance(upload, DifferentialPrivacy) else made}


def _check_alone(upload: Upload | None) -> None:
    if upload is not None and aligned(upload) is not None:
        raise WrongInput("defense", "adgp lets one client choose everybody's positions; take dgp")
