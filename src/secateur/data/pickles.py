"""CIFAR's python archives hold pickles. This reads the arrays in them and calls nothing that a pickle names."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from secateur.errors import WrongInput


class Kind:
    """Stands for numpy.dtype: remembers its name."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment, which a byte has none of."""


class Array:
    """Stands for numpy.ndarray: remembers its shape and bytes."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Numpy's own state: version, shape, dtype, Fortran order, bytes."""
        _, shape, kind, fortran, data = state
        if not isinstance(kind, Kind) or kind.name not in ("u1", "uint8") or fortran:
            raise ValueError("only arrays of bytes in C order are allowed")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _array(*_: object) -> Array:
    return Array()


def _encode(text: str, encoding: str | bytes = "latin1") -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


STANDS_FOR: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Kind,
    ("_codecs", "encode"): _encode,
}


class Reader(pickle._Unpickler):
    """Knows five names and gives its own harmless functions for them.

    The pure-Python unpickler, because the compiled one can be made to fill the memory by one large memo index.
    """

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """One of the five, or an error: importing is what makes a pickle dangerous."""
        if (module, name) not in STANDS_FOR:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing but arrays of bytes is allowed")
        return STANDS_FOR[module, name]


def read_pickle(data: bytes, path: Path) -> dict[str, Any]:
    """A pickled dictionary of byte arrays, numbers and names; byte strings as keys become text."""
    try:
        loaded = Reader(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise ValueError("it is not a dictionary")
        return {
            key.decode("latin1") if isinstance(key, bytes) else str(key): value.value
            if isinstance(value, Array)
            else value
            for key, value in loaded.items()
        }
    except Exception as error:  # a hostile pickle can make the reader fail in any way
        detail = str(error) or type(error).__name__
        raise WrongInput("data", f"{path} is not a safe pickle of arrays ({detail}); get it again") from error
