"""R-GAP: the input of a network in closed form, by recursion from the gradient of the last layer to the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.func import grad, vmap

from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.adaptive import Adaptive
from secateur.attacks.inversion.r_gap_network import LinearMap, chain
from secateur.attacks.inversion.r_gap_solver import Read, Solved, back, solve, weight_gram
from secateur.attacks.inversion.updates import read_gradient
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.interfaces import Batch, InversionAttack, Knowledge, Loss, Mask, Params, Reconstruction, ServerView, Watch

LARGEST = 20_000  # unknowns of one layer: the matrix takes 3 GiB
KEPT = 1 << 24  # largest number of entries of a matrix that is cached for the next target
FITTINGS = 100  # of alternating least squares; each is exact in one of the two
SCALES = 4001  # tried before the zoom: |x| / |k x^T| = 1 / |k|, and |k| < 1.5 for the cross-entropy
ZOOMS = 12  # each narrows the bracket 32 times
FITS = 1e-6  # largest residual of a solution, relative to the gradient's norm
SENSELESS = {
    "reapply": "r-gap solves for the picture and tries none, so there is no trial to compress",
    "loss": "losses that a defense changes are of several examples, and r-gap solves for one",
}


@method(
    "inversion",
    "r-gap",
    "dgp",
    threat="an honest-but-curious server that sees the exact update of one image through a plain chain of layers",
    active=False,
    adapts=("support", "layer", "mask"),
)
@dataclass(frozen=True)
class RGap(InversionAttack):
    """Solve every layer for its input, last to first, in closed form (R-GAP, Zhu and Blaschko 2021).

    The input x of a layer solves W x = z and sum k x = dL/dW; then k of the layer before is (W^T k) * act'(z). All
    computations are in float64. The loss is the largest relative residual of a layer. A target with several rounds gets
    the reconstruction of its best round.

    An attacker who knows that entries were dropped leaves their equations out (`adaptive`). support: entries whose
    gradient is zero. mask: entries that hold noise instead of a gradient. layer: all entries of the defended layer; of
    the last layer, where the recursion begins, only the zeros. The last layer's k x^T is completed from the entries
    that survived.

    Equation: `W x = z and sum of k x = dL/dW; k of the layer before = (W^T k) * act'(z)`.
    """

    adaptive: Adaptive = "none"
    layer: str | None = None  # left out by adaptive=layer; None: the layer with the most zeros

    def __post_init__(self) -> None:
        if self.adaptive in SENSELESS:
            reason = f"{self.adaptive} means nothing here: {SENSELESS[self.adaptive]}"
            raise WrongInput("attack r-gap adaptive", f"{reason}; allowed: none, support, layer, mask")

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse several examples, several local steps, and networks that are no invertible chain of layers."""
        if knowledge.batch_size != 1:
            raise WrongInput("attack r-gap", f"recovers one image; batch_size {knowledge.batch_size} is not allowed")
        if (steps := knowledge.local_steps) != 1:
            raise WrongInput("attack r-gap", f"needs one local step; local_steps {steps} is not allowed")
        layers = chain(knowledge, view.sent)
        observed, _, _ = self._read(view, knowledge, layers)
        if (first := f"{layers[-1].name}.weight") not in observed:
            raise WrongInput("attack r-gap", f"begins at the gradient of {first}, which is frozen and so not sent")
        for layer in layers[:-1]:
            if math.prod(layer.shape) > LARGEST:
                size = " x ".join(map(str, layer.shape))
                raise WrongInput("attack r-gap", f"{layer.name} has {size} inputs; at most {LARGEST} can be solved")

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
    ) -> Iterator[tuple[int, Reconstruction]]:
        """Yield the reconstruction of each target; matrices that depend only on the sent model are computed once."""
        grams = Grams()
        for index, views in enumerate(targets):
            label = None if knowledge.labels is None else int(knowledge.labels[index, 0])
            rounds = [self._round(view, knowledge, label, grams, trial) for trial, view in enumerate(views)]
            watch.advance(1)
            yield index, min(rounds, key=lambda reconstruction: reconstruction.loss)

    def _round(
        self, view: ServerView, knowledge: Knowledge, label: int | None, grams: Grams, trial: int
    ) -> Reconstruction:
        layers = chain(knowledge, view.sent)
        observed, kept, note = self._read(view, knowledge, layers)
        last = layers[-1]
        weight, bias = f"{last.name}.weight", f"{last.name}.bias"
        last_kept = KeptEntries(kept[weight], kept.get(bias)) if weight in kept else None
        readings = heads(last, observed[weight], observed.get(bias), knowledge.loss, label, last_kept)
        walks = [(head, walk(layers, observed, head, grams, kept)) for head in readings]
        head, solved = min(walks, key=lambda pair: _loss(pair[1]))
        x = solved[-1].x if solved else head.features  # a single layer is read off, not solved
        x = x.nan_to_num(0, 0, 0).view(1, *knowledge.input_shape).to(view.sent[f"{last.name}.weight"].dtype)
        loss = _loss(solved) if solved else _open(head, observed[f"{last.name}.weight"])
        labels = torch.tensor([head.label], device=x.device)
        return Reconstruction(Batch(x, labels), loss, trial=trial, note=_note(layers, solved) + note)

    def _read(self, view: ServerView, knowledge: Knowledge, layers: Sequence[LinearMap]) -> tuple[Params, Mask, str]:
        """Return the gradient in float64, the mask of entries that are equations (absent names: all), and a note."""
        observed = {name: value.double() for name, value in read_gradient(view, knowledge, "r-gap").items()}
        if self.adaptive == "none":
            return observed, {}, ""
        if self.adaptive == "layer":
            kept = self._mask_defended_layer(observed, knowledge, layers)
        else:
            kept = adaptive.support(observed) if self.adaptive == "support" else adaptive.mask_again(view, observed)
        used, total = sum(int(mask.sum()) for mask in kept.values()), sum(mask.numel() for mask in kept.values())
        where = f" of {adaptive.layer_of(next(iter(kept)))}" if self.adaptive == "layer" else ""
        return observed, kept, f"; adaptive: {used} of {total} entries{where} are equations"

    def _mask_defended_layer(self, observed: Params, knowledge: Knowledge, layers: Sequence[LinearMap]) -> Mask:
        left = self.layer or adaptive.find_defended_layer(observed, knowledge.net, knowledge.classes)
        names = [layer.name for layer in layers]
        if left not in names:
            raise unknown("layer", left, names)
        gradients = {name: value for name, value in observed.items() if adaptive.layer_of(name) == left}
        if left == names[-1]:
            return adaptive.support(gradients)
        return {name: torch.zeros_like(value, dtype=torch.bool) for name, value in gradients.items()}


