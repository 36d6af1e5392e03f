"""R-GAP: the input of a network in closed form, by recursion from the gradient of the last layer to the first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.adaptive import Adaptive
from secateur.attacks.inversion.r_gap_head import Head, Kept, heads
from secateur.attacks.inversion.r_gap_network import LinearMap, chain
from secateur.attacks.inversion.r_gap_solver import Read, Solved, back, solve, weight_gram
from secateur.attacks.inversion.updates import observed_gradient
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.interfaces import Batch, Knowledge, Mask, Params, Reconstruction, ServerView, Watch

LARGEST = 20_000  # unknowns of one layer: the matrix takes 3 GiB
KEPT = 1 << 24  # largest number of entries of a matrix that is cached for the next target


SENSELESS = "reapply means nothing here: r-gap solves for the picture and tries none, so there is no trial to compress"


@method(
    "inversion",
    "r-gap",
    "dgp",
    threat="an honest-but-curious server that sees the exact update of one image through a plain chain of layers",
    active=False,
    adapts=("support", "layer", "mask"),
)
@dataclass(frozen=True)
class RGap:
    """Solve every layer for its input, last to first, in closed form (R-GAP, Zhu and Blaschko 2021).

    The input x of a layer solves W x = z and sum k x = dL/dW; then k of the layer before is (W^T k) * act'(z). All
    computations are in float64. The loss is the largest relative residual of a layer. A target with several rounds gets
    the reconstruction of its best round.

    An attacker who knows that entries were dropped leaves their equations out (`adaptive`). support: entries whose
    gradient is zero. mask: entries that hold noise instead of a gradient. layer: all entries of the defended layer; of
    the last layer, where the recursion begins, only the zeros. The last layer's k x^T is completed from the entries
    that survived.
    """

    adaptive: Adaptive = "none"
    layer: str | None = None  # left out by adaptive=layer; None: the layer with the most zeros

    def __post_init__(self) -> None:
        if self.adaptive == "reapply":
            raise WrongInput("attack r-gap adaptive", f"{SENSELESS}; allowed: none, support, layer, mask")

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
                raise WrongInput(
                    "attack r-gap", f"{layer.name} is given {size} numbers; at most {LARGEST} can be solved"
                )

    def tamper(self, net: nn.Module, state: Params, knowledge: Knowledge, rng: Generator) -> tuple[nn.Module, Params]:
        """Return the model unchanged: the attacker is passive."""
        return net, state

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
        last_kept = Kept(kept[weight], kept.get(bias)) if weight in kept else None
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
        observed = {name: value.double() for name, value in observed_gradient(view, knowledge).items()}
        if self.adaptive == "none":
            return observed, {}, ""
        if self.adaptive == "layer":
            kept = self._layer_left_out(observed, knowledge, layers)
        else:
            kept = adaptive.support(observed) if self.adaptive == "support" else adaptive.mask_again(view, observed)
        used, total = sum(int(mask.sum()) for mask in kept.values()), sum(mask.numel() for mask in kept.values())
        where = f" of {adaptive.layer_of(next(iter(kept)))}" if self.adaptive == "layer" else ""
        return observed, kept, f"; adaptive: {used} of {total} entries{where} are equations"

    def _layer_left_out(self, observed: Params, knowledge: Knowledge, layers: Sequence[LinearMap]) -> Mask:
        left = self.layer or adaptive.defended_layer(observed, knowledge.net, knowledge.classes)
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

    def of(self, layer: LinearMap, read: Tensor | None = None) -> Tensor:
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
        solved.append(solve(layer, k, aim, gradient.flatten(1), grams.of(layer, rows), read))
        y, flow, known = solved[-1].x, back(layer, k[None])[0], None
    return solved


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
