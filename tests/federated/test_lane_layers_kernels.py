"""Layers with weights of every lane's own, by kernels against operations of torch: interpreted, or on a GPU."""

import os

import pytest
import torch
from torch.nn import functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="left out: Triton is not installed")

from secateur.federated import lane_layers, lane_layers_kernels
from secateur.precision import tf32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # lanes, pictures, channels, filters, height, width, taps
    (2, 3, 3, 8, 6, 6, (3, 3)),
    (3, 2, 16, 32, 4, 5, (3, 3)),
    (1, 5, 5, 130, 3, 3, (3, 3)),
    (2, 2, 40, 7, 7, 2, (1, 5)),
    (2, 70, 4, 4, 2, 2, (1, 1)),
]


def _drawn(shape, rng, last=True):
    x = torch.randn(shape, generator=rng).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def _gradients(out, inputs, g):
    return torch.autograd.grad(out, inputs, g)


@pytest.fixture
def by_kernels(monkeypatch):
    monkeypatch.setattr(
        lane_layers, "_kernels_for", lambda x: lane_layers_kernels if x.dtype == torch.float32 else None
    )
    with tf32(False):
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [1, 1024])
def test_a_convolution_equals_one_a_lane(shape, programs, rng, monkeypatch, by_kernels):
    monkeypatch.setattr(lane_layers_kernels, "PROGRAMS", programs)
    lanes, pictures, channels, filters, height, width, taps = shape
    x = _drawn((lanes * pictures, channels, height, width), rng).requires_grad_()
    weight = _drawn((lanes, filters, channels, *taps), rng, last=False).requires_grad_()
    bias = _drawn((lanes, filters), rng, last=False).requires_grad_()
    g = _drawn((lanes * pictures, filters, height, width), rng)
    out = lane_layers.conv2d(x, weight, bias)
    found = [out, *_gradients(out, (x, weight, bias), g)]
    given = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    padding = [size // 2 for size in taps]
    apart = zip(given[0].chunk(lanes), given[1], given[2], strict=True)
    exact = torch.cat([F.conv2d(*each, padding=padding) for each in apart])
    for one, other in zip(found, [exact, *_gradients(exact, given, g.double())], strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().norm()) <= 1e-5 * float(other.detach().norm())


def test_the_first_layer_has_no_gradient_of_its_pictures(rng, by_kernels):
    x = _drawn((4, 3, 4, 4), rng)
    weight = _drawn((2, 8, 3, 3, 3), rng, last=False).requires_grad_()
    out = lane_layers.conv2d(x, weight, weight.new_zeros(2, 8))
    assert torch.autograd.grad(out.sum(), weight)[0].shape == weight.shape
    assert not x.requires_grad


@pytest.mark.parametrize("size", [(4, 4), (5, 7), (2, 3)])
def test_pooling_equals_torch_where_values_are_equal_and_where_they_are_no_numbers(size, rng, by_kernels):
    x = _drawn((6, 5, *size), rng).relu_()  # many zeros: the first of equal ones gets the gradient
    x[0, 0, 0, 1] = torch.nan
    x = x.requires_grad_()
    out, plain = lane_layers.max_pool2(x), F.max_pool2d(x, 2)
    g = torch.randn(out.shape, generator=rng).to(DEVICE)
    assert torch.equal(out.nan_to_num(9), plain.nan_to_num(9))
    assert torch.equal(*(torch.autograd.grad(each, x, g)[0] for each in (out, plain)))
