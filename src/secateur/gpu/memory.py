"""When memory runs out, half as many trials go together."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

log = logging.getLogger(__name__)

T = TypeVar("T")

FULL = ("can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def halving(run: Callable[[Tensor], T], rows: Tensor) -> list[T]:
    """Run on all rows together, or, as memory runs out, on half as many at a time, down to one; the parts in order."""
    size, start, said = len(rows), 0, False
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
        # Only here, where the error is forgotten, are the tensors of the failed run free.
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        failed = min(size, len(rows) - start)
        size = (failed + 1) // 2
        if not said:
            log.warning("memory ran out with %d trials at once; going on with %d or fewer", failed, size)
            said = True
    return parts


def ran_out(error: BaseException) -> bool:
    """Whether it says that there is no more memory, on a GPU or on a CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in FULL)


def let_go(device: torch.device) -> None:
    """Free what the federation before this one held: it and its observers hold each other, so it is not gone by itself.

    Its clients' states may fill half of the memory, and nothing else makes the collector look in time.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
