"""Layers with weights of every lane's own, by kernels against operations of torch: interpreted, or on a GPU."""

import os
from math import prod

import pytest
import torch
from torch.nn import functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported
pytest.importorskip("triton", reason="left out: Triton is not installed")

from secateur.federated.submodels.networks import Narrow
from secateur.gpu import batchnorm_kernels, stacked_layers, stacked_layers_kernels
from secateur.gpu.precision import tf32
from secateur.models.mapp import mapp_cnn

pytestmark = pytest.mark.system  # interpreted, they take minutes
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [  # lanes, pictures, channels, filters, height, width, taps
    (2, 3, 3, 8, 6, 6, (3, 3)),
    (3, 2, 16, 32, 4, 5, (3, 3)),
    (1, 5, 5, 130, 3, 3, (3, 3)),
    (2, 2, 40, 7, 7, 2, (1, 5)),
    (2, 70, 4, 4, 2, 2, (1, 1)),
]
FILTERS = [  # lanes, filters, channels, taps
    (3, 5, 1, (1, 1)),
    (1, 67, 130, (1, 1)),
    (2, 70, 3, (3, 3)),
    (2, 64, 16, (3, 3)),
    (3, 9, 37, (3, 3)),
    (2, 33, 1, (5, 5)),
    (2, 130, 7, (5, 5)),
    (4, 6, 11, (1, 5)),
    (2, 3, 4, (7, 3)),
]


def _drawn(shape, rng, last=True):
    x = torch.randn(shape, generator=rng).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last) if last else x


def _gradients(out, inputs, g):
    return torch.autograd.grad(out, inputs, g)


