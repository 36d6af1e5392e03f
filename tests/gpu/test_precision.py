import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secateur.gpu.precision import ThreeProducts, halves
from secateur.inference import bind_state


def numbers(*shape, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=rng) * torch.randn(shape, generator=rng).exp()


def test_halves_are_a_tf32_number_and_the_rest():
    x = numbers(10_000)
    high, low = halves(x)
    assert torch.equal(high.double() + low.double(), x.double())
    assert not bool((high.view(torch.int32) & 0x1FFF).any())
    assert float((low / x).abs().max()) <= 2**-11
    assert halves(torch.tensor([1.0 + 2**-10]))[0].item() == 1 + 2**-10
    assert halves(torch.tensor([-1.0 - 2**-12]))[1].item() == -(2**-12)


def test_three_products_work_inside_vmap():
    layer, inputs = nn.Conv2d(4, 8, 3), numbers(3, 2, 4, 5, 5)
    wanted = torch.stack([layer(each) for each in inputs])
    for mapped in (torch.vmap(layer), torch.vmap(torch.vmap(layer))):  # batches, and single pictures
        with torch.no_grad(), ThreeProducts():
            many = mapped(inputs)
        torch.testing.assert_close(many, wanted, rtol=1e-5, atol=1e-6)


def tf32_only(function):
    """`function` as the tensor cores take it: every factor cut to TF32's ten bits, products added in float32."""

    def rounded(inputs, weight, bias=None, *others):
        return function(halves(inputs)[0], halves(weight)[0], bias, *others)

    return rounded


@pytest.mark.parametrize("layer", [nn.Conv2d(16, 8, 3, 2, 1), nn.Conv2d(16, 8, 1, bias=False), nn.Linear(16, 8)])
def test_three_products_of_tf32_are_one_of_float32(layer):
    inputs = numbers(4, 16, 9, 9) if isinstance(layer, nn.Conv2d) else numbers(4, 16)
    true = layer.double()(inputs.double())
    layer.float()
    scale = true.abs().max()
    name = "conv2d" if isinstance(layer, nn.Conv2d) else "linear"
    plain = getattr(F, name)
    coarse = tf32_only(plain)

    class OnTensorCores(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return (coarse if func is plain else func)(*args, **(kwargs or {}))

    with torch.no_grad(), OnTensorCores():
        assert float((layer(inputs) - true).abs().max() / scale) > 1e-4
        with ThreeProducts():
            assert float((layer(inputs) - true).abs().max() / scale) < 2e-6


def test_groups_and_other_dtypes_are_left_alone():
    layer, inputs = nn.Conv2d(4, 8, 3, groups=2), numbers(2, 4, 5, 5)
    with ThreeProducts():
        split = layer(inputs)
    assert torch.equal(split, layer(inputs))
    with ThreeProducts():
        assert layer.double()(inputs.double()).dtype == torch.float64


@pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
def test_a_gpu_answers_in_float32():
    from secateur.models.create import create

    net = create("resnet18-pool", (3, 32, 32), 10, torch.Generator().manual_seed(0))
    inputs = numbers(64, 3, 32, 32).clamp(-2, 2)
    true = bind_state(net.double(), net.state_dict(), "cpu")(inputs.double())
    net.float()
    answer = bind_state(net, net.state_dict(), "cuda")(inputs.cuda()).cpu()
    assert float((answer - true).abs().max() / true.abs().max()) < 1e-5