class Grams:
    """Cache of W^T W by layer; an entry is valid while the weights of the layer do not change."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def compute(self, layer: LinearMap, read: Tensor | None = None) -> Tensor:
        """Return the matrix of the layer; it is cached only if all weight rows are read."""
        if read is not None:
            return weight_gram(layer, read)
        weight, gram = self._kept.get(layer.name, (None, None))
        if weight is None or gram is None or not torch.equal(weight, layer.weight):
            gram = weight_gram(layer)
            if gram.numel() <= KEPT:
                self._kept[layer.name] = (layer.weight, gram)
        return gram


def walk(layers: Sequence[LinearMap], observed: Params, head: Head, grams: Grams, kept: Mask) -> list[Solved]:
    """Return the solved inputs of all layers except the last one, last to first."""
    y, flow = head.features, layers[-1].weight.flatten(1).T @ head.k  # output of the layer before, and dL/d output
    known = head.known
    solved: list[Solved] = []
    for layer in reversed(layers[:-1]):
        shape, name = layer.output_shape, f"{layer.name}.weight"
        z = layer.undo(y.view(shape)).nan_to_num(0, 0, 0)
        k = (flow.view(shape) * layer.slope(z)).nan_to_num(0, 0, 0)
        aim = z if layer.bias is None else z - layer.bias[:, None, None]
        rows = None if known is None else known.view(shape)
        frozen = torch.zeros_like(layer.weight, dtype=torch.bool)
        gradient = observed.get(name, torch.zeros_like(layer.weight))
        mask = kept.get(name) if name in observed else frozen
        read = Read(rows, None if mask is None else mask.flatten(1))
        solved.append(solve(layer, k, aim, gradient.flatten(1), grams.compute(layer, rows), read))
        y, flow, known = solved[-1].x, back(layer, k[None])[0], None
    return solved


# The last layer: its inputs are read from its gradient k x^T ----------------------------------------------------------
class KeptEntries(NamedTuple):
    """Masks of the kept entries of the last layer's gradient."""

    weight: Tensor  # (K, C) bool
    bias: Tensor | None  # (K,) bool


