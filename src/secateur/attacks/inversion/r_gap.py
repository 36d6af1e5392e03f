"""R-GAP: a network's input in closed form, from the last layer's gradient to the first's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.adaptive import Adaptive
from secateur.attacks.inversion.r_gap_head import Head, Kept, heads
from secateur.attacks.inversion.r_gap_network import Layer, chain
from secateur.attacks.inversion.r_gap_solver import Read, Solved, back, solve, weight_gram
from secateur.attacks.inversion.updates import observed_gradient
from secateur.catalogue import method
from secateur.errors import WrongInput, unknown
from secateur.interfaces import Batch, Knowledge, Mask, Params, Reconstruction, ServerView, Watch

LARGEST = 20_000  # unknowns of one layer: a matrix of 3 GiB
KEPT = 1 << 24  # entries of a matrix that is kept for the next target


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

    A layer's input x solves W x = z and sum k x = dL/dW; then k of the layer before is (W^T k) * act'(z). Always in
    float64. The loss is the largest relative residual of a layer; a target of several rounds keeps its best one.

    An attacker who knows that entries were dropped leaves their equations out (`adaptive`: support, where the gradient
    is zero; mask, where noise filled the holes; layer, all of the defended layer, or of the last one, where the
    recursion begins, what is zero), and completes the last layer's k x^T from what survived.
    """

    adaptive: Adaptive = "none"
    layer: str | None = None  # that adaptive=layer leaves out; None: the one with the most zeros

    def __post_init__(self) -> None:
        if self.adaptive == "reapply":
            raise WrongInput("attack r-gap adaptive", f"{SENSELESS}; allowed: none, support, layer, mask")

    def check(self, knowledge: Knowledge, view: ServerView) -> None:
        """Refuse batches, several local steps, and networks that are no plain invertible chain."""
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
        """Nothing: a passive attacker."""
        return net, state

    def reconstruct(
        self, targets: Sequence[Sequence[ServerView]], knowledge: Knowledge, chance: Sequence[Generator], watch: Watch
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
        observed, kept, how = self._read(view, knowledge, layers)
        last = layers[-1]
        weight, bias = f"{last.name}.weight", f"{last.name}.bias"
        whole = Kept(kept[weight], kept.get(bias)) if weight in kept else None
        readings = heads(last, observed[weight], observed.get(bias), knowledge.loss, told, whole)
        walks = [(head, walk(layers, observed, head, grams, kept)) for head in readings]
        head, solved = min(walks, key=lambda pair: _loss(pair[1]))
        x = solved[-1].x if solved else head.features  # one layer alone is read, not solved
        x = x.nan_to_num(0, 0, 0).view(1, *knowledge.input_shape).to(view.sent[f"{last.name}.weight"].dtype)
        loss = _loss(solved) if solved else _open(head, observed[f"{last.name}.weight"])
        labels = torch.tensor([head.label], device=x.device)
        return Reconstruction(Batch(x, labels), loss, trial=trial, note=_note(layers, solved) + how)

    def _read(self, view: ServerView, knowledge: Knowledge, layers: Sequence[Layer]) -> tuple[Params, Mask, str]:
        """The gradient in float64, which of its entries are equations (names that are absent: all), and the note."""
        observed = {name: value.double() for name, value in observed_gradient(view, knowledge).items()}
        if self.adaptive == "none":
            return observed, {}, ""
        if self.adaptive == "layer":
            kept = self._layer_left_out(observed, knowledge, layers)
        else:
            kept = adaptive.support(observed) if self.adaptive == "support" else adaptive.mask_again(view, observed)
        used, every = sum(int(mask.sum()) for mask in kept.values()), sum(mask.numel() for mask in kept.values())
        where = f" of {adaptive.layer_of(next(iter(kept)))}" if self.adaptive == "layer" else ""
        return observed, kept, f"; adaptive: {used} of {every} entries{where} are equations"

    def _layer_left_out(self, observed: Params, knowledge: Knowledge, layers: Sequence[Layer]) -> Mask:
        left = self.layer or adaptive.defended_layer(observed, knowledge.net, knowledge.classes)
        names = [layer.name for layer in layers]
        if left not in names:
            raise unknown("layer", left, names)
        own = {name: value for name, value in observed.items() if adaptive.layer_of(name) == left}
        if left == names[-1]:
            return adaptive.support(own)
        return {name: torch.zeros_like(value, dtype=torch.bool) for name, value in own.items()}


class Grams:
    """W^T W by layer, kept while the sent model stays the same."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    def of(self, layer: Layer, read: Tensor | None = None) -> Tensor:
        """The layer's, from before or made now; where not all weight rows are read always anew."""
        if read is not None:
            return weight_gram(layer, read)
        weight, gram = self._kept.get(layer.name, (None, None))
        if weight is None or gram is None or not torch.equal(weight, layer.weight):
            gram = weight_gram(layer)
            if gram.numel() <= KEPT:
                self._kept[layer.name] = (layer.weight, gram)
        return gram


def walk(layers: Sequence[Layer], observed: Params, head: Head, grams: Grams, kept: Mask) -> list[Solved]:
    """Every layer's input but the last's, last to first."""
    y, flow = head.features, layers[-1].weight.flatten(1).T @ head.k  # the output of the layer before, and dL/d of it
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
