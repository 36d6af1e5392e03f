"""A step of the loop as one CUDA graph: small networks are bound by the launching of their kernels, not by these.

Inside, products may be taken in TF32 and cuDNN times its algorithms: the sign of a pixel's gradient does not need more,
and trials of float32 part after some steps by themselves. Networks and pictures are channels_last in the layer-wise
engine, which is what the tensor cores want.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from secateur.precision import tf32
from secateur.recording import attempted
from secateur.timing import cudnn_chooses


def captured(step: Callable[[], None], state: Mapping[str, Tensor], warmups: int = 3) -> Callable[[], None]:
    """A function that does what `step` does, once a call; on a GPU by replaying a graph of it, on a CPU `step` itself.

    `step` reads and writes tensors that stay where they are, those of `state` among them, and never waits for the
    device. The first calls, `warmups` of them, run it as it is; the next one captures it. The graph's memory is its own
    and is given back when the function is dropped.
    """
    device = next(iter(state.values())).device
    return step if device.type != "cuda" else _Captured(step, device, warmups)


class _Captured:
    """Runs, then captures, then replays."""

    def __init__(self, step: Callable[[], None], device: torch.device, warmups: int) -> None:
        self.step, self.device, self.left = step, device, warmups
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        if self.left == 0 and self.graph is None:
            self._capture()
        if self.graph is not None:
            self.graph.replay()
            return
        self.left -= 1
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream), fast():
            self.step()
        current.wait_stream(self.stream)

    def _capture(self) -> None:
        with fast():
            found = attempted(self.step, self.stream)
        self.graph = found[0] if found else None


@contextmanager
def fast() -> Iterator[None]:
    """TF32 products and timed cuDNN algorithms, for all that is called inside."""
    with tf32(True), cudnn_chooses(by_timing=True):
        yield
