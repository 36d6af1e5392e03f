"""Properties of an Upload that its loop needs: noise drawn outside, ADGP's broadcast, capture in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Generator

from secateur.catalogue import Defense
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.distributed_dp import DistributedPrivacy
from secateur.defenses.dp import DifferentialPrivacy, PrivateTurn
from secateur.defenses.error_feedback import ErrorFeedback, upload_of
from secateur.defenses.noise import GaussianNoise
from secateur.defenses.top_k import TopK
from secateur.errors import WrongInput
from secateur.interfaces import Params, Upload, UploadContext


@dataclass(frozen=True)
class SendAll(Upload):
    """Upload that sends the gradient unchanged: collaborative SGD without a defense."""

    def __call__(self, grads: Params, state: Params, context: UploadContext) -> tuple[Params, Params]:
        """Return the gradient unchanged."""
        return grads, state


CAPTURED = (SendAll, TopK, DualGradientPruning, AlignedDualGradientPruning, GaussianNoise)


def inner_of(upload: Upload) -> Upload:
    """Return the upload inside error feedback, or the upload itself."""
    return upload.inner if isinstance(upload, ErrorFeedback) else upload


def capturable(upload: Upload) -> bool:
    """Return True if a CUDA graph can hold the upload, mapped over the users.

    Such an upload reads no value back, draws by its `noise` alone, and ignores its context. soteria and dp copy the
    network to the device at every call, and outpost's probability falls with the round. On a GPU these run eagerly, one
    by one after captured gradients. A user's own class declares itself by `captured = True`. A subclass of
    ErrorFeedback is not captured.
    """
    inner = inner_of(upload)
    if isinstance(upload, ErrorFeedback) and type(upload) is not ErrorFeedback:
        return False
    return bool(getattr(inner, "captured", isinstance(inner, CAPTURED)))


def makes_anew(upload: Upload) -> bool:
    """Return True if the upload computes its gradient from the examples, by BatchNorm's running statistics (dp)."""
    return bool(getattr(inner_of(upload), "anew", False))


def promises_epsilon(upload: Upload) -> bool:
    """Return True if what the upload sends has an epsilon, which covers nothing else that a client sends."""
    return makes_anew(upload) or isinstance(inner_of(upload), DistributedPrivacy)


def find_aligned(upload: Upload) -> AlignedDualGradientPruning | None:
    """Return the upload's ADGP, or None."""
    inner = inner_of(upload)
    return inner if isinstance(inner, AlignedDualGradientPruning) else None


def draw_noise(upload: Upload, params: Params, rng: Generator) -> Params:
    """Return the noise of one call; empty if an upload has none or draws it itself."""
    draw = getattr(inner_of(upload), "noise", None)
    return {} if draw is None else draw(params, rng)


def accumulate(upload: Upload, grads: Params, state: Params) -> Params:
    """Return X, the input of the compression: gradient + residual with error feedback, else the gradient."""
    return upload.accumulate(grads, state) if isinstance(upload, ErrorFeedback) else grads


def protection_of(defense: Defense) -> dict[str, Any]:
    """Return a defense as fields of FederationSpec; refuse parts that do not act on a client's upload."""
    client = defense.find_part("client")
    for part in defense.parts:
        target = part.method.info["acts_on"]
        if target == "loss":
            apart = "acts on the loss, which clients of a federation take from the field loss"
            raise WrongInput("defense", f"{part.name} {apart}; use secateur invert to attack an update under it")
        if part.name != "none" and target not in ("client", "upload", "residual"):
            raise WrongInput("defense", f"{part.name} acts on {target}; use one that acts on an upload")
    upload = upload_of(defense)
    check_alone(upload)
    if client is None:
        return {"upload": upload}
    instance = client.make()
    if len(defense.parts) > 1 and (upload is None or not makes_anew(upload)):
        raise WrongInput("defense", f"{client.name} can be combined only with dp; leave out the other defenses")
    if not hasattr(instance, "turn"):
        return {"withholding": instance, "upload": upload}
    return {"custom_turn": PrivateTurn(instance, upload) if isinstance(upload, DifferentialPrivacy) else instance}


def check_alone(upload: Upload | None) -> None:
    """Raise WrongInput for adgp, whose clients know each other's positions; those of a federation do not."""
    if upload is not None and find_aligned(upload) is not None:
        raise WrongInput("defense", "adgp lets one client choose the positions of all clients; use dgp")
