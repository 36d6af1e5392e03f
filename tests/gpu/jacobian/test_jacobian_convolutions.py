"""The ways to a convolution's gradient by its input, against autograd."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from secateur.gpu.jacobian import convolutions
from secateur.gpu.jacobian.convolutions import (
    Geometry,
    by_columns,
    by_input,
    by_phases,
    from_one_channel,
    transposed,
    turned,
    turned_and_padded,
    ways,
)
from secateur.gpu.jacobian.flows import Lone

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pair(least, most):
    return st.tuples(st.integers(least, most), st.integers(least, most))


def example(geometry, inputs, outputs, dtype=torch.float64):
    """Gradients by the output, weights, and gradients by the input as autograd has them."""
    rng, groups = torch.Generator().manual_seed(0), geometry.groups
    x = torch.randn(2, inputs * groups, *geometry.size, generator=rng, dtype=dtype).requires_grad_()
    weight = torch.randn(outputs * groups, inputs, *geometry.window, generator=rng, dtype=dtype)
    output = F.conv2d(x, weight, None, *geometry[2:5], groups)
    gradient = torch.randn(output.shape, generator=rng, dtype=dtype)
    (truth,) = torch.autograd.grad(output, x, gradient)
    return gradient.contiguous(memory_format=torch.channels_last), weight, truth


@settings(max_examples=200, deadline=None)
@given(pair(1, 9), pair(1, 4), pair(1, 3), pair(0, 3), pair(1, 2), st.integers(1, 2), pair(1, 5))
def test_every_way_is_right(size, window, stride, padding, dilation, groups, channels):
    geometry = Geometry(size, window, stride, padding, dilation, groups)
    sides = zip(size, window, padding, dilation, strict=True)
    assume(all(side + 2 * pad > by * (wide - 1) for side, wide, pad, by in sides))
    gradient, weight, truth = example(geometry, *channels)
    for way in (*ways(weight, geometry), by_input):
        found = way(gradient, weight, geometry)
        assert found.shape == truth.shape and torch.allclose(found, truth, rtol=1e-10, atol=1e-10), way
        assert found.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(("window", "padding"), [((3, 3), (1, 1)), ((2, 3), (0, 2)), ((1, 1), (1, 0))])
def test_gradients_in_one_channel_for_each_feature(window, padding):
    geometry = Geometry((5, 4), window, (1, 1), padding, (1, 1), 1)
    gradient, weight, _ = example(geometry, 3, 6)
    channel = torch.tensor([4, 0, 5])
    lone = Lone(gradient[:, channel].transpose(0, 1).reshape(6, 1, *gradient.shape[2:]), channel, 6)
    found = from_one_channel(lone.values, weight[channel], geometry)
    assert torch.allclose(found, transposed(lone.whole(), weight, geometry), rtol=1e-10, atol=1e-10)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert from_one_channel(lone.values, weight[channel], geometry._replace(stride=(2, 1))) is None


@pytest.mark.parametrize(
    ("stride", "window", "padding", "channels", "expected"),
    [
        (1, 3, 1, (8, 4), {transposed, turned}),
        (2, 3, 1, (4, 4), {transposed, by_phases}),
        (1, 3, 1, (3, 64), {transposed, turned, turned_and_padded, by_columns}),  # a stem: 27 columns of 64 channels
        (1, 1, 1, (4, 3), {transposed}),  # padded by more than the window reaches
    ],
)
def test_which_ways_there_are_and_the_fastest_is_kept(stride, window, padding, channels, expected, monkeypatch):
    geometry = Geometry((8, 8), (window,) * 2, (stride,) * 2, (padding,) * 2, (1, 1), 1)
    gradient, weight, _ = example(geometry, *channels)
    found, timed = list(ways(weight, geometry)), []
    assert set(found) == expected
    monkeypatch.setattr(convolutions, "known", {})
    monkeypatch.setattr(convolutions, "milliseconds", lambda work, *_: timed.append(work.func) or -len(timed))
    assert convolutions.fastest(gradient, weight, geometry) is found[-1] and timed == found
    assert convolutions.fastest(gradient[[0, 0, 1]], weight, geometry) is found[-1] and timed == found
    convolutions.fastest(gradient[:1], weight, geometry)
    assert timed == 2 * found


@pytest.mark.skipif(DEVICE == "cpu", reason="left out: there is no GPU")
@pytest.mark.parametrize(("stride", "channels"), [(1, (16, 16)), (2, (16, 32)), (1, (3, 32))])
def test_a_gpu_times_them(stride, channels):
    geometry = Geometry((8, 8), (3, 3), (stride,) * 2, (1, 1), (1, 1), 1)
    gradient, weight, truth = (each.to(DEVICE) for each in example(geometry, *channels, torch.float32))
    for way in (by_input, *ways(weight, geometry)):
        assert float((way(gradient, weight, geometry) - truth).norm() / truth.norm()) < 2e-3