class Head(NamedTuple):
    """One reading of the last layer's gradient."""

    features: Tensor  # (C,) the last layer's inputs
    k: Tensor  # (K,) dL/dlogits
    label: int
    known: Tensor | None = None  # (C,) bool: the features that the gradient determines; None: all


class Completed(NamedTuple):
    """The factors of a matrix k x^T by its surviving entries."""

    x: Tensor  # (C,); 0 where no entry of the column survived
    k: Tensor  # (K,); 0 where no entry of the row survived
    known: Tensor  # (C,) bool: the columns with a surviving entry


def heads(
    layer: LinearMap,
    gradient: Tensor,
    bias: Tensor | None,
    loss: Loss,
    known_label: int | None,
    kept: KeptEntries | None = None,
) -> list[Head]:
    """Read x, k and the label from the last layer's gradient k x^T (K, C): one reading, or all that fit equally.

    With a bias, k is the bias gradient, and x the mean over classes of gradient[c] / k[c], weighted by k[c]^2. A class
    of vanishing gradient would add nothing but rounding. Without a bias, x is s times a unit vector u, and s solves
    dloss(s W u, y) = (gradient u) / s. For one logit this is R-GAP's mu l'(mu) = <g, w>.

    Where entries were dropped, k and x are least squares on the kept ones.
    """
    known: Tensor | None = None
    if bias is not None:
        features, k = gradient.T @ bias / bias.square().sum(), bias
        if kept is not None:
            features, k, known = complete(gradient, kept.weight, bias, kept.bias)
        return [Head(features.nan_to_num(0, 0, 0), k, _label(k) if known_label is None else known_label, known)]
    unit = _unit(gradient)
    if kept is not None:
        unit, _, known = complete(gradient, kept.weight)
    readings = []
    for direction in (unit, -unit):
        c = gradient @ direction if kept is None else fit_rows(gradient, kept.weight, direction)
        label = _label(c) if known_label is None else known_label
        for scale, residual in scales(layer.weight.flatten(1) @ direction, c, loss, label):
            readings.append((residual, Head(scale * direction, c / scale, label, known)))
    best = min(residual for residual, _ in readings)
    return [head for residual, head in readings if residual <= max(best, FITS)]


def _unit(gradient: Tensor) -> Tensor:
    """Return the direction of x (C,), by power iterations.

    The direction is exact for a gradient of rank one, and that of the nearest such gradient for a perturbed one.
    """
    unit = gradient[gradient.norm(dim=1).argmax()]
    for _ in range(3):
        unit = gradient.T @ (gradient @ unit)
        unit = (unit / unit.norm()).nan_to_num(0, 0, 0)
    return unit


def _label(k: Tensor) -> int:
    """Return the one class whose logit the loss wants higher; a single logit wants to be higher for label 1."""
    return int(k.argmin()) if len(k) > 1 else int(k[0] < 0)


