"""Loading of Triton kernels on machines that can run them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

from torch._C import _DisableFuncTorch

log = logging.getLogger(__name__)


@cache
def load_kernels(name: str, probe: Callable[[ModuleType], object], slower: str) -> ModuleType | None:
    """Import a module of kernels and test it once by `probe`; return None if operations of torch must be used.

    Torch comes with Triton for CUDA, but not with the C compiler that Triton needs. If the test fails, a warning names
    the work that is `slower` without the kernels.
    """
    try:
        kernels = import_module(name)
        with _DisableFuncTorch():  # inside vmap and grad, new tensors would have no memory of their own
            probe(kernels)
    except ImportError:
        return None
    except Exception as error:
        log.warning("running %s without Triton, which is slower (%s)", slower, str(error).split("\n")[0])
        return None
    return kernels
