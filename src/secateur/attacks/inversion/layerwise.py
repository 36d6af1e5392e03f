"""Layerwise inversion: the inputs of the layers one after the other, last to first, through ReLU and max-pooling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import grad, vmap

from secateur import tree
from secateur.attacks.inversion.label_inference import Rule, infer
from secateur.attacks.inversion.layerwise_network import Network, read_network
from secateur.attacks.inversion.layerwise_solver import (
    LayerEvidence,
    LayerSolver,
    PreparedLayer,
    Prior,
    SolvedLayer,
    best,
    input_slopes,
    moments,
    prepare,
)
from secateur.attacks.inversion.optimisation import SharedBar
from secateur.attacks.inversion.problem import natural_basis
from secateur.attacks.inversion.updates import read_change
from secateur.catalogue import method
from secateur.errors import WrongInput, check_number, check_wholes
from secateur.interfaces import (
    Batch,
    InversionAttack,
    Knowledge,
    Loss,
    Params,
    Reconstruction,
    ServerView,
    Watch,
    Weights,
)
from secateur.seeding import derive, draw_seed
from secateur.training.optimisers import write_optimiser

FITTINGS = 50  # of alternating least squares
SCALES = 801  # lengths of the features that are tried before the zoom
ZOOMS = 12
SURE = 4  # deviations of a slope beyond which it is taken as wrong
ABSENT = 1e-6  # a feature below this share of the largest is taken as 0
SILENT = 0.02  # an input of a later convolution below this share of the root mean square is taken as 0
DRAWS = 5  # pictures of the prior for each input of a later convolution


@method(
    "inversion",
    "layerwise",
    "-",
    threat="an honest-but-curious server that sees one step on one image through convolutions, ReLU and max-pooling",
    active=False,
    strong_on="adam",
    demo={"iterations": 4},
)
@dataclass(frozen=True)
class Layerwise(InversionAttack):
    """Solve every layer for its input, last to first, with the positions that max-pooling took (after R-GAP).

    The gradient of the first Linear is d a^T, so its factors give the features a (Phong et al. 2018). A convolution's
    input x and the positions r of max-pooling solve max_r (W x + b) = a and sum over cells of d x_r = dL/dW. For given
    r both are linear in x. So a Gaussian of x and probabilities of r alternate. Pictures have the 1/f prior of
    `ig-smooth`; priors of later inputs are moments of such random pictures.

    Bounds of the gradient, by Adam's first step, are errors of the equations. One example and one local step are
    needed. The loss is the largest relative squared error of a layer's gradient outside its bounds.

    Equation: `max over r of (W x + b) = a and sum over cells of d x_r = dL/dW; d of the layer before = W^T d`.
    """

    iterations: int = 20  # of each layer
    restarts: int = 1
    share: float = 0.1  # of the gradient's log-likelihood in the probabilities of positions
    precision: float = 1e-2  # error of outputs and gradients, relative to their root mean square
    hardening: float = 0.2  # last factor of the variances that come from unknown positions
    labels: Rule = "idlg"

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse several examples, several local steps, other networks, and numbers outside their ranges."""
        check_wholes(self, "iterations", "restarts")
        for name, interval in (("share", "[0, 1]"), ("precision", "(0, 1)"), ("hardening", "(0, 1]")):
            check_number(name, getattr(self, name), interval)
        if knowledge.batch_size != 1:
            raise WrongInput(
                "attack layerwise", f"recovers one image; batch_size {knowledge.batch_size} is not allowed"
            )
        if self.labels == "joint":
            raise WrongInput("labels", "joint means nothing here: pictures are solved for a given label; use idlg")
        network = read_network(knowledge, view.sent)
        bounds = read_bounds(view, knowledge)
        if f"{network.first}.weight" not in bounds.low:
            first = f"{network.first}.weight"
            raise WrongInput("attack layerwise", f"begins at the gradient of {first}, which is frozen and so not sent")
        infer(self.labels, bounds.values, knowledge)

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """Yield the reconstruction of each target; its best round counts."""
        known: list[tuple[Params, Network, list[PreparedLayer]]] = []
        bar = SharedBar(watch.advance, len(targets))
        for index, (views, rng) in enumerate(zip(targets, chance, strict=True)):
            seed, rounds = draw_seed(rng), []
            for trial, view in enumerate(views):
                if not known or not tree.are_equal(known[-1][0], view.sent):
                    network = read_network(knowledge, view.sent)
                    known = [(view.sent, network, prepare_layers(network, knowledge))]
                _, network, layers = known[-1]
                rounds.append(self._round(view, knowledge, network, layers, index, seed, trial))
            bar.move(1, self.iterations)
            yield index, min(rounds, key=lambda one: one.loss)

    def _round(
        self,
        view: ServerView,
        knowledge: Knowledge,
        network: Network,
        layers: Sequence[PreparedLayer],
        index: int,
        seed: int,
        trial: int,
    ) -> Reconstruction:
        bounds = read_bounds(view, knowledge)
        label, note = infer(self.labels, bounds.values, knowledge, index)
        assert label is not None, "check refuses joint labels"
        label = label.cpu()
        outputs, errors, slopes = read_features(network, bounds, knowledge.loss, label)
        solver = LayerSolver(self.iterations, self.precision, self.share, self.hardening)
        losses, curve = [0.0], []
        for depth, prepared in reversed(list(enumerate(layers))):
            evidence = bounds.collect(prepared, outputs, errors, slopes)
            solved = self._solve(solver, prepared, evidence, seed, depth)
            losses.append(float(solved.residual))
            curve.append((len(layers) - depth, losses[-1]))
            outputs, errors = silence(solved.inputs, solved.errors), solved.errors
            slopes = input_slopes(prepared.layer, evidence, harden(solved.routing))
        like = view.sent[f"{network.first}.weight"]
        picture = solved.inputs.view(1, *knowledge.input_shape).nan_to_num(0, 0, 0).to(like)
        low, high = (limit.to(like) for limit in knowledge.box)
        picture = torch.minimum(torch.maximum(picture, low), high)
        loss = max(losses) if all(map(math.isfinite, losses)) else math.inf
        return Reconstruction(Batch(picture, label.to(like.device)), loss, curve, trial, note=note or "")

    def _solve(
        self, solver: LayerSolver, prepared: PreparedLayer, evidence: LayerEvidence, seed: int, depth: int
    ) -> SolvedLayer:
        """Return the best of the restarts by the residual of the gradient."""
        return best([solver.solve(prepared, evidence, derive(seed, depth, i)) for i in range(self.restarts)])


