"""PruneFL's time model: seconds that a round takes for each kept weight of a layer, and whatever is kept.

Of Conv-2 and VGG-11 these are what PruneFL's authors measured: five local steps of computation and the communication.
Of other networks a weight's computation is taken in proportion to its FLOPs, two for each place where it is applied,
at the speed of Conv-2's second convolution, which is applied at 14 x 14 places; the time for nothing is taken as 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from secateur.pruning.masks import LAYERS, weights_of

STEPS = 5
COMMUNICATION = 5.561621e-6
CONV_2 = (0.0, 7.09885e-6, 1.927325e-7, 1.782308e-7)
VGG_11 = (
    *(0.0, 8.95507e-6, 2.495288e-6, 2.780686e-6, 1.024265e-6, 1.277773e-6),
    *(1.843831e-6, 8.066104e-7, 5.145334e-7, 2.430023e-7, 0.0),
)
PER_PLACE = CONV_2[1] / 14**2

Shapes = tuple[tuple[int, ...], ...]
CONV_2_SHAPES: Shapes = ((32, 1, 5, 5), (64, 32, 5, 5), (2048, 3136), (2048,))
VGG_11_SHAPES: Shapes = (
    *((64, 3, 3, 3), (128, 64, 3, 3), (256, 128, 3, 3), (256, 256, 3, 3), (512, 256, 3, 3)),
    *((512, 512, 3, 3),) * 3,
    *((256, 512), (128, 256), (128,)),
)


class Times(NamedTuple):
    """Seconds of a round."""

    weights: tuple[float, ...]  # of one weight, by layer in the order of the network
    constant: float  # whatever is kept


def _round(computation: Sequence[float], constant: float) -> Times:
    return Times(tuple(STEPS * each + COMMUNICATION for each in computation), STEPS * constant)


MEASURED: dict[Shapes, Times] = {
    CONV_2_SHAPES: _round(CONV_2, 1.24928),
    VGG_11_SHAPES: _round(VGG_11, 17.3699),
}


def measured(shapes: Sequence[Sequence[int]]) -> Times | None:
    """What was measured of a network with weights of these shapes, whatever its number of classes; None: nothing."""
    *inner, last = (tuple(shape) for shape in shapes)
    return MEASURED.get((*inner, last[1:]))


def equal(layers: int) -> Times:
    """Of a network of which nothing is known but how many layers it has: a weight costs its communication."""
    return _round([0.0] * layers, 0.0)


def times_of(net: nn.Module, input_shape: tuple[int, ...]) -> Times:
    """Measured where it was, else by FLOPs."""
    weights = weights_of(net)
    known = measured([weight.shape for weight in weights.values()])
    if known is not None:
        return known
    places = places_of(net, input_shape)
    return _round([PER_PLACE * places[name] for name in weights], 0.0)


def places_of(net: nn.Module, input_shape: tuple[int, ...]) -> dict[str, int]:
    """At how many places one example meets every weight: a convolution's output pixels, 1 for a Linear.

    Example:
        >>> places_of(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3)), (1, 4, 4))
        {'0.weight': 4, '2.weight': 1}
    """
    twin = copy.deepcopy(net).eval()
    found: dict[str, int] = {}
    for name, layer in twin.named_modules():
        if isinstance(layer, LAYERS):
            key = f"{name}.weight".lstrip(".")

            def count(layer: nn.Module, inputs: Any, output: Tensor, key: str = key) -> None:
                found[key] = found.get(key, 0) + output[0].numel() // len(layer.weight)  # type: ignore[arg-type]

            layer.register_forward_hook(count)
    first = next(twin.parameters())
    with torch.no_grad():
        twin(torch.zeros(1, *input_shape, dtype=first.dtype, device=first.device))
    return found
