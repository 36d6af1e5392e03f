"""CUDA graphs: capture and replay of a function, and parallel branches inside it.

Small networks are bound by the launches of their kernels, which a graph saves. `Captured` replays a function of some
inputs, `capture_step` a step of an attack on tensors that stay in place. `Branches` runs parts of a captured function
in parallel.

Three traps of torch are handled here. torch.cuda.graph restores the thread's stream only if the capture succeeds;
`capture` restores the stream always. After a failed capture the generators still count as captured; `try_capture`
frees them. The workspace of cuBLAS belongs to a stream, and torch hands out 32 streams in turn. A dropped graph frees
the workspace of its stream, to which products of another graph of that stream still write (pytorch issue 193402). So
every graph here has a workspace of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves, tree_map

from secateur.gpu.determinism import is_deterministic
from secateur.gpu.precision import tf32

log = logging.getLogger(__name__)
WARMUPS = 3  # plain calls before the capture: libraries initialise themselves, on every branch
Inputs = TypeVar("Inputs")
Outputs = TypeVar("Outputs")


@dataclass
class _Form(Generic[Inputs, Outputs]):
    """State of one form of the inputs (shapes and dtypes): still called plainly, or captured."""

    left: float = field(default_factory=lambda: WARMUPS)  # plain calls before the capture
    inputs: Inputs | None = None  # memory that a replay reads
    outputs: Outputs | None = None  # memory that a replay writes
    graph: torch.cuda.CUDAGraph | None = None


class Captured(Generic[Inputs, Outputs]):
    """Function that is called, then captured, then replayed, with a graph for each form of its inputs.

    The function reads and changes tensors that stay in place and never waits for the device. The next call overwrites
    the outputs of this one.

    Args:
        function: of one argument, a tensor or tuples, lists and dicts of tensors.
        device: the GPU.
        required: True: a function that cannot be captured raises an error. False: it runs plainly, after a warning.
        generators: the generators on the GPU from which the function draws.
    """

    def __init__(
        self,
        function: Callable[[Inputs], Outputs],
        device: torch.device,
        required: bool = False,
        generators: Sequence[Generator] = (),
    ) -> None:
        self.function, self.required, self.generators = function, required, generators
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.forms: dict[object, _Form[Inputs, Outputs]] = {}
        self.pool: Any = None

    def __call__(self, inputs: Inputs) -> Outputs:
        """Return the function's outputs."""
        tensors = tree_leaves(inputs)
        form = self.forms.setdefault(tuple((tensor.shape, tensor.dtype) for tensor in tensors), _Form())
        if form.left == 0 and form.graph is None:
            self._capture(form, inputs)
        if form.left:
            form.left -= 1
            with _side_stream(self.stream):
                return self.function(inputs)
        assert form.graph is not None
        _copy(tree_leaves(form.inputs), tensors)
        form.graph.replay()
        return form.outputs  # type: ignore[return-value]

    def _capture(self, form: _Form[Inputs, Outputs], inputs: Inputs) -> None:
        static = tree_map(torch.clone, inputs)
        attempt = capture if self.required else try_capture
        # The graphs run one at a time and keep nothing in between, so they share their memory.
        result = attempt(partial(self.function, static), self.stream, self.pool, self.generators)
        if result is None:
            form.left = math.inf
            return
        form.inputs, (form.graph, form.outputs) = static, result
        self.pool = form.graph.pool()


def _copy(into: list[Tensor], of: list[Tensor]) -> None:
    """Copy tensors, all of one dtype at once: torch copies mixed lists one by one."""
    for dtype in {tensor.dtype for tensor in of}:
        which = [i for i, tensor in enumerate(of) if tensor.dtype == dtype]
        torch._foreach_copy_([into[i] for i in which], [of[i] for i in which])


def capture_step(step: Callable[[], None], state: Mapping[str, Tensor]) -> Callable[[], None]:
    """Return a function that does one `step` a call: on a GPU by replaying a graph, on a CPU `step` itself.

    `step` reads and writes tensors that stay in place, those of `state` among them, and never waits for the device. The
    graph's memory is freed with the function. On a GPU products may be in TF32, and cuDNN times its algorithms. The
    sign of a pixel's gradient needs no more precision, and trials in float32 diverge after some steps anyway.
    """
    device = next(iter(state.values())).device
    if device.type != "cuda":
        return step

    def fast_step(_: tuple[()]) -> None:
        with fast():
            step()

    return partial(Captured(fast_step, device), ())


