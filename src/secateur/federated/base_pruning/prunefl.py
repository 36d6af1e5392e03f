"""PruneFL (Jiang et al. 2022), adaptive base pruning by squared gradients and a time model of a round.

The time model gives the seconds of a round for each kept weight of a layer, and the seconds that every round takes. For
Conv-2 and VGG-11 these are the measurements of PruneFL's authors: five local steps of computation, and communication.
For other networks a weight's computation is proportional to its FLOPs, two for each place where the weight is applied.
The speed is that of Conv-2's second convolution, applied at 14 x 14 places; the constant time is taken as 0.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self, get_args

import torch
from torch import Generator, Tensor, nn

from secateur import tree
from secateur.catalogue import method
from secateur.defenses.selection import mask_largest
from secateur.errors import WrongInput, check_number, check_numbers, check_whole, check_wholes
from secateur.federated.base_pruning import BasePruning, count_removed, total_of
from secateur.federated.client_training import binary_cross_entropy
from secateur.functional import Ask, Functional, split
from secateur.interfaces import Batch, Mask, Params
from secateur.pruning.masks import LAYERS, check_name, weights_of

STEPS = 5  # local steps of a round
COMMUNICATION = 5.561621e-6  # seconds of a weight in a round
# seconds of a weight in a local step, by layer
CONV_2 = (0.0, 7.09885e-6, 1.927325e-7, 1.782308e-7)
VGG_11 = (
    *(0.0, 8.95507e-6, 2.495288e-6, 2.780686e-6, 1.024265e-6, 1.277773e-6),
    *(1.843831e-6, 8.066104e-7, 5.145334e-7, 2.430023e-7, 0.0),
)
PER_PLACE = CONV_2[1] / 14**2  # seconds of a weight in a step, for each place where it is applied

Shapes = tuple[tuple[int, ...], ...]
CONV_2_SHAPES: Shapes = ((32, 1, 5, 5), (64, 32, 5, 5), (2048, 3136), (2048,))
VGG_11_SHAPES: Shapes = (
    *((64, 3, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (256, 256, 3, 3), (512, 256, 3, 3)),
    *((512, 512, 3, 3),) * 3,
    *((256, 512), (128, 256), (128,)),
)
MEASURED: dict[Shapes, tuple[tuple[float, ...], float]] = {  # seconds of a local step: by layer, and constant
    CONV_2_SHAPES: (CONV_2, 1.24928),
    VGG_11_SHAPES: (VGG_11, 17.3699),
}

Hold = Literal["rate", "time"]
Squares = Literal["all", "shared"]
STABLE, CHANGE = 5, 0.1  # initial pruning ends after so many adjustments in a row that change the size by less


class Times(NamedTuple):
    """The seconds of a round."""

    weights: tuple[float, ...]  # of one weight, by layer in the order of the network
    constant: float  # independent of the kept weights


@method("base-pruning", "prunefl", "priprune", cycles="iterative", at_client=True)
@dataclass(frozen=True)
class PruneFL(BasePruning):
    """Keeps the weights with the most squared gradient for their time, adjusted over the rounds (PruneFL; Jiang 2022).

    In every layer a share fraction * 0.5^(round / halving) of the kept weights, those of least |w|, become candidates.
    All pruned weights are candidates too; the other weights stay. Candidates come back in the order of
    squares / seconds, until `hold` stops them:

    - "rate": until exactly 1 - rate of all weights are kept, to meet priprune's base rate. The share of candidates
      grows where this needs more of them, but a layer's largest weight is never a candidate.
    - "time": while squares / seconds exceeds (sum of squares) / (constant + sum of seconds) of the weights kept so far.
      This is PruneFL's own rule, which does not use `rate`.

    Biases are never pruned and count nothing. A weight that comes back resumes its value at the server.

    One client makes the first mask: it trains a copy of the model on `samples` examples with the same adjustments, and
    only the mask is taken. The loss is PruneFL's, BCE-with-logits on one-hot labels.

    With `squares` "all" (the paper's) clients send the squares of all weights, also of those that a defense withholds.
    That reveals the size of each such gradient. With "shared" these squares are 0: a withheld weight counts as flat.

    Equation: `candidates: least |w|, a share fraction * 0.5^(round / halving); kept by g^2 / seconds`.
    """

    every: int = 50  # rounds, and iterations of the initial pruning
    fraction: float = 0.3
    halving: int = 10_000
    hold: Hold = "rate"
    samples: int = 200
    iterations: int = 1000
    batch_size: int = 20
    learning_rate: float = 0.25
    seconds: tuple[float, ...] = ()  # of a round, for a weight of every layer; (): as measured, by the network
    constant: float = 0.0  # seconds of a round independent of the kept weights; used with `seconds`
    squares: Squares = "all"

    wants_squares = True  # an adjustment takes their sum over clients and rounds since the last one
    keeps_dropped = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("hold", self.hold, get_args(Hold))
        check_name("squares", self.squares, get_args(Squares))
        check_wholes(self, "halving", "samples", "batch_size")
        check_whole("iterations", self.iterations, self.every)
        check_numbers(self, "(0, 1)", "fraction")
        for seconds in self.seconds:
            check_number("seconds", seconds, "(0, inf)")

    def bound(self, net: nn.Module, input_shape: tuple[int, ...]) -> Self:
        """Return this pruning with the times of a network, unless times were given."""
        if self.seconds:
            return self
        times = times_of(net, input_shape)
        return replace(self, seconds=times.weights, constant=times.constant)

    @property
    def spares_withheld(self) -> bool:
        """True if withheld weights send no squares (`squares` is "shared")."""
        return self.squares == "shared"

    def start(self, net: nn.Module, state: Params, batch: Batch, rng: Generator) -> Mask:
        """Return the mask of the initial pruning, on one client's examples."""
        pruning = self.bound(net, tuple(batch.inputs.shape[1:]))
        params, buffers = split(net, state)
        params, buffers = tree.clone(params), tree.clone(buffers)
        device = next(iter(params.values())).device
        batch = Batch(batch.inputs[: self.samples], batch.labels[: self.samples]).to(device)
        function = Functional(net, training=True, device=device)
        asks = function.asks(params | buffers, batch.inputs[: self.batch_size])
        mask: Mask = {name: torch.ones_like(params[name], dtype=torch.bool) for name in weights_of(net)}
        stable = 0
        for _ in range(self.iterations // self.every):
            summed = pruning._train(function, asks, params, buffers, mask, batch, rng)
            before = tree.share_kept(mask)
            mask = pruning._adjust(params, mask, summed, 0)
            stable = stable + 1 if abs(tree.share_kept(mask) / before - 1) < CHANGE else 0
            if stable == STABLE:
                break
        return mask

    def adjust(
        self, weights: Params, mask: Mask, squares: Params | None, round: int, rng: Generator
    ) -> tuple[Params, Mask]:
        """Return the weights as they are, also those that come back, and the next mask."""
        if not self.adjusts(round):
            return weights, mask
        if squares is None:
            raise WrongInput("squares", "are missing: PruneFL chooses by the clients' squared gradients")
        return weights, self._adjust(weights, mask, squares, round)

    def _train(
        self,
        function: Functional,
        asks: Sequence[Ask],
        params: Params,
        buffers: Params,
        mask: Mask,
        batch: Batch,
        rng: Generator,
    ) -> Params:
        """Train the kept weights for `every` steps in place, and return the summed squares of the dense gradients."""
        summed = {name: torch.zeros_like(params[name]) for name in mask}
        for _ in range(self.every):
            rows = torch.randperm(batch.size, generator=rng)[: self.batch_size].to(batch.labels.device)
            leaves = {name: value.requires_grad_() for name, value in tree.mask_tree(tree.clone(params), mask).items()}
            noise = [ask.draw(rng).to(rows.device) for ask in asks]
            loss = binary_cross_entropy(function(leaves | buffers, batch.inputs[rows], noise), batch.labels[rows])
            grads = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True, materialize_grads=True)
            for (name, value), grad in zip(params.items(), grads, strict=True):
                if name in mask:
                    summed[name] += len(rows) * grad.square()
                    grad = torch.where(mask[name], grad, 0)
                value -= self.learning_rate * grad
        return summed

    def _adjust(self, weights: Params, mask: Mask, summed: Params, round: int) -> Mask:
        """Return the mask after one adjustment by the summed squares."""
        times = self._times(mask)
        wanted = total_of(mask) - count_removed(self.rate, total_of(mask))
        share = self.fraction * 0.5 ** (round / self.halving)
        numbers = {name: int(keep.sum()) for name, keep in mask.items()}
        excess = 1 - wanted / max(1, sum(numbers.values())) if self.hold == "rate" else 0.0
        stays = {}
        for name, number in numbers.items():
            candidates = min(max(int(share * number), math.ceil(excess * number)), max(0, number - 1))
            magnitudes = torch.where(mask[name], weights[name].abs(), -1).flatten()
            stays[name] = mask_largest(magnitudes, number - candidates)
        kept = torch.cat(list(stays.values()))
        gained = torch.cat([summed[name].flatten().double() for name in mask])
        spent = torch.cat([gained.new_full((mask[n].numel(),), t) for n, t in zip(mask, times.weights, strict=True)])
        if self.hold == "rate":
            chosen = kept | mask_largest(torch.where(kept, -1, gained / spent), wanted - int(kept.sum()))
        else:
            chosen = greedy(kept, gained, spent, times.constant)
        parts = torch.split_with_sizes(chosen, [keep.numel() for keep in mask.values()])
        return {name: part.view(mask[name].shape) for name, part in zip(mask, parts, strict=True)}

    def _times(self, mask: Mask) -> Times:
        """Return the times in use: those given, else those measured, else equal ones."""
        if not self.seconds:
            return read_times([keep.shape for keep in mask.values()]) or equal(len(mask))
        if len(self.seconds) != len(mask):
            raise WrongInput("seconds", f"has {len(self.seconds)} layers, and the model {len(mask)} that are pruned")
        return Times(self.seconds, self.constant)


def greedy(kept: Tensor, gained: Tensor, spent: Tensor, constant: float) -> Tensor:
    """Return PruneFL's own choice: candidates by gain / time, while that exceeds the ratio of all kept so far.

    Example:
        >>> kept, gained = torch.tensor([True, False, False, False]), torch.tensor([2.0, 1.0, 9.0, 3.0])
        >>> greedy(kept, gained, torch.ones(4), constant=0.0)
        tensor([ True, False,  True, False])
    """
    rows = (~kept).nonzero()[:, 0]
    rows = rows[(gained[rows] / spent[rows]).sort(descending=True, stable=True).indices]
    gains, times = gained[rows], spent[rows]
    before = gained[kept].sum() + gains.cumsum(0) - gains
    after = constant + spent[kept].sum() + times.cumsum(0) - times
    accepted = (gains * after > before * times).to(torch.int8).cumprod(0).bool()  # up to the first that is refused
    chosen = kept.clone()
    chosen[rows[accepted]] = True
    return chosen


def times_of(net: nn.Module, input_shape: tuple[int, ...]) -> Times:
    """Return the measured times of a network, else times by FLOPs."""
    weights = weights_of(net)
    known = read_times([weight.shape for weight in weights.values()])
    if known is not None:
        return known
    places = places_of(net, input_shape)
    return _round([PER_PLACE * places[name] for name in weights], 0.0)


def read_times(shapes: Sequence[Sequence[int]]) -> Times | None:
    """Return the measured times of weights of these shapes, for any number of classes; None if not measured."""
    *inner, last = (tuple(shape) for shape in shapes)
    step = MEASURED.get((*inner, last[1:]))
    return None if step is None else _round(*step)


def places_of(net: nn.Module, input_shape: tuple[int, ...]) -> dict[str, int]:
    """Return the number of places where one example meets each weight: output pixels, 1 for a Linear.

    Example:
        >>> places_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), (1, 4, 4))
        {'0.weight': 4, '2.weight': 1}
    """
    twin = copy.deepcopy(net).eval()
    places: dict[str, int] = {}
    for name, layer in twin.named_modules():
        if isinstance(layer, LAYERS):
            key = f"{name}.weight".lstrip(".")

            def count(layer: nn.Module, inputs: Any, output: Tensor, key: str = key) -> None:
                places[key] = places.get(key, 0) + output[0].numel() // len(layer.weight)  # type: ignore[arg-type]

            layer.register_forward_hook(count)
    first = next(twin.parameters())
    with torch.no_grad():
        twin(torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device))
    return places


def equal(layers: int) -> Times:
    """Return the times of a network known only by its number of layers: a weight costs its communication."""
    return _round([0.0] * layers, 0.0)


def _round(computation: Sequence[float], constant: float) -> Times:
    """Return the times of a round from the seconds of one local step."""
    return Times(tuple(STEPS * seconds + COMMUNICATION for seconds in computation), STEPS * constant)
