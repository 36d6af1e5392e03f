"""Timing on a GPU, and who chooses cuDNN's algorithms."""

import pytest
import torch

from secateur.gpu.graphs import TIMES, capturing, cudnn_chooses, milliseconds, recorded

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
def test_inside_of_a_graph_all_is_captured():
    x = torch.zeros(1, device="cuda")
    with recorded(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
        x.add_(1)
        assert capturing()
    assert not capturing()


@needs_cuda
def test_work_is_timed():
    x = torch.zeros(1, device="cuda")
    assert milliseconds(lambda: x.add_(1), x.device) > 0
    assert float(x) == 1 + TIMES  # the first is not timed
