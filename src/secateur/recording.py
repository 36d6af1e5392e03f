"""Work as CUDA graphs: whatever becomes of a capture, its thread is back on the stream that it was on.

torch.cuda.graph gives that stream back only where the capture ends well. The memory that cuBLAS works in belongs to a
stream, and torch hands out 32 streams in turn: a graph that is dropped takes its stream's memory along, to which the
products of another graph of that stream still write (pytorch's issue 193402). So here every graph has its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

log = logging.getLogger(__name__)

Made = TypeVar("Made")


@contextmanager
def recorded(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any = None, mode: str = "global"
) -> Iterator[None]:
    """What is called inside goes into the graph, on `stream`; `mode` says whose calls may spoil it, as torch has it."""
    inside = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode)
    with torch.cuda.stream(stream), _own_workspaces(), inside:
        yield


def attempted(
    work: Callable[[], Made], stream: torch.cuda.Stream, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Made] | None:
    """The work as a graph, and what it made; None where that cannot be, and it is said why."""
    graph = torch.cuda.CUDAGraph()
    try:
        with recorded(graph, stream, pool):
            made = work()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # such as of a network of the user's that waits for the device
        cause = error.__context__ or error  # where work fails the end of its capture may too, and says less
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        log.warning("a step cannot be captured in a CUDA graph and runs without one: %s", str(cause).split("\n")[0])
        return None
    return graph, made


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS forget its memory: what is called inside takes some of the graph's, and nobody else does later."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()
