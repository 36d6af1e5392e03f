"""Gradient matching through a generator: what moves are latents, what is compared are the pictures made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from secateur.attacks.inversion.loop import Trials
from secateur.attacks.inversion.problem import Evaluate, Evaluated, Variables
from secateur.attacks.inversion.wgan import LATENT
from secateur.errors import WrongInput
from secateur.interfaces import Params

Pictures = Callable[[Tensor, Tensor], Tensor]  # latents (..., 128) and labels (...) -> pictures (..., C, H, W)
AT_ONCE = 512  # pictures that a generator makes together


@dataclass(frozen=True, eq=False)
class Latents(Trials):
    """Trials whose `inputs` are latents (N, B, 128)."""

    pictures: Pictures


def divergence(latents: Tensor) -> Tensor:
    """KL(z) of latents (..., B, 128), summed over B: of N(m, s^2) to N(0, 1), (m^2 + s^2 - 1 - ln s^2) / 2.

    m and s^2 are the mean and the variance of one latent's entries. Only these two are held near those of N(0, 1).
    """
    mean, variance = latents.mean(-1), latents.var(-1, correction=0)
    logarithm = variance.clamp_min(torch.finfo(latents.dtype).tiny).log()
    return ((mean.square() + variance - 1 - logarithm) / 2).sum(-1)


def through_generator(evaluate: Evaluate, pictures: Pictures, kl: float) -> Evaluate:
    """The same question asked of latents, plus kl * KL(z); the chain rule through the generator gives the gradient."""

    def latent(variables: Variables, labels: Tensor | None, fixed: Params) -> Evaluated:
        assert labels is not None, "a generator needs labels"
        with torch.enable_grad():
            z = variables["inputs"].detach().requires_grad_()
            made, penalty = pictures(z, labels), kl * divergence(z)
        found = evaluate({"inputs": made.detach()}, labels, fixed)
        slopes = [found.gradient["inputs"], torch.ones_like(penalty)]
        (gradient,) = torch.autograd.grad([made, penalty], z, slopes)
        total = found.total + penalty.detach()
        return Evaluated(total, total, {"inputs": gradient})

    return latent


def pictures_by(generator: Pictures, like: Tensor) -> Pictures:
    """A generator for latents with any leading axes, in the type and on the device of `like`."""
    if isinstance(generator, nn.Module):
        generator = copy.deepcopy(generator).to(like.device).eval().requires_grad_(False)

    def pictures(latents: Tensor, labels: Tensor) -> Tensor:
        parts = (torch.split(rows, AT_ONCE) for rows in (latents.reshape(-1, LATENT), labels.reshape(-1)))
        made = torch.cat([generator(z, y) for z, y in zip(*parts, strict=True)])
        return made.to(like).reshape(*labels.shape, *made.shape[1:])

    return pictures


def check_generator(pictures: Pictures, input_shape: tuple[int, ...], like: Tensor, differentiable: bool) -> None:
    """Refuse a generator that does not make finite pictures of the right shape, or cannot be differentiated."""
    latents = torch.linspace(-1, 1, 2 * LATENT).to(like).view(2, LATENT).requires_grad_(differentiable)
    try:
        made = pictures(latents, torch.zeros(2, dtype=torch.int64, device=like.device))
    except Exception as error:  # whatever the user's own code raises
        reason = f"raised {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        raise WrongInput("generator", f"it must take noise (N, {LATENT}) and labels (N,), and {reason}") from error
    if tuple(made.shape) != (2, *input_shape):
        wanted = f"two rows of noise must become pictures {(2, *input_shape)}"
        raise WrongInput("generator", f"{wanted}, and became {tuple(made.shape)}")
    if not bool(torch.isfinite(made).all()):
        raise WrongInput("generator", "it must return finite numbers, and returned NaN or infinity")
    if differentiable and not made.requires_grad:
        raise WrongInput("generator", "its pictures cannot be differentiated by the noise; search with cma instead")
