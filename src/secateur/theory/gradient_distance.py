"""Distances of a sent update from its gradient, and the bounds that dgp derives from them.

The distance misleads a plain attacker who matches the sent update. It bounds no attacker who does otherwise. Passive
attackers are those of dgp's Definition 1; Theorem 1 is given as printed and as it is.

Proposition 1 bounds the distance of a reconstruction to its picture. The proof takes x -> gradient as linear. With ReLU
or max-pooling this map even jumps, which no derivative sees. So the proposition is a rule of thumb, and `violated` says
where it fails. Singular values of Jacobians come from power iteration, without a matrix. Power iteration approaches the
largest value from below, if its start is not orthogonal to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import functional_call, grad, jvp, vjp
from torch.nn.functional import cross_entropy

from secateur.attacks.inversion.problem import structure
from secateur.errors import WrongInput, check_number
from secateur.interfaces import Batch, Loss, Params
from secateur.metrics.membership import Estimate


class Degraded(NamedTuple):
    """Distances to the true gradient that an attacker who fits the sent update to within eps can reach."""

    printed: float  # dgp Theorem 1: an upper bound by its proof, for the cosine under a false step
    low: float  # nothing nearer is possible: the only one of the three that protects
    high: float  # nothing farther is possible


def relative_distance(gradient: Params, sent: Params) -> float:
    """Return ||grad W - g||_2 / ||grad W||_2, the x axis of dgp Fig. 1; of a gradient of zeros 0 or infinite.

    Example:
        >>> relative_distance({"w": torch.tensor([3.0, 4.0])}, {"w": torch.tensor([3.0, 0.0])})
        0.8
    """
    return _ratio(distance(gradient, sent), norm(gradient))


def cosine_distance(first: Params, second: Params) -> float:
    """Return 1 - <a, b> / (||a|| ||b||) over all tensors together, or 1 where one of them is 0.

    This is Definition 1's cosine distance.

    Example:
        >>> round(cosine_distance({"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, 0.0])}), 4)
        0.2929
    """
    dots = [(first[name].double() * second[name].double()).sum() for name in first]
    size = norm(first) * norm(second)
    return max(0.0, 1 - float(torch.stack(dots).sum()) / size) if size else 1.0  # rounding may pass 1


def distance(first: Params, second: Params) -> float:
    """Return ||a - b||_2 over all tensors together: Definition 1's Euclidean distance."""
    return norm(_difference(first, second))


def norm(tree: Params) -> float:
    """Return ||.||_2 over all tensors together, in float64."""
    return float(_norms(list(tree.values())).norm())


def epsilon(distances: Tensor, delta: float, level: float = 0.95) -> Estimate:
    """Return the least eps for which an attack is (eps, delta)-passive: P(D(grad W, g*) <= eps) >= 1 - delta.

    dgp Definition 1, from the distances (Euclidean or cosine) that the attack reached in n trials: the ceil((1 - delta)
    n)-th smallest. The interval holds for every distribution (order statistics, by the binomial). Its high end is
    infinite, with a note, where so few trials cannot bound so rare a failure; 20 trials bound no delta below .17.

    eps measures how well an attack fits a gradient, not how well it finds a picture: g* = grad W is eps = 0.

    Example:
        >>> import torch
        >>> epsilon(torch.arange(1.0, 101.0), delta=0.1)
        Estimate(value=90.0, low=84.0, high=96.0, note=None)
    """
    from scipy.stats import binom

    trials, share = distances.numel(), 1 - delta
    check_number("delta", delta, "[0, 1)")
    if trials == 0 or not bool(distances.isfinite().all()):
        raise WrongInput("distances", "are missing or not finite; use one of every trial, without diverged ones")
    ordered = distances.double().flatten().sort().values.tolist()
    value = ordered[max(math.ceil(round(share * trials, 9)), 1) - 1]
    tail = (1 - level) / 2
    below = binom.cdf(range(-1, trials), trials, share)  # P(fewer than i trials lie below the quantile), i = 0 ... n
    low = max((i for i in range(trials + 1) if below[i] <= tail), default=0)
    high = next((i for i in range(1, trials + 1) if below[i] >= 1 - tail), None)
    note = None if high else f"no upper end: {trials} trials cannot bound a failure in {delta:g} of the cases"
    return Estimate(value, ordered[low - 1] if low else 0.0, ordered[high - 1] if high else math.inf, note)


def theorem_1_cosine(epsilon: float, gamma: float) -> Degraded:
    """Bound 1 - cos(g*, grad W) by eps + (1 - eps) sqrt(gamma_1) (dgp Theorem 1).

    The premise is 1 - cos(g*, DGP(grad W)) <= eps.

    Step (c) of the proof takes g* to be 0 wherever DGP pruned. A picture's gradient is not, and then the printed value
    is no bound on either side. A test has g* beyond it, and g* = grad W at 0. `low` and `high` follow from angles: that
    between g* and grad W differs from arccos sqrt(1 - gamma_1) by at most arccos(1 - eps).
    """
    check_number("gamma", gamma, "[0, 1]")  # above 1 the upload did more than drop entries
    pruned, fitted = math.acos(math.sqrt(1 - gamma)), math.acos(max(-1.0, 1 - epsilon))
    low, high = max(0.0, pruned - fitted), min(math.pi, pruned + fitted)
    return Degraded(epsilon + (1 - epsilon) * math.sqrt(gamma), 1 - math.cos(low), 1 - math.cos(high))


def _difference(first: Params, second: Params) -> Params:
    """Return a - b, tensor by tensor."""
    return {name: value - second[name] for name, value in first.items()}


def _norms(values: list[Tensor]) -> Tensor:
    """Return (tensors,) the norm of each, still on the device."""
    return torch.stack([torch.linalg.vector_norm(value, dtype=torch.float64) for value in values])


def _ratio(part: float, whole: float) -> float:
    """Return part / whole; 0 / 0 is 0."""
    if whole:
        return part / whole
    return math.inf if part else 0.0


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
