"""What a GPU takes for some work, to choose the fastest of several ways by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

TIMES = 3


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Of the GPU, once cuDNN has chosen."""
    work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        start.record()
        for _ in range(TIMES):
            work()
        end.record()
        end.synchronize()
    taken: float = start.elapsed_time(end) / TIMES
    return taken


def capturing() -> bool:
    """Whether calls go into a graph, where nothing can be timed."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


@contextmanager
def cudnn_chooses(by_timing: bool) -> Iterator[None]:
    """Let cuDNN time its algorithms when a shape comes first, or take what it expects, and put it back afterwards."""
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    try:
        cudnn.benchmark = by_timing
        yield
    finally:
        cudnn.benchmark = before