class GradientBounds(NamedTuple):
    """The gradient that an update shows, by parameter name: values with its signs, and bounds in float64."""

    values: Params
    low: Params
    high: Params

    def collect(self, prepared: PreparedLayer, outputs: Tensor, errors: Tensor, slopes: Tensor) -> LayerEvidence:
        """Return the evidence of a convolution; a frozen one shows no gradient."""
        name, weight = f"{prepared.layer.name}.weight", prepared.layer.weight.flatten(1)
        low = self.low[name].flatten(1) if name in self.low else torch.full_like(weight, -math.inf)
        high = self.high[name].flatten(1) if name in self.high else torch.full_like(weight, math.inf)
        return LayerEvidence(outputs, errors, slopes, low, high)


def read_bounds(view: ServerView, knowledge: Knowledge) -> GradientBounds:
    """Return the bounds of the gradient of one step; refuse an update of several steps."""
    change = read_change(view, knowledge)
    if len(change.turn.batches) != 1 or not change.turn.optimiser.is_plain:
        steps = f"{len(change.turn.batches)} steps of {write_optimiser(knowledge.optimiser)}"
        raise WrongInput("attack layerwise", f"needs one local step; {steps} are not allowed")
    if change.bounds is not None:
        low, high = ({name: value.cpu().double() for name, value in part.items()} for part in change.bounds)
        return GradientBounds(change.values, low, high)
    errors = {name: torch.zeros_like(value) for name, value in change.values.items()}
    if isinstance(view.update, Weights):  # their difference has the rounding of the weights
        pairs = {name: torch.maximum(view.sent[name].abs(), view.update.values[name].abs()) for name in errors}
        errors = {name: value * torch.finfo(value.dtype).eps / change.turn.rates[0] for name, value in pairs.items()}
    both = [{n: (v + side * errors[n]).cpu().double() for n, v in change.values.items()} for side in (-1, 1)]
    return GradientBounds(change.values, both[0], both[1])


