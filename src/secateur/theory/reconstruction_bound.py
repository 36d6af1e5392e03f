"""The bound of dgp Proposition 1 on the distance of a reconstruction to its picture, measured on real ones.

The proof takes x -> gradient as linear. With ReLU or max-pooling this map even jumps, which no derivative sees. So the
proposition is a rule of thumb, and `violated` says where it fails.

Singular values of Jacobians and curvatures of losses come from power iteration, without a matrix. Power iteration
approaches the largest value from below, if its start is not orthogonal to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.problem import structure
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Loss, Params

Step = Callable[[Tensor], tuple[Tensor, Tensor]]  # a unit vector v -> ||A v||, and the next direction A^T A v, unscaled


class InputBound(NamedTuple):
    """Proposition 1 at one reconstruction, in the model's units."""

    error: float  # ||x - x'||
    gradients: float  # ||phi(x) - phi(x')||
    sent: float | None  # ||phi(x) - g||, by which the paper replaces it: as if x' had the gradient that was sent
    norm: float  # ||d phi / d x||, from below

    @property
    def bound(self) -> float:
        """The lower bound of ||x - x'|| by Eq. 2."""
        return self.gradients / self.norm

    @property
    def bound_by_sent(self) -> float | None:
        """The bound by the defense alone, without an attack: "the quality is limited by ||grad W - g||"."""
        return None if self.sent is None else self.sent / self.norm

    @property
    def violated(self) -> bool:
        """True if the reconstruction is nearer than Eq. 2 allows."""
        return self.error < self.bound

    @property
    def violated_by_sent(self) -> bool | None:
        """True if the reconstruction is nearer than the bound by the defense alone; None without `sent`."""
        return None if self.bound_by_sent is None else self.error < self.bound_by_sent


class Spectral(NamedTuple):
    """A largest singular value, approached from below."""

    value: float
    change: float  # relative, of the last iteration
    iterations: int


def reconstruction_bound(
    net: nn.Module,
    state: Params,
    truth: Batch,
    guess: Tensor,
    rng: Generator,
    sent: Params | None = None,
    points: int = 1,
    loss: Loss = cross_entropy,
) -> InputBound:
    """Measure ||x - x'|| >= ||phi(x) - phi(x')|| / ||d phi / d x|| (dgp Proposition 1, Eq. 2).

    Phi is the map from input to gradient. `guess` is x', matched to the truth row by row; both sides have the true
    labels. The norm is taken at x, as in the paper. With more `points` it is the largest at that many points on the
    segment from x to x', both ends included. By the mean value inequality Eq. 2 then holds for a smooth network, up
    to the gaps between the points. Only the evaluator may call this function.
    """
    if guess.shape != truth.inputs.shape:
        shape, wanted = tuple(guess.shape), tuple(truth.inputs.shape)
        raise WrongInput("guess", f"has shape {shape}; must be that of the truth, {wanted}")
    phi = gradient_map(net, state, truth.labels, loss=loss)
    here, there = phi(truth.inputs), phi(guess)
    weights = torch.linspace(0, 1, points).tolist()
    norms = [jacobian_norm(phi, torch.lerp(truth.inputs, guess, w), rng, tolerance=1e-4).value for w in weights]
    shown = None if sent is None else torch.cat([sent[name].flatten() for name, _ in net.named_parameters()])
    return InputBound(
        error=float((truth.inputs - guess).norm()),
        gradients=float((here - there).norm()),
        sent=None if shown is None else float((here - shown).norm()),
        norm=max(norms),
    )


def gradient_map(
    net: nn.Module,
    state: Params,
    labels: Tensor,
    batchnorm: Literal["eval", "batch"] = "eval",
    loss: Loss = cross_entropy,
) -> Callable[[Tensor], Tensor]:
    """Return phi(., W): inputs -> the gradient of their mean loss by all parameters, one vector in the net's order."""
    fixed = structure(net, batchnorm)
    params = {name: state[name].detach() for name, _ in fixed.named_parameters()}
    buffers = {name: state.get(name, value).detach().clone() for name, value in fixed.named_buffers()}

    def phi(inputs: Tensor) -> Tensor:
        def of(values: Params) -> Tensor:
            return loss(functional_call(fixed, {**values, **buffers}, (inputs,)), labels)

        return torch.cat([value.flatten() for value in grad(of)(params).values()])

    return phi


def jacobian_norm(
    function: Callable[[Tensor], Tensor], at: Tensor, rng: Generator, iterations: int = 200, tolerance: float = 1e-6
) -> Spectral:
    """Return ||d function / d x||_2 at x, by power iteration on J^T J with jvp and vjp.

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


def _iterate(step: Step, like: Tensor, rng: Generator, iterations: int, tolerance: float) -> Spectral:
    """Return the largest singular value by power iteration from a Gaussian start."""
    direction = torch.randn(like.shape, generator=rng, dtype=torch.float64).to(like)
    value, change, done = 0.0, float("inf"), 0
    while done < iterations and change > tolerance:
        size = torch.linalg.vector_norm(direction)
        if not size > 0:  # the map is flat here
            return Spectral(0.0, 0.0, done)
        length, direction = step(direction / size)
        before, value, done = value, float(length), done + 1
        change = abs(value - before) / value if value else 0.0
    return Spectral(value, change, done)