@pytest.fixture
def by_kernels(monkeypatch):
    modules = {stacked_layers.CONVOLUTION: stacked_layers_kernels, stacked_layers.BATCHNORM: batchnorm_kernels}
    monkeypatch.setattr(
        stacked_layers, "kernels_for", lambda x, name: modules[name] if x.dtype == torch.float32 else None
    )
    with tf32(False):
        yield


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("programs", [1, 1024])
def test_a_convolution_equals_one_a_lane(shape, programs, rng, monkeypatch, by_kernels):
    monkeypatch.setattr(stacked_layers_kernels, "PROGRAMS", programs)
    lanes, pictures, channels, filters, height, width, taps = shape
    x = _drawn((lanes * pictures, channels, height, width), rng).requires_grad_()
    weight = _drawn((lanes, filters, channels, *taps), rng, last=False).requires_grad_()
    bias = _drawn((lanes, filters), rng, last=False).requires_grad_()
    g = _drawn((lanes * pictures, filters, height, width), rng)
    out = stacked_layers.conv2d(x, weight, bias)
    found = [out, *_gradients(out, (x, weight, bias), g)]
    given = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    padding = [size // 2 for size in taps]
    apart = zip(given[0].chunk(lanes), given[1], given[2], strict=True)
    exact = torch.cat([F.conv2d(*each, padding=padding) for each in apart])
    for one, other in zip(found, [exact, *_gradients(exact, given, g.double())], strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().norm()) <= 1e-5 * float(other.detach().norm())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_way_back_is_a_convolution_with_turned_filters(shape, rng, by_kernels):
    lanes, pictures, channels, filters, height, width, taps = shape
    x = _drawn((lanes * pictures, filters, height, width), rng).requires_grad_()
    weight = _drawn((lanes, filters, channels, *taps), rng, last=False).requires_grad_()
    bias = _drawn((lanes, channels), rng, last=False).requires_grad_()
    g = _drawn((lanes * pictures, channels, height, width), rng)
    out = stacked_layers.conv2d(x, weight, bias, back=True)
    found = [out, *_gradients(out, (x, weight, bias), g)]
    given = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    exact = stacked_layers.conv2d(*given, back=True)  # by operations of torch
    plain = stacked_layers.conv2d(given[0], stacked_layers.transpose_filters(given[1]), given[2])
    torch.testing.assert_close(exact, plain, rtol=0, atol=0)
    for one, other in zip(found, [exact, *_gradients(exact, given, g.double())], strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().norm()) <= 1e-5 * float(other.detach().norm())


@pytest.mark.parametrize("shape", FILTERS)
@pytest.mark.parametrize("lying", ["one run", "lanes apart", "all the same", "transposed"])
def test_filters_are_laid_as_operations_of_torch_lay_them(shape, lying, rng):
    lanes, filters, channels, taps = shape
    weight = _lying(_drawn((lanes, filters, channels, *taps), rng, last=False), lying)
    found = stacked_layers_kernels.by_tap(weight)
    _same(found, weight.permute(0, 3, 4, 2, 1).flatten(1, 3))
    _same(stacked_layers_kernels.to_weights(found, taps), weight)
    _same(stacked_layers_kernels.transpose_filters(weight), weight.flip(3, 4).permute(0, 3, 4, 1, 2).flatten(1, 3))


def _lying(weight, how):
    if how == "lanes apart":  # as those of a row of all parameters do
        return torch.cat([weight.flatten(1)[:, :3], weight.flatten(1)], 1)[:, 3:].view(weight.shape)
    if how == "all the same":
        return weight[0].expand(weight.shape)
    return weight.transpose(1, 2).contiguous().transpose(1, 2) if how == "transposed" else weight


def _same(found, exact):
    assert found.is_contiguous()
    torch.testing.assert_close(found, exact, rtol=0, atol=0)


def test_the_first_layer_has_no_gradient_of_its_pictures(rng, by_kernels):
    x = _drawn((4, 3, 4, 4), rng)
    weight = _drawn((2, 8, 3, 3, 3), rng, last=False).requires_grad_()
    out = stacked_layers.conv2d(x, weight, weight.new_zeros(2, 8))
    assert torch.autograd.grad(out.sum(), weight)[0].shape == weight.shape
    assert not x.requires_grad


@pytest.mark.parametrize("shape", [(3, 70, 70), (1, 33, 3), (2, 2, 64), (4, 300, 130), (5, 1, 1)])
@pytest.mark.parametrize("programs", [1, 40, 1024])
def test_two_passes_over_the_memory_equal_operations_of_torch(shape, programs, rng, monkeypatch, by_kernels):
    monkeypatch.setattr(batchnorm_kernels, "PROGRAMS", programs)
    x, g = (torch.randn(shape, generator=rng).to(DEVICE) for _ in range(2))
    x = x * 3 + 50  # far from 0: a sum of squares would lose the variance
    weight, bias = (torch.randn(shape[0], shape[2] + 3, generator=rng).to(DEVICE)[:, 3:] for _ in range(2))
    exact, moments = stacked_layers.normalise(x.double(), weight.double(), bias.double(), 0.5)
    expected = stacked_layers.normalise_back(g.double(), x.double(), *moments, bias.double())
    out, measured = stacked_layers.normalise(x, weight, bias, 0.5)
    back = stacked_layers.normalise_back(g, x, *measured, bias)
    pairs = [(out, exact), *zip(measured, moments, strict=True), *zip(back, expected, strict=True)]
    assert out.dtype == torch.float32 and out.is_contiguous()
    for one, other in pairs:
        # The gradient of x is what of g * scale is left without its mean: of one place exactly nothing, and as far from
        # it as float32 is from what was summed.
        summed = g * measured[2][:, None] if other is expected[0] else other
        assert float((one - other).norm()) <= 2e-6 * float(summed.norm()) + 1e-12


def test_what_is_not_a_number_stays_so_that_a_training_can_tell(rng, by_kernels):
    x = torch.randn(2, 40, 3, generator=rng).to(DEVICE)
    ones = torch.ones(2, 3, device=DEVICE)
    x[1, 5, 1] = torch.nan
    out, (mean, *_) = stacked_layers.normalise(x, ones, ones, 1e-5)
    assert out.isnan().sum(1).tolist() == [[0, 0, 0], [0, 40, 0]]
    assert mean.isnan().tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("size", [(4, 4), (2, 6), (5, 4)])  # an odd one is pooled by torch
@pytest.mark.parametrize("programs", [1, 1024])
def test_norm_relu_and_pooling_equal_one_after_the_other(size, programs, rng, monkeypatch, by_kernels):
    monkeypatch.setattr(batchnorm_kernels, "PROGRAMS", programs)
    lanes, pictures, channels = 3, 20, 70
    x = (_drawn((lanes * pictures, channels, *size), rng) + 3).requires_grad_()
    weight, bias = (torch.randn(lanes, channels, generator=rng).to(DEVICE).requires_grad_() for _ in range(2))
    out = stacked_layers.norm_relu_pool(x, weight, bias, 0.5)
    g = torch.randn(out.shape, generator=rng).to(DEVICE)
    found = [out, *_gradients(out, (x, weight, bias), g)]
    given = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    apart = zip(given[0].chunk(lanes), given[1], given[2], strict=True)
    norms = [F.batch_norm(one, None, None, own, by, True, 0.1, 0.5) for one, own, by in apart]
    exact = F.max_pool2d(torch.cat(norms).relu(), 2)
    for one, other in zip(found, [exact, *_gradients(exact, given, g.double())], strict=True):
        assert one.shape == other.shape
        assert float((one - other).detach().norm()) <= 1e-5 * float(other.detach().norm())


def test_of_equal_ones_the_first_gets_the_gradient_and_what_is_not_a_number_stays(rng, by_kernels):
    x = torch.tensor([[1.0, 5.0], [5.0, 0.0]], device=DEVICE).view(1, 1, 2, 2).repeat(3, 2, 1, 1).requires_grad_()
    weight = torch.tensor([[1.0, -1.0]], device=DEVICE)  # of the second channel the least is the largest
    out = stacked_layers.norm_relu_pool(x, weight, torch.ones_like(weight), 1.0)
    (found,) = torch.autograd.grad(out[0].sum(), x)
    plain = F.max_pool2d(F.batch_norm(x, None, None, weight[0], torch.ones_like(weight[0]), True, 0.1, 1.0).relu(), 2)
    torch.testing.assert_close(found, torch.autograd.grad(plain[0].sum(), x)[0])
    broken = x.detach().clone()
    broken[0, 0, 0, 1] = torch.nan
    out = stacked_layers.norm_relu_pool(broken, weight, torch.ones_like(weight), 1.0)
    assert out[:, 0].isnan().all() and not out[:, 1].isnan().any()


def test_a_network_of_many_clients_equals_each_by_itself(rng, by_kernels):
    net = mapp_cnn(4, (3, 16, 8), 5, 0.5).to(DEVICE)
    flat = torch.randn(3, sum(value.numel() for value in net.parameters()), generator=rng).to(DEVICE)
    inputs = torch.randn(3, 6, 3, 16, 8, generator=rng).to(DEVICE)
    labels = torch.randint(5, (3, 6), generator=rng).to(DEVICE)
    found, exact = [], []
    for into, kind in ((found, torch.float32), (exact, torch.float64)):
        narrow, given = Narrow(net.to(kind), 0.5, True, DEVICE), flat.to(kind).requires_grad_()
        losses = narrow.losses(given, inputs.to(kind), labels, None, ())
        into += [losses.detach(), *_params(torch.autograd.grad(losses.sum(), given)[0], narrow.shapes)]
    for one, other in zip(found, exact, strict=True):
        assert float((one - other).norm()) <= 1e-4 * float(other.norm())
    zero = [float(value.abs().max()) == 0 for value in found[1:]]
    assert [name for name, none in zip(narrow.shapes, zero, strict=True) if none] == [
        f"{i}.bias" for i in (0, 5, 10, 15)
    ]


def _params(gradient, shapes):
    """By parameter; biases before a BatchNorm have exactly no gradient, whatever rounding would leave of it."""
    return gradient.split([prod(shape) for shape in shapes.values()], 1)
