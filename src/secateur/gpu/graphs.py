"""Work as CUDA graphs: whatever becomes of a capture, its thread is back on the stream that it was on.

torch.cuda.graph gives that stream back only where the capture ends well. The memory that cuBLAS works in belongs to a
stream, and torch hands out 32 streams in turn: a graph that is dropped takes its stream's memory along, to which the
products of another graph of that stream still write (pytorch's issue 193402). So here every graph has its own.

`Captured` is one function as CUDA graphs, `Branches` and `Aside` run parts of it beside each other. `captured` is a
step of an attack: small networks are bound by the launching of their kernels, not by these. Inside, products may be
taken in TF32 and cuDNN times its algorithms: the sign of a pixel's gradient does not need more, and trials of float32
part after some steps by themselves. Networks and pictures are channels_last in the layer-wise engine, which is what the
tensor cores want.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from secateur.gpu.precision import tf32

log = logging.getLogger(__name__)

Made = TypeVar("Made")

TIMES = 3

WARMUPS = 3  # real steps before the capture: libraries set themselves up, and on every branch


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


class Tensors(Protocol):
    """What a captured function is given."""

    def tensors(self) -> list[Tensor]:
        """Its tensors in a fixed order."""
        ...

    def clone(self) -> Self:
        """The same in memory of its own."""
        ...


Given = TypeVar("Given", bound=Tensors)


@dataclass
class _Form(Generic[Given]):
    """One form of the inputs: so far run, or captured."""

    left: float = field(default_factory=lambda: WARMUPS)  # calls before the capture
    given: Given | None = None  # where a replay reads
    made: Any = None  # where it writes
    graph: torch.cuda.CUDAGraph | None = None


class Captured(Generic[Given, Made]):
    """Calls, then captures, then replays `function`, a graph for each form of what it is given.

    The function reads and changes tensors that stay where they are and never waits for the device. What it returns is
    overwritten by the next call.
    """

    def __init__(self, function: Callable[[Given], Made], device: torch.device) -> None:
        self.function = function
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.forms: dict[object, _Form[Given]] = {}
        self.pool: Any = None

    def __call__(self, given: Given) -> Made:
        """What the function makes of it."""
        key = tuple((tensor.shape, tensor.dtype) for tensor in given.tensors())
        form: _Form[Given] = self.forms.setdefault(key, _Form())
        if form.left == 0 and form.graph is None:
            self._capture(form, given)
        if form.left:
            form.left -= 1
            current = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                made = self.function(given)
            current.wait_stream(self.stream)
            return made
        assert form.graph is not None and form.given is not None
        _copy(form.given.tensors(), given.tensors())
        form.graph.replay()
        result: Made = form.made
        return result

    def _capture(self, form: _Form[Given], given: Given) -> None:
        held = given.clone()
        # The graphs run one at a time and keep nothing in between, so they share their memory.
        found = attempted(lambda: self.function(held), self.stream, self.pool)
        if found is None:
            form.left = math.inf
            return
        form.given, (form.graph, form.made) = held, found
        self.pool = form.graph.pool()


def _copy(into: list[Tensor], of: list[Tensor]) -> None:
    """All of one dtype at once: mixed lists are copied one by one."""
    for dtype in {tensor.dtype for tensor in of}:
        which = [i for i, tensor in enumerate(of) if tensor.dtype == dtype]
        torch._foreach_copy_([into[i] for i in which], [of[i] for i in which])


class Branches:
    """Runs one function for each of the many: one after the other, or in parallel branches of a captured graph."""

    def __init__(self, count: int, device: torch.device, parallel: bool) -> None:
        self.count = count
        made = count - 1 if parallel else 0
        self.streams: Sequence[torch.cuda.Stream] = [torch.cuda.Stream(device) for _ in range(made)]  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[int], Made]) -> list[Made]:
        """What the function makes of every number."""
        if not self.streams:
            return [function(i) for i in range(self.count)]
        main = torch.cuda.current_stream(self.streams[0].device)
        found = []
        for i, stream in enumerate(self.streams, start=1):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                found.append(function(i))
        found.insert(0, function(0))  # last, as branches that forked after it would wait for it
        for stream in self.streams:
            main.wait_stream(stream)
        return found


class Aside:
    """Work whose results are read only after its `with`: in branches of a captured graph, beside the main one.

    Elsewhere it is done at once: a CPU has no branches, and before a capture they would be in the way of timings.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        made = count if device.type == "cuda" else 0
        self.device = device
        self.streams: Sequence[torch.cuda.Stream] = [torch.cuda.Stream(device) for _ in range(made)]  # type: ignore[no-untyped-call]
        self.held: list[Tensor] = []  # their memory may not become another's before the branches are joined

    def __enter__(self) -> Self:
        self._fork(len(self.streams))
        return self

    def __exit__(self, *_: object) -> None:
        for stream in self.streams:
            self._main().wait_stream(stream)
        self.held.clear()

    def __call__(self, jobs: Sequence[Callable[[], object]], *held: Tensor) -> None:
        """Do the jobs, the i-th always in the same branch; they read the tensors `held`."""
        if not self.streams or not capturing():
            for job in jobs:
                job()
            return
        self._fork(len(jobs))
        self.held += held
        for i, job in enumerate(jobs):
            with torch.cuda.stream(self.streams[i % len(self.streams)]):
                job()

    def _fork(self, count: int) -> None:
        for stream in self.streams[:count]:
            stream.wait_stream(self._main())

    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)


def captured(step: Callable[[], None], state: Mapping[str, Tensor], warmups: int = 3) -> Callable[[], None]:
    """A function that does what `step` does, once a call; on a GPU by replaying a graph of it, on a CPU `step` itself.

    `step` reads and writes tensors that stay where they are, those of `state` among them, and never waits for the
    device. The first calls, `warmups` of them, run it as it is; the next one captures it. The graph's memory is its own
    and is given back when the function is dropped.
    """
    device = next(iter(state.values())).device
    return step if device.type != "cuda" else _CapturedStep(step, device, warmups)


class _CapturedStep:
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
