"""R-GAP: a network's input in closed form, from the last layer's gradient to the first's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.func import grad, vmap

from secateur.attacks.inversion.chain import Layer, chain
from secateur.attacks.inversion.least_squares import Solved, back, solve, weight_gram
from secateur.attacks.inversion.updates import observed_gradient
from secateur.catalogue import method
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Knowledge, Loss, Params, Reconstruction, ServerView, Watch

SCALES = 4001  # tried before the zoom: |x| / |k x^T| = 1 / |k|, and |k| < 1.5 for the cross-entropy
LARGEST = 20_000  # unknowns of one layer: a matrix of 3 GiB
KEPT = 1 << 24  # entries of a matrix that is kept for the next target
ZOOMS = 12  # each narrows the bracket 32 times
FITS = 1e-6  # a scale whose equation is left so far open, of the gradient's norm, is no solution


class Head(NamedTuple):
    """One reading of the last layer's gradient."""

    features: Tensor  # (C,) what the last layer was given
    k: Tensor  # (K,) dL/dlogits
    label: int


@method(
    "inversion",
    "r-gap",
    "dgp",
    threat="an honest-but-curious server that sees the exact update of one image through a plain chain of layers",
    active=False,
)
@dataclass(frozen=True)
class RGap:
    """Solve every layer for its input, last to first, in closed form (R-GAP, Zhu and Blaschko 2021).

    A layer's input x solves W x = z and sum k x = dL/dW; then k of the layer before is (W^T k) * act'(z). Always in
    float64. The loss is the largest relative residual of a layer; a target of several rounds keeps its best one.
    """

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse batches, several local steps, and networks that are no plain invertible chain."""
        if knowledge.batch_size != 1:
            raise WrongInput("attack r-gap", f"recovers one image; batch_size {knowledge.batch_size} is not allowed")
        if (steps := knowledge.local_steps) != 1:
            raise WrongInput("attack r-gap", f"needs one local step; local_steps {steps} is not allowed")
        for layer in chain(knowledge, view.sent)[:-1]:
            if math.prod(layer.shape) > LARGEST:
                size = " x ".join(map(str, layer.shape))
                raise WrongInput(
                    "attack r-gap", f"{layer.name} is given {size} numbers; at most {LARGEST} can be solved"
                )

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """Nothing: a passive attacker."""
        return net, state

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, rng: Generator, watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """One target after the other; what depends on the sent model alone is computed once."""
        grams = Grams()
        for index, views in enumerate(targets):
            told = None if knowledge.labels is None else int(knowledge.labels[index, 0])
            found = [self._round(view, knowledge, told, grams, trial) for trial, view in enumerate(views)]
            watch.advance(1)
            yield index, min(found, key=lambda one: one.loss)

    def _round(
        self, view: ServerView, knowledge: Knowledge, told: int | None, grams: Grams, trial: int
    ) -> Reconstruction:
        layers = chain(knowledge, view.sent)
        observed = {name: value.double() for name, value in observed_gradient(view, knowledge).items()}
        last = layers[-1]
        readings = heads(last, observed[f"{last.name}.weight"], observed.get(f"{last.name}.bias"), knowledge.loss, told)
        walks = [(head, walk(layers, observed, head, grams)) for head in readings]
        head, solved = min(walks, key=lambda pair: _loss(pair[1]))
        x = solved[-1].x if solved else head.features  # one layer alone is read, not solved
        x = x.nan_to_num(0, 0, 0).view(1, *knowledge.input_shape).to(view.sent[f"{last.name}.weight"].dtype)
        loss = _loss(solved) if solved else _open(head, observed[f"{last.name}.weight"])
        labels = torch.tensor([head.label], device=x.device)
        return Reconstruction(Batch(x, labels), loss, trial=trial, note=_note(layers, solved))


class Grams:
    """W^T W by layer, kept while the sent model stays the same."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, layer: Layer) -> Tensor:
        """The layer's, from before or made now."""
        weight, gram = self._kept.get(layer.name, (None, None))
        if weight is None or gram is None or not torch.equal(weight, layer.weight):
            gram = weight_gram(layer)
            if gram.numel() <= KEPT:
                self._kept[layer.name] = (layer.weight, gram)
        return gram


