"""One function as CUDA graphs, the users of a step as parallel branches; on a CPU it is simply called."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, Self, TypeVar

import torch
from torch import Tensor

from secateur.recording import attempted
from secateur.timing import capturing

WARMUPS = 3  # real steps before the capture: libraries set themselves up, and on every branch


class Tensors(Protocol):
    """What a captured function is given."""

    def tensors(self) -> list[Tensor]:
        """Its tensors in a fixed order."""
        ...

    def clone(self) -> Self:
        """The same in memory of its own."""
        ...


Given = TypeVar("Given", bound=Tensors)
Made = TypeVar("Made")


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
