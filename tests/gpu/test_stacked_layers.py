"""Layers as products against torch's own, alone and stacked."""

import pytest
import torch
from torch import nn, vmap
from torch.func import functional_call, grad
from torch.nn import functional as F

from secateur.gpu.stacked_layers import Products, norm_relu, product_convolution, product_linear


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).double()


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4), (4,)])
@pytest.mark.parametrize("bias", [None, numbers(3)])
def test_linear(shape, bias):
    inputs, weight = numbers(*shape), numbers(3, 4)
    torch.testing.assert_close(product_linear(inputs, weight, bias), F.linear(inputs, weight, bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("stride", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", [(0, 0), (2, 1)])
@pytest.mark.parametrize("bias", [None, numbers(5)])
def test_convolution(stride, padding, bias):
    inputs, weight = numbers(2, 3, 8, 7), numbers(5, 3, 3, 2)
    wanted = F.conv2d(inputs, weight, bias, stride, padding)
    torch.testing.assert_close(product_convolution(inputs, weight, bias, stride, padding), wanted, rtol=0, atol=1e-12)


def test_batchnorm_of_many_lanes_is_torchs_own_of_each(rng):
    x, g = (torch.randn(6, 4, 5, 2, dtype=torch.float64, generator=rng) for _ in range(2))  # three lanes of two
    weight, bias = (torch.randn(3, 4, dtype=torch.float64, generator=rng) for _ in range(2))
    inputs = [value.clone().requires_grad_() for value in (x, weight, bias)]
    out = norm_relu(*inputs, 0.1)
    gradients = torch.autograd.grad(out, inputs, g)
    for lane, rows in enumerate((slice(0, 2), slice(2, 4), slice(4, 6))):
        alone = [value.clone().requires_grad_() for value in (x[rows], weight[lane], bias[lane])]
        exact = F.batch_norm(alone[0], None, None, *alone[1:], training=True, eps=0.1).relu()
        assert torch.allclose(exact, out[rows], rtol=1e-12)
        of_lane = gradients[0][rows], gradients[1][lane], gradients[2][lane]
        for one, other in zip(torch.autograd.grad(exact, alone, g[rows]), of_lane, strict=True):
            assert torch.allclose(one, other, rtol=1e-12)


class Net(nn.Module):
    """Every way in which a layer may be written that is taken, and some that are not."""

    def __init__(self):
        super().__init__()
        self.plain, self.apart = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, groups=2)
        self.far, self.same = nn.Conv2d(4, 4, 2, dilation=2), nn.Conv2d(4, 2, 3, padding="same")
        self.ends = nn.Linear(2, 3)

    def forward(self, inputs):
        found = self.same(self.far(self.apart(self.plain(inputs).relu()))).relu()
        found = F.conv2d(found, self.ends.weight[:2, :, None, None], stride=1)
        return F.linear(found.mean((2, 3)), weight=self.ends.weight) + self.ends(found[:, :, 0, 0])


def test_gradients_of_stacked_networks_are_those_of_each_and_lie_as_the_weights():
    net = Net().double()
    stacked = {name: numbers(3, *value.shape) for name, value in net.named_parameters()}
    inputs = numbers(3, 4, 2, 9, 9)

    def loss(params, inputs):
        return functional_call(net, params, (inputs,)).square().sum()

    with Products():
        many = vmap(grad(loss))(stacked, inputs)
        leaves = {name: value.clone().requires_grad_() for name, value in stacked.items()}
        total = vmap(loss)(leaves, inputs).sum()
        outside = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    for i in range(3):
        alone = grad(loss)({name: value[i] for name, value in stacked.items()}, inputs[i])
        for name, value in alone.items():
            torch.testing.assert_close(many[name][i], value, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(outside[name][i], value, rtol=1e-9, atol=1e-9)
    assert outside["plain.weight"].is_contiguous() and outside["ends.weight"].is_contiguous()
