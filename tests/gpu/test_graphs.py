"""Captures by torch's own torch.cuda.graph, over a device that is made up: which stream its thread is on afterwards."""

import pytest
import torch

from secateur.gpu.graphs import Captured, _CapturedStep, attempted, cudnn_times, recorded

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


class Device:
    """Streams by name, and graphs whose capture ends badly where something in it did."""

    def __init__(self):
        self.current, self.spoilt, self.begins, self.cleared = "main", False, True, []

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


def capture(device):
    with recorded(torch.cuda.CUDAGraph(), "side"):
        assert device.current == "side" and device.cleared == ["side"]
        device.wait()


def test_torch_alone_leaves_the_thread_on_the_stream_of_a_capture_that_fails(device):
    """Else there would be nothing to do here."""
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream="side"):
        device.wait()
    assert device.current == "side"


def test_a_capture_that_fails_gives_the_thread_back(device):
    with pytest.raises(RuntimeError, match="previous error"):
        capture(device)
    assert device.current == "main" and device.cleared == ["side", "side"]


def test_a_capture_that_cannot_begin_gives_the_thread_back(device):
    device.begins = False
    with pytest.raises(RuntimeError, match="under way"):
        capture(device)
    assert device.current == "main" and device.cleared == ["side", "side"]


def test_a_capture_that_ends_well_does_too(device):
    graph, made = attempted(lambda: device.current, "side")
    assert isinstance(graph, Graph) and made == "side"
    assert device.current == "main" and device.cleared == ["side", "side"]


def test_why_it_failed_is_said_and_not_that_its_end_failed_too(device, caplog):
    assert attempted(device.wait, "side") is None
    assert device.current == "main"
    assert "not permitted when stream is capturing" in caplog.text
    assert "previous error" not in caplog.text and "more" not in caplog.text


@pytest.mark.parametrize("spoilt", [True, False])
def test_who_asks_for_less_memory_hears_that_it_ran_out(spoilt, device):
    def work():
        device.spoilt = spoilt
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        attempted(work, "side")
    assert device.current == "main"


def test_a_step_that_cannot_be_captured_goes_on_without(device):
    seen = []

    def step():
        if len(seen) == 3:  # the capture, after three calls
            seen.append("captured")
            device.wait()
        seen.append(device.current)

    move = _CapturedStep(step, "cuda:0", 3)
    for _ in range(6):
        move()
        assert device.current == "main"
    assert seen.count("captured") == 1 and len(seen) == 7 and move.graph is None


def test_a_round_that_cannot_be_captured_goes_on_without(device):
    class Given(list):
        def tensors(self):
            return self

        def clone(self):
            return Given(self)

    seen = []

    def function(given):
        if len(seen) == 3:
            seen.append("captured")
            device.wait()
        seen.append(device.current)
        return len(given)

    captured = Captured(function, "cuda:0")
    for _ in range(6):
        assert captured(Given([torch.zeros(2)])) == 1 and device.current == "main"
    assert seen.count("captured") == 1 and len(seen) == 7
    assert captured.pool is None


@needs_cuda
def test_on_a_gpu_the_thread_is_where_it_was_and_work_goes_on():
    x, before = torch.ones(8, 8, device="cuda"), torch.cuda.current_stream()
    x.mm(x)  # libraries set themselves up
    assert attempted(lambda: (x @ x).sum().item(), torch.cuda.Stream()) is None
    assert torch.cuda.current_stream() == before
    graph, made = attempted(lambda: x @ x, torch.cuda.Stream())
    graph.replay()
    assert torch.cuda.current_stream() == before and torch.equal(made, torch.full_like(x, 8))


@needs_cuda
def test_the_products_of_a_graph_outlive_another_of_its_stream():
    stream, x = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    x.mm(x)  # libraries set themselves up
    kept, made = attempted(lambda: x @ x, stream)
    attempted(lambda: x @ x, stream)  # and is dropped
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
