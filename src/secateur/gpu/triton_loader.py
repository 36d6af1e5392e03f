"""Kernels written in Triton, where they run."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType

log = logging.getLogger(__name__)


def loaded(name: str, probe: Callable[[ModuleType], object], slower: str) -> ModuleType | None:
    """The module of this name, tried once by `probe`; None where operations of torch must do the same.

    Torch brings Triton along with CUDA, but not the C compiler that it needs. Where that is missing, what is `slower`
    without it is said.
    """
    try:
        kernels = import_module(name)
        probe(kernels)
    except ImportError:
        return None
    except Exception as error:
        log.warning("Triton cannot be used, which makes %s slower: %s", slower, str(error).split("\n")[0])
        return None
    return kernels
