"""How near a reconstruction can be to its picture: dgp Proposition 1, measured on real ones.

The proof takes x -> gradient for linear. It is not, and with ReLU or max-pooling it even jumps, which no derivative
sees; so this is a rule of thumb whose exceptions are counted.

The largest singular value of a Jacobian and the largest curvature of a loss, by power iteration: no matrix is made.

Both come from below: power iteration reaches the largest value in the limit, if its start is not orthogonal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.problem import structure
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Loss, Params
from secateur.metrics.membership import Estimate, share


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


class InputBound(NamedTuple):
    """Proposition 1 at one reconstruction, in the model's units."""

    error: float  # ||x - x'||
    gradients: float  # ||phi(x) - phi(x')||
    sent: float | None  # ||phi(x) - g||, what the paper puts in its place: as if x' had the gradient that was sent
    norm: float  # ||d phi / d x||, from below

    @property
    def bound(self) -> float:
        """Eq. 2: what ||x - x'|| is said to be at least."""
        return self.gradients / self.norm

    @property
    def bound_by_sent(self) -> float | None:
        """The same by the defense alone, without an attack: "the quality is limited by ||grad W - g||"."""
        return None if self.sent is None else self.sent / self.norm

    @property
    def violated(self) -> bool:
        """Whether the reconstruction is nearer than Eq. 2 allows."""
        return self.error < self.bound

    @property
    def violated_by_sent(self) -> bool | None:
        """Whether it is nearer than the defense is said to allow."""
        return None if self.bound_by_sent is None else self.error < self.bound_by_sent


def reconstruction_bound(
    net: nn.Module,
    state: Params,
    truth: Batch,
    guess: Tensor,
    rng: Generator,
    sent: Params | None = None,
    points: int = 1,
    batchnorm: Literal["eval", "batch"] = "eval",
    loss: Loss = cross_entropy,
) -> InputBound:
    """||x - x'|| >= ||phi(x) - phi(x')|| / ||d phi / d x|| (dgp Proposition 1, Eq. 2).

    Phi is the map from input to gradient. `guess` is x', matched to the truth row by row; the true labels stand on
    both sides. The norm is taken at x, as in the paper. With more `points` it is the largest at so many places on the
    way from x to x', both ends included: by the mean value inequality Eq. 2 then holds for a smooth network, but for
    the places in between. Only the evaluator may call it.
    """
    if guess.shape != truth.inputs.shape:
        found, wanted = tuple(guess.shape), tuple(truth.inputs.shape)
        raise WrongInput("guess", f"has shape {found}; give the pictures matched to the truth, {wanted}")
    phi = gradient_map(net, state, truth.labels, batchnorm, loss)
    here, there = phi(truth.inputs), phi(guess)
    ways = torch.linspace(0, 1, points).tolist()
    norms = [jacobian_norm(phi, torch.lerp(truth.inputs, guess, way), rng, tolerance=1e-4).value for way in ways]
    shown = None if sent is None else torch.cat([sent[name].flatten() for name, _ in net.named_parameters()])
    return InputBound(
        error=float((truth.inputs - guess).norm()),
        gradients=float((here - there).norm()),
        sent=None if shown is None else float((here - shown).norm()),
        norm=max(norms),
    )


def violations(bounds: Sequence[InputBound], by_sent: bool = False) -> Estimate:
    """The share of real reconstructions that are nearer than Proposition 1 allows, with Wilson's interval.

    `by_sent` asks the form in which the paper uses it, with the gradient that was sent in place of phi(x').
    """
    broken = [bound.violated_by_sent if by_sent else bound.violated for bound in bounds]
    if not broken or None in broken:
        raise WrongInput("bounds", "are missing, or were made without `sent`; give at least one, made with it")
    return share(torch.tensor(broken))


def gradient_map(
    net: nn.Module,
    state: Params,
    labels: Tensor,
    batchnorm: Literal["eval", "batch"] = "eval",
    loss: Loss = cross_entropy,
) -> Callable[[Tensor], Tensor]:
    """phi(., W): inputs -> the gradient of their mean loss by all parameters, as one vector in the net's order."""
    fixed = structure(net, batchnorm)
    params = {name: state[name].detach() for name, _ in fixed.named_parameters()}
    buffers = {name: state.get(name, own).detach().clone() for name, own in fixed.named_buffers()}

    def phi(inputs: Tensor) -> Tensor:
        def of(values: Params) -> Tensor:
            return loss(functional_call(fixed, {**values, **buffers}, (inputs,)), labels)

        return torch.cat([value.flatten() for value in grad(of)(params).values()])

    return phi