def scales(v: Tensor, c: Tensor, loss: Loss, label: int) -> list[tuple[float, float]]:
    """Return the s > 0 that solve s dloss(s v, label) = c, and their residuals over |c|; the best s always."""
    y = torch.full((1,), label, device=v.device)
    slopes = vmap(grad(lambda logits: loss(logits[None], y)))

    def residual(s: Tensor) -> Tensor:
        gaps: Tensor = s[:, None] * slopes(s[:, None] * v) - c
        norms: Tensor = torch.linalg.vector_norm(gaps, dim=1)
        return norms.nan_to_num(math.inf)

    norm = max(float(c.norm()), 1e-300)
    grid = norm * torch.logspace(-3, 13, SCALES, dtype=v.dtype, device=v.device)
    values = residual(grid)
    inner = values[1:-1]
    dips = 1 + ((inner < values[:-2]) & (inner <= values[2:])).nonzero().flatten()
    nearest = inner.argmin() + 1
    solutions = []
    for dip in {*dips.tolist(), int(nearest)}:
        low, high = grid[dip - 1], grid[dip + 1]
        for _ in range(ZOOMS):
            fine = low + (high - low) * torch.linspace(0, 1, 65, dtype=v.dtype, device=v.device)
            at = int(residual(fine).argmin().clamp(1, 63))
            low, high = fine[at - 1], fine[at + 1]
        middle = (low + high) / 2
        solutions.append((float(middle), float(residual(middle[None])) / norm))
    return solutions


def complete(matrix: Tensor, kept: Tensor, k: Tensor | None = None, k_kept: Tensor | None = None) -> Completed:
    """Return both factors of a matrix (K, C) that is k x^T where its entries were `kept`.

    `k` is the observed factor, valid where `k_kept`. Without it x has norm 1.
    """
    shown = torch.where(kept, matrix, 0)
    fixed = torch.zeros_like(matrix[:, 0], dtype=torch.bool) if k_kept is None else k_kept
    observed = matrix.new_zeros(len(matrix)) if k is None else torch.where(fixed, k, 0)
    x = shown[shown.norm(dim=1).argmax()]
    if bool(fixed.any()):
        x = fit_rows(matrix.T, kept.T, observed)
    for _ in range(FITTINGS):
        if k is None:
            x = (x / x.norm()).nan_to_num(0, 0, 0)
        rows = torch.where(fixed, observed, fit_rows(matrix, kept, x))
        x = fit_rows(matrix.T, kept.T, rows)
    if k is None:
        x = (x / x.norm()).nan_to_num(0, 0, 0)
    return Completed(x, torch.where(fixed, observed, fit_rows(matrix, kept, x)), kept.any(0))


def fit_rows(matrix: Tensor, kept: Tensor, direction: Tensor) -> Tensor:
    """Return for every row its factor of `direction`, by least squares on the kept entries."""
    wide = torch.where(kept, direction, 0)
    return (torch.where(kept, matrix, 0) @ direction / wide.square().sum(1)).nan_to_num(0, 0, 0)


def _loss(solved: Sequence[Solved]) -> float:
    worst = max((solution.residual for solution in solved), default=math.inf)
    return worst if math.isfinite(worst) else math.inf


def _open(head: Head, gradient: Tensor) -> float:
    """Return the norm of the last layer's gradient that k x^T does not explain, relative to the gradient's norm."""
    rest = (gradient - torch.outer(head.k, head.features)).norm() / gradient.norm()
    return float(rest.nan_to_num(math.inf))


def _note(layers: Sequence[LinearMap], solved: Sequence[Solved]) -> str:
    layer_notes = (
        f"{layer.name} rank {solution.rank} of {solution.x.numel()}, condition {solution.condition:.1e}"
        for layer, solution in zip(reversed(layers[:-1]), solved, strict=True)
    )
    return (
        "least squares in float64, last layer first: " + "; ".join(layer_notes) if solved else "read off the only layer"
    )