def walk(layers: Sequence[Layer], observed: Params, head: Head, grams: Grams) -> list[Solved]:
    """Every layer's input but the last's, last to first."""
    y, flow = head.features, layers[-1].weight.flatten(1).T @ head.k  # the output of the layer before, and dL/d of it
    solved: list[Solved] = []
    for layer in reversed(layers[:-1]):
        shape = layer.output_shape
        z = layer.undo(y.view(shape)).nan_to_num(0, 0, 0)
        k = (flow.view(shape) * layer.slope(z)).nan_to_num(0, 0, 0)
        aim = z if layer.bias is None else z - layer.bias[:, None, None]
        gradient = observed[f"{layer.name}.weight"].flatten(1)
        solved.append(solve(layer, k, aim, gradient, grams.of(layer)))
        y, flow = solved[-1].x, back(layer, k[None])[0]
    return solved


def heads(layer: Layer, gradient: Tensor, bias: Tensor | None, loss: Loss, told: int | None) -> list[Head]:
    """What the last layer's gradient k x^T (K, C) says of x, k and the label: one reading, or all that fit equally.

    With a bias k is its gradient, and x the mean over classes of gradient[c] / k[c], each weighed by k[c]^2: a class
    of vanishing gradient would add nothing but rounding. Without one x is s times a unit vector u, and s solves
    dloss(s W u, y) = (gradient u) / s; for one logit that is R-GAP's mu l'(mu) = <g, w>.
    """
    if bias is not None:
        features = gradient.T @ bias / bias.square().sum()
        return [Head(features.nan_to_num(0, 0, 0), bias, _label(bias) if told is None else told)]
    unit = gradient[gradient.norm(dim=1).argmax()]
    for _ in range(3):  # power iterations: exact for a gradient of rank one, the nearest one for a perturbed gradient
        unit = gradient.T @ (gradient @ unit)
        unit = (unit / unit.norm()).nan_to_num(0, 0, 0)
    found = []
    for way in (unit, -unit):
        c = gradient @ way
        label = _label(c) if told is None else told
        for scale, rest in scales(layer.weight.flatten(1) @ way, c, loss, label):
            found.append((rest, Head(scale * way, c / scale, label)))
    best = min(rest for rest, _ in found)
    return [head for rest, head in found if rest <= max(best, FITS)]


def _label(k: Tensor) -> int:
    """The one class whose logit the loss wants higher; a single logit wants to be higher for label 1."""
    return int(k.argmin()) if len(k) > 1 else int(k[0] < 0)


def scales(v: Tensor, c: Tensor, loss: Loss, label: int) -> list[tuple[float, float]]:
    """The s > 0 that solve s dloss(s v, label) = c, and how far each is from solving it, of |c|; the best always."""
    y = torch.full((1,), label, device=v.device)
    slopes = vmap(grad(lambda logits: loss(logits[None], y)))

    def rest(s: Tensor) -> Tensor:
        gaps: Tensor = s[:, None] * slopes(s[:, None] * v) - c
        norms: Tensor = torch.linalg.vector_norm(gaps, dim=1)
        return norms.nan_to_num(math.inf)

    norm = max(float(c.norm()), 1e-300)
    grid = norm * torch.logspace(-3, 13, SCALES, dtype=v.dtype, device=v.device)
    values = rest(grid)
    inner = values[1:-1]
    dips = 1 + ((inner < values[:-2]) & (inner <= values[2:])).nonzero().flatten()
    nearest = values[1:-1].argmin() + 1
    found = []
    for dip in {*dips.tolist(), int(nearest)}:
        low, high = grid[dip - 1], grid[dip + 1]
        for _ in range(ZOOMS):
            fine = low + (high - low) * torch.linspace(0, 1, 65, dtype=v.dtype, device=v.device)
            at = int(rest(fine).argmin().clamp(1, 63))
            low, high = fine[at - 1], fine[at + 1]
        middle = (low + high) / 2
        found.append((float(middle), float(rest(middle[None])) / norm))
    return found


def _loss(solved: Sequence[Solved]) -> float:
    worst = max((one.residual for one in solved), default=math.inf)
    return worst if math.isfinite(worst) else math.inf


def _open(head: Head, gradient: Tensor) -> float:
    """How much of the last layer's gradient k x^T a reading leaves open, of its norm."""
    rest = (gradient - torch.outer(head.k, head.features)).norm() / gradient.norm()
    return float(rest.nan_to_num(math.inf))


def _note(layers: Sequence[Layer], solved: Sequence[Solved]) -> str:
    each = (
        f"{layer.name} rank {one.rank} of {one.x.numel()}, condition {one.condition:.1e}"
        for layer, one in zip(reversed(layers[:-1]), solved, strict=True)
    )
    return "least squares in float64, last layer first: " + "; ".join(each) if solved else "read off the only layer"
