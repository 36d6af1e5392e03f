"""Pickles of CIFAR's python archives: a reader of byte arrays that calls no function named by a pickle."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from secateur.errors import WrongInput


class Kind:
    """Stand-in for numpy.dtype that stores only the name."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which a byte does not have."""


class Array:
    """Stand-in for numpy.ndarray that stores shape and bytes."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Read numpy's state: version, shape, dtype, Fortran order, bytes."""
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


class PickleReader(pickle._Unpickler):
    """Unpickler that resolves five names, each to a harmless function of this module.

    It is the pure-Python unpickler: one large memo index can make the compiled one fill the memory.
    """

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return one of the five stand-ins; refuse other names, because importing makes a pickle dangerous."""
        if (module, name) not in STANDS_FOR:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing but arrays of bytes is allowed")
        return STANDS_FOR[module, name]


def read_pickle(data: bytes, path: Path) -> dict[str, Any]:
    """Return a pickled dictionary of byte arrays, numbers and names; keys that are byte strings become text."""
    try:
        loaded = PickleReader(io.BytesIO(data), encoding="bytes").load()
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