@contextmanager
def _side_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the work inside on `stream`, between the work before and after on the current stream."""
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        current.wait_stream(stream)


@contextmanager
def fast() -> Iterator[None]:
    """Use TF32 products and timed cuDNN algorithms inside."""
    with tf32(True), cudnn_times():
        yield


class Branches:
    """Loop over `count` numbers: one after the other, or in parallel branches of a captured graph."""

    def __init__(self, count: int, device: torch.device, parallel: bool) -> None:
        self.count = count
        branches = count - 1 if parallel else 0
        self.streams: Sequence[torch.cuda.Stream] = [torch.cuda.Stream(device) for _ in range(branches)]  # type: ignore[no-untyped-call]

    def __call__(self, function: Callable[[int], Outputs]) -> list[Outputs]:
        """Return the function's result for every number."""
        if not self.streams:
            return [function(i) for i in range(self.count)]
        main = torch.cuda.current_stream(self.streams[0].device)
        results: list[Outputs] = []
        forked = 0
        try:
            for forked, stream in enumerate(self.streams, start=1):
                stream.wait_stream(main)
                with torch.cuda.stream(stream):
                    results.append(function(forked))
            results.insert(0, function(0))  # called last: branches that forked after it would wait for it
        finally:  # after an error too: a capture with open branches cannot end, and torch keeps its memory for ever
            for stream in self.streams[:forked]:
                main.wait_stream(stream)
        return results


def try_capture(
    work: Callable[[], Outputs], stream: torch.cuda.Stream, pool: Any = None, generators: Sequence[Generator] = ()
) -> tuple[torch.cuda.CUDAGraph, Outputs] | None:
    """Capture the work and return its graph and its outputs; None, with a warning, if it cannot be captured."""
    try:
        return capture(work, stream, pool, generators)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # such as of a user's network that waits for the device
        cause = error.__context__ or error  # if the work fails, the end of its capture may fail too and says less
        _leave_capture([*torch.cuda.default_generators, *generators])
        log.warning("running a step without a CUDA graph: it cannot be captured (%s)", str(cause).split("\n")[0])
        return None


def _leave_capture(generators: Sequence[Generator]) -> None:
    """Take generators out of a capture that failed: torch would refuse every later draw from them."""
    for generator in generators:
        generator.graphsafe_set_state(generator.clone_state())


def capture(
    work: Callable[[], Outputs], stream: torch.cuda.Stream, pool: Any = None, generators: Sequence[Generator] = ()
) -> tuple[torch.cuda.CUDAGraph, Outputs]:
    """Capture the work on `stream`, and return its graph and its outputs.

    Args:
        work: calls of the GPU; they ran before, so that all libraries are initialised.
        stream: a side stream.
        pool: memory of another graph that the graph shares.
        generators: the generators on the GPU from which the work draws.

    A lack of memory is raised as such, even if the capture then cannot end.
    """
    graph = torch.cuda.CUDAGraph()
    for generator in generators:
        graph.register_generator_state(generator)
    try:
        with torch.cuda.stream(stream), _own_workspaces(), torch.cuda.graph(graph, pool=pool, stream=stream):
            outputs = work()
    except RuntimeError as error:
        if not isinstance(error.__context__, torch.OutOfMemoryError):
            raise
        _leave_capture([*torch.cuda.default_generators, *generators])
        raise error.__context__ from None
    return graph, outputs


@contextmanager
def _own_workspaces() -> Iterator[None]:
    """Let cuBLAS drop its workspaces, so that the calls inside take theirs from the graph's memory and no others do."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


@contextmanager
def cudnn_times() -> Iterator[None]:
    """Let cuDNN time its algorithms at a shape's first call and take the fastest, inside only.

    Inside `deterministic` it times none, as the fastest differs from run to run.
    """
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark
    try:
        cudnn.benchmark = not is_deterministic()
        yield
    finally:
        cudnn.benchmark = before
