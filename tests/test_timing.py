"""Timing on a GPU, and who chooses cuDNN's algorithms."""

import pytest
import torch

from secateur.timing import captured_milliseconds, capturing, cudnn_chooses, milliseconds

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("by_timing", [True, False])
def test_what_cudnn_did_before_is_put_back(before, by_timing, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", before)
    with pytest.raises(ZeroDivisionError), cudnn_chooses(by_timing):
        assert torch.backends.cudnn.benchmark is by_timing
        _ = 1 / 0
    assert torch.backends.cudnn.benchmark is before


def test_outside_of_a_graph_nothing_is_captured():
    assert not capturing()


@needs_cuda
def test_work_is_timed_as_it_is_and_in_a_graph():
    x, seen = torch.zeros(1, device="cuda"), []

    def work():
        seen.append(capturing())
        for _ in range(200):
            x.add_(1)

    assert captured_milliseconds(work, x.device) > 0 and milliseconds(work, x.device) > 0
    assert seen[:2] == [False, True]
    torch.cuda.synchronize()
    assert float(x) == 200 * (1 + 11 + 4)