def prepare_layers(network: Network, knowledge: Knowledge) -> list[PreparedLayer]:
    """Return the layers with their priors: natural pictures, and what the layers make of random ones."""
    scale = (knowledge.mean.cpu().double(), knowledge.std.cpu().double())
    basis = natural_basis(knowledge.input_shape, *scale)
    size = network.layers[0].size
    root = basis.move(torch.eye(size, dtype=torch.float64).view(size, *knowledge.input_shape)).flatten(1).T.contiguous()
    prior = Prior(basis.grey.expand(knowledge.input_shape).flatten(), root)
    low, high = (limit.cpu().double() for limit in knowledge.box)
    most = max((layer.size for layer in network.layers[1:]), default=0)
    rng = Generator().manual_seed(0)
    pictures = prior.mean + torch.randn(DRAWS * most, size, generator=rng, dtype=torch.float64) @ root.T
    shaped = pictures.view(-1, *knowledge.input_shape)
    samples = torch.minimum(torch.maximum(shaped, low), high).flatten(1)
    prepared = []
    for number, layer in enumerate(network.layers):
        prepared.append(prepare(layer, moments(samples) if number else prior, number > 0))
        if number + 1 < len(network.layers):
            samples = torch.cat([layer.forward(part) for part in torch.tensor_split(samples, 1 + len(samples) // 256)])
    return prepared


def read_features(network: Network, bounds: GradientBounds, loss: Loss, label: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the features (F,) that enter the first Linear, their variances, and dL/d features.

    Its gradient is d [a, 1]^T. The factors are weighted least squares, up to a scale t of a. The scale is that at
    which the network itself computes d: dL/d(W t a + b) = d / t. So d is known exactly, unless a small error of a has
    let a ReLU jump; then it is the nearest value that the gradient allows.
    """
    name = network.first
    low, high = (
        torch.cat([part[f"{name}.weight"], _column(part, name, side)], 1)
        for part, side in ((bounds.low, -math.inf), (bounds.high, math.inf))
    )
    d, x = factorise(low, high)
    norm = x.values[:-1].norm().clamp_min(1e-300).copysign(x.values[:-1].sum())
    direction, slopes = x.values[:-1] / norm, d.values * norm
    start = float(norm / x.values[-1]) if x.values[-1] else 1.0

    def slope(hidden: Tensor) -> Tensor:
        def cost(values: Tensor) -> Tensor:
            outputs = values[None]
            for step in network.rest:
                outputs = step(outputs)
            return loss(outputs, label)

        slopes: Tensor = grad(cost)(hidden)
        return slopes

    def error(scale: Tensor) -> Tensor:
        hidden = scale[:, None] * (network.weight @ direction) + network.bias
        gap: Tensor = scale[:, None] * vmap(slope)(hidden) - slopes
        norms: Tensor = torch.linalg.vector_norm(gap, dim=1)
        return norms.nan_to_num(math.inf)

    scale = find_scale(error, abs(start))
    features = (scale * direction).clamp_min(0)
    features = torch.where(features > ABSENT * features.max(), features, 0)
    reach = SURE * d.deviations * norm.abs() / scale
    flow = slope(network.weight @ features + network.bias)
    flow = torch.minimum(torch.maximum(flow, slopes / scale - reach), slopes / scale + reach)
    return features, (scale * x.deviations[:-1] / norm).square(), network.weight.T @ flow


class Factor(NamedTuple):
    """One factor of a matrix of rank one, with its standard deviations; 0 where no entry is known."""

    values: Tensor
    deviations: Tensor


def factorise(low: Tensor, high: Tensor) -> tuple[Factor, Factor]:
    """Return the factors d (D,) and x (F,) of a matrix d x^T whose entries have bounds, by alternating least squares.

    An entry counts by the inverse square of its error. One with an open bound counts only if its row or column has no
    other, as half above the bound that it has.

    Example:
        >>> matrix = torch.tensor([[2.0, 4.0], [1.0, 2.0]]).double()
        >>> d, x = factorise(matrix, matrix)
        >>> torch.outer(d.values, x.values).round(decimals=6)
        tensor([[2., 4.],
                [1., 2.]], dtype=torch.float64)
    """
    known = low.isfinite() & high.isfinite()
    middle = torch.where(known, (low + high) / 2, 0)
    width = torch.where(known, (high - low).abs() / 2, 0)
    floor = 1e-12 * middle.abs().max().clamp_min(1e-300)
    weights = torch.where(known, 1 / (width.square() + (1e-7 * middle).square() + floor.square()), 0)
    largest = weights.max().clamp_min(1e-300)
    weights = weights / largest
    sharp = (middle.square() * weights / (1 + middle.square() * weights)).sum(1) * (middle.abs() > 0).sum(1)
    x = middle[sharp.argmax()].clone()
    d = middle.new_zeros(len(middle))
    for _ in range(FITTINGS):
        x = x / x.norm().clamp_min(1e-300)
        d = ((weights * middle) @ x / (weights @ x.square())).nan_to_num(0, 0, 0)
        x = ((weights * middle).T @ d / (weights.T @ d.square())).nan_to_num(0, 0, 0)
    errors = [(part * largest).rsqrt().nan_to_num(0, 0, 0) for part in (weights @ x.square(), weights.T @ d.square())]
    guess = 1.5 * torch.where(low.isfinite(), low, high).nan_to_num(0, 0, 0)  # of open entries
    d, d_error = _fill(d, errors[0], known.any(1), guess, x)
    x, x_error = _fill(x, errors[1], known.any(0), guess.T, d)
    return Factor(d, d_error), Factor(x, x_error)


def _fill(values: Tensor, errors: Tensor, known: Tensor, guess: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return a factor and its errors, from the guess of open entries and the other factor where nothing is known."""
    filled = guess @ other / other.square().sum().clamp_min(1e-300)
    return torch.where(known, values, filled), torch.where(known, errors, filled.abs())


def find_scale(error: Callable[[Tensor], Tensor], start: float) -> Tensor:
    """Return the scale of the lowest error, on a grid of eight decades around `start` and then by zooms."""
    grid = start * torch.logspace(-4, 4, SCALES, dtype=torch.float64)
    for _ in range(ZOOMS):
        at = int(error(grid).argmin().clamp(1, len(grid) - 2))
        grid = grid[at - 1] + (grid[at + 1] - grid[at - 1]) * torch.linspace(0, 1, 33, dtype=torch.float64)
    return grid[16]


def silence(inputs: Tensor, errors: Tensor) -> Tensor:
    """Return the inputs of a later convolution as outputs of ReLU: those that are not surely above 0 are 0.

    Example:
        >>> silence(torch.tensor([1.0, 1.0, -1.0]), torch.tensor([0.01, 0.36, 0.01]))
        tensor([1., 0., 0.])
    """
    least = torch.maximum(SILENT * inputs.square().mean().sqrt(), 2 * errors.sqrt())
    return torch.where(inputs > least, inputs, 0)


def harden(routing: Tensor) -> Tensor:
    """Return the routing (M, k) with probability 1 at the most probable position."""
    return torch.nn.functional.one_hot(routing.argmax(1), routing.shape[1]).to(routing)


def _column(part: Params, name: str, otherwise: float) -> Tensor:
    """Return the bias's bounds as a column (D, 1); open ones without a bias."""
    bias, weight = part.get(f"{name}.bias"), part[f"{name}.weight"]
    return torch.full_like(weight[:, :1], otherwise) if bias is None else bias[:, None]
