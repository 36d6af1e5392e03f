"""The largest singular value of a Jacobian and the largest curvature of a loss, by power iteration: no matrix is made.

Both come from below: power iteration reaches the largest value in the limit, if its start is not orthogonal to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import grad, jvp, vjp

from secateur.interfaces import Params


class Spectral(NamedTuple):
    """A largest singular value, approached from below."""

    value: float
    change: float  # relative, of the last iteration: how far it may still be
    iterations: int


Step = Callable[[Tensor], tuple[Tensor, Tensor]]  # a unit vector v -> ||A v||, and where to go on: A^T A v, unscaled


def jacobian_norm(
    function: Callable[[Tensor], Tensor], at: Tensor, rng: Generator, iterations: int = 200, tolerance: float = 1e-6
) -> Spectral:
    """||d function / d x||_2 at x, by power iteration on J^T J with jvp and vjp.

    Example:
        >>> rng = Generator().manual_seed(0)
        >>> round(jacobian_norm(lambda x: x * torch.tensor([3.0, -5.0]), torch.zeros(2), rng).value, 4)
        5.0
    """
    pulled = vjp(function, at)[1]

    def step(direction: Tensor) -> tuple[Tensor, Tensor]:
        image = jvp(function, (at,), (direction,))[1]
        return torch.linalg.vector_norm(image), pulled(image)[0].detach()

    return _iterate(step, at, rng, iterations, tolerance)


def hessian_norm(
    loss: Callable[[Params], Tensor], at: Params, rng: Generator, iterations: int = 200, tolerance: float = 1e-4
) -> Spectral:
    """The largest |eigenvalue| of the Hessian of `loss` at a point, by Hessian-vector products (jvp of the gradient).

    The smoothness K of Assumption 2 is the largest over all points; this is a lower bound of it.
    """
    sizes = [value.numel() for value in at.values()]
    flat = torch.cat([value.detach().flatten() for value in at.values()])

    def of(vector: Tensor) -> Tensor:
        parts = torch.split(vector, sizes)
        return loss({name: part.view_as(at[name]) for name, part in zip(at, parts, strict=True)})

    def step(direction: Tensor) -> tuple[Tensor, Tensor]:
        image = jvp(grad(of), (flat,), (direction,))[1]
        return torch.linalg.vector_norm(image), image.detach()

    return _iterate(step, flat, rng, iterations, tolerance)


def _iterate(step: Step, like: Tensor, rng: Generator, iterations: int, tolerance: float) -> Spectral:
    direction = torch.randn(like.shape, generator=rng, dtype=torch.float64).to(like)
    value, change, done = 0.0, float("inf"), 0
    while done < iterations and change > tolerance:
        size = torch.linalg.vector_norm(direction)
        if not size > 0:  # the map is flat here
            return Spectral(0.0, 0.0, done)
        found, direction = step(direction / size)
        before, value, done = value, float(found), done + 1
        change = abs(value - before) / value if value else 0.0
    return Spectral(value, change, done)
