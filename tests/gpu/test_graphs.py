"""Captures by torch's own torch.cuda.graph, over a device that is made up: which stream its thread is on afterwards."""

from types import SimpleNamespace

import pytest
import torch

from secateur.gpu.graphs import Branches, Captured, capture, capture_step, cudnn_times, try_capture

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


class Device:
    """Streams by name, and graphs whose capture ends badly where something in it did."""

    def __init__(self):
        self.current, self.spoilt, self.begins, self.cleared = "main", False, True, []
        self.replays, self.registered = 0, []

    def stream(self, stream):
        device = self

        class Selected:
            def __enter__(self):
                self.before, device.current = device.current, stream

            def __exit__(self, *_):
                device.current = self.before

        return Selected()

    def wait(self):
        """What no capture allows."""
        if self.current != "main":
            self.spoilt = True
            raise RuntimeError("operation not permitted when stream is capturing\nmore")


class Graph:
    """A CUDAGraph of such a device."""

    device: Device

    def capture_begin(self, *_, **__):
        if not self.device.begins:
            raise RuntimeError("another capture is under way")

    def capture_end(self):
        if self.device.spoilt:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self):
        self.device.replays += 1

    def register_generator_state(self, generator):
        self.device.registered.append(generator)

    def pool(self):
        return "pool"


class Stream:
    """One of torch's."""

    device = "cuda:0"

    def wait_stream(self, other):
        pass


@pytest.fixture
def device(monkeypatch):
    made = Device()
    for name, stand_in in {
        "stream": made.stream,
        "synchronize": lambda *_: None,
        "current_stream": lambda *_: Stream(),
        "Stream": lambda *_: Stream(),
        "CUDAGraph": type("Graph", (Graph,), {"device": made}),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: made.cleared.append(made.current), raising=False)
    return made


def capture_and_wait(device):
    def work():
        assert device.current == "side" and device.cleared == ["side"]
        device.wait()

    capture(work, "side")


def test_torch_alone_leaves_the_thread_on_the_stream_of_a_capture_that_fails(device):
    """Else there would be nothing to do here."""
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream="side"):
        device.wait()
    assert device.current == "side"


def test_a_capture_that_fails_gives_the_thread_back(device):
    with pytest.raises(RuntimeError, match="previous error"):
        capture_and_wait(device)
    assert device.current == "main" and device.cleared == ["side", "side"]


def test_a_capture_that_cannot_begin_gives_the_thread_back(device):
    device.begins = False
    with pytest.raises(RuntimeError, match="under way"):
        capture_and_wait(device)
    assert device.current == "main" and device.cleared == ["side", "side"]


def test_a_capture_that_ends_well_does_too(device):
    graph, made = try_capture(lambda: device.current, "side")
    assert isinstance(graph, Graph) and made == "side"
    assert device.current == "main" and device.cleared == ["side", "side"]


def test_why_it_failed_is_said_and_not_that_its_end_failed_too(device, caplog):
    assert try_capture(device.wait, "side") is None
    assert device.current == "main"
    assert "not permitted when stream is capturing" in caplog.text
    assert "previous error" not in caplog.text and "more" not in caplog.text


@pytest.mark.parametrize("spoilt", [True, False])
def test_who_asks_for_less_memory_hears_that_it_ran_out(spoilt, device):
    def work():
        device.spoilt = spoilt
        raise torch.OutOfMemoryError("CUDA out of memory")

    for attempt in (try_capture, capture):
        with pytest.raises(torch.OutOfMemoryError):
            attempt(work, "side")
        assert device.current == "main"


def test_branches_that_began_are_joined_after_an_error(monkeypatch, device):
    """A capture with open branches cannot end; one that joins what never began cannot either."""
    waits = []
    monkeypatch.setattr(Stream, "wait_stream", lambda self, other: waits.append((self, other)))

    def work(number):
        if number == failing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return number

    branches = Branches(4, "cuda:0", parallel=True)
    for failing, begun in ((1, 1), (2, 2), (0, 3), (None, 3)):
        waits.clear()
        try:
            assert branches(work) == [0, 1, 2, 3] and failing is None
        except torch.OutOfMemoryError:
            assert failing is not None
        assert [other for _, other in waits[begun:]] == branches.streams[:begun] and len(waits) == 2 * begun
        assert [one for one, _ in waits[:begun]] == branches.streams[:begun] and device.current == "main"


def failing_capture(device, calls):
    """Return a function that fails in its capture, after three calls."""

    def function(inputs):
        if len(calls) == 3:
            calls.append("captured")
            device.wait()
        calls.append(device.current)
        return len(inputs)

    return function


def test_a_function_that_cannot_be_captured_goes_on_without(device):
    calls = []
    captured = Captured(failing_capture(device, calls), "cuda:0")
    for _ in range(6):
        assert captured((torch.zeros(2),)) == 1 and device.current == "main"
    assert calls.count("captured") == 1 and len(calls) == 7
    assert captured.pool is None


def test_a_function_that_must_be_captured_fails_where_it_cannot(device):
    captured = Captured(failing_capture(device, []), "cuda:0", required=True)
    for _ in range(3):
        captured((torch.zeros(2),))
    with pytest.raises(RuntimeError, match="previous error"):
        captured((torch.zeros(2),))
    assert device.current == "main"


def test_a_step_without_inputs_is_captured_after_three_calls(device):
    calls = []
    state = SimpleNamespace(device=torch.device("cuda"))
    move = capture_step(lambda: calls.append(torch.backends.cudnn.benchmark), {"x": state})
    for _ in range(6):
        move()
    assert calls == [True] * 4 and device.replays == 3 and not torch.backends.cudnn.benchmark


def test_a_replay_reads_copies_of_its_inputs(device):
    seen = []
    captured = Captured(seen.append, "cuda:0", generators=["noise"])
    for i in range(6):
        captured({"rows": [torch.full((2,), i)], "rate": torch.tensor(float(i))})
    assert len(seen) == 4 and device.replays == 3 and device.registered == ["noise"] and captured.pool == "pool"
    assert seen[-1]["rows"][0].tolist() == [5, 5] and float(seen[-1]["rate"]) == 5


@needs_cuda
def test_on_a_gpu_the_thread_is_where_it_was_and_work_goes_on():
    x, before = torch.ones(8, 8, device="cuda"), torch.cuda.current_stream()
    x.mm(x)  # libraries set themselves up
    assert try_capture(lambda: (x @ x).sum().item(), torch.cuda.Stream()) is None
    assert torch.cuda.current_stream() == before
    assert torch.randn(9, device="cuda").unique().numel() == 9  # torch leaves its generator inside a failed capture
    graph, made = try_capture(lambda: x @ x, torch.cuda.Stream())
    graph.replay()
    assert torch.cuda.current_stream() == before and torch.equal(made, torch.full_like(x, 8))


@needs_cuda
def test_the_products_of_a_graph_outlive_another_of_its_stream():
    stream, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    x.mm(x)  # libraries set themselves up
    kept, made = try_capture(lambda: x @ x, stream)
    try_capture(lambda: x @ x, stream)  # and is dropped
    torch.cuda.empty_cache()
    others = [torch.zeros(2**20, device="cuda") for _ in range(256)]
    kept.replay()
    torch.cuda.synchronize()
    assert all(not other.any() for other in others) and torch.allclose(made, x @ x, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("before", [True, False])
def test_the_choice_of_cudnn_is_put_back(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with pytest.raises(ZeroDivisionError), cudnn_times():
        assert torch.backends.cudnn.benchmark is True
        _ = 1 / 0
    assert torch.backends.cudnn.benchmark is before
