"""Recovery from a lack of memory: half as many trials at once, and memory freed between federations."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")

FULL = ("can't allocate memory", "out of memory", "std::bad_alloc", "CUBLAS_STATUS_ALLOC_FAILED")


def halve_on_shortage(run: Callable[[Tensor], T], rows: Tensor) -> list[T]:
    """Run on all rows at once, and on half as many whenever memory runs out, down to one; return the parts in order."""
    size, start, warned = len(rows), 0, False
    parts: list[T] = []
    while start < len(rows):
        try:
            parts.append(run(rows[start : start + size]))
        except Exception as error:
            if min(size, len(rows) - start) == 1 or not ran_out(error):
                raise
        else:
            start += size
            continue
        # Only here, after the error is released, are the tensors of the failed run free.
        gc.collect()
        if torch.cuda.is_available():
            free_cached()
        failed = min(size, len(rows) - start)
        size = (failed + 1) // 2
        if not warned:
            log.warning("memory ran out with %d trials at once; going on with %d or fewer", failed, size)
            warned = True
    return parts


def ran_out(error: BaseException) -> bool:
    """Return True if the error reports a lack of memory, on a GPU or on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def let_go(device: torch.device) -> None:
    """Free the memory of the previous federation, which reference counting does not free.

    A federation and its observers refer to each other. The clients' states may fill half of the memory, and nothing
    else starts the garbage collector in time.
    """
    gc.collect()
    if device.type == "cuda":
        free_cached()


def free_cached() -> None:
    """Give back the memory that torch keeps: its cache, and cuBLAS's workspaces, 32 MiB for each stream."""
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
