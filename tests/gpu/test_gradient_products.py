"""The products of two gradients by kernels, interpreted or on a GPU, against operations of torch; and their slopes."""

import os

import pytest
import torch
from torch import vmap
from torch.func import grad, grad_and_value

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

from secateur.gpu import gradient_products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def numbers(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def objective(value, aim, mask, how):
    dot, trial, target = how(value, aim, mask)
    return 1 - dot / (trial * target).sqrt() + 0.1 * trial


@pytest.fixture
def kernels(monkeypatch):
    """The kernels, wherever the tensors are."""
    found = pytest.importorskip("secateur.gpu.gradient_products_kernels")
    monkeypatch.setattr(gradient_products, "_kernels_for", lambda *tensors: found)
    return found


def test_by_hand():
    value, aim = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 0.5, 9.0])
    assert [float(each) for each in gradient_products.products(value, aim, None)] == [30, 14, 85.25]
    mask = torch.tensor([True, True, False])
    assert [float(each) for each in gradient_products.products(value, aim, mask)] == [3, 5, 85.25]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 1, 2, 2), (9001,)])
def test_many_trials_are_those_of_each_alone(shape, masked, kernels):
    lanes = 3
    values, aims = numbers(lanes, *shape), numbers(lanes, *shape, seed=1)
    masks = numbers(lanes, *shape, seed=2) > 0 if masked else None
    dims = (0, 0, 0 if masked else None)
    with_kernels = vmap(grad_and_value(lambda v, a, m: objective(v, a, m, gradient_products.products)), dims)
    slopes, found = with_kernels(values, aims, masks)
    for lane in range(lanes):
        mask = None if masks is None else masks[lane]
        one, aim = values[lane].double(), aims[lane].double()
        slope, wanted = grad_and_value(lambda v, a=aim, m=mask: objective(v, a, m, gradient_products._compute_plainly))(
            one
        )
        assert float(found[lane]) == pytest.approx(float(wanted), rel=1e-6)
        assert torch.allclose(slopes[lane].double(), slope, atol=1e-5 * float(slope.abs().max()))


def test_the_many_may_be_another_axis(kernels):
    values, aims = numbers(4, 3, 2), numbers(4, 3, 2, seed=1)
    one = grad_and_value(lambda v, a: objective(v, a, None, gradient_products.products))
    found, wanted = vmap(one, (1, 1))(values, aims), vmap(one)(values.movedim(1, 0), aims.movedim(1, 0))
    assert all(torch.equal(*each) for each in zip(found, wanted, strict=True))


def test_slopes_of_slopes(kernels):
    values, aim = numbers(2, 7), numbers(7, seed=1)

    def length(value, how):
        return grad(lambda v: objective(v, aim, None, how))(value).square().sum()

    found = vmap(grad(lambda v: length(v, gradient_products.products)))(values)
    wanted = vmap(grad(lambda v: length(v, gradient_products._compute_plainly)))(values.double())
    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_trials_of_trials(kernels):
    """Two axes of many, as of candidates of each trial."""
    values, aims = numbers(2, 3, 6), numbers(2, 6, seed=1)
    found = vmap(lambda some, aim: vmap(lambda v: objective(v, aim, None, gradient_products.products))(some))(
        values, aims
    )
    wanted = vmap(lambda some, aim: vmap(lambda v: objective(v, aim, None, gradient_products._compute_plainly))(some))(
        values, aims
    )
    assert torch.allclose(found, wanted, atol=1e-5)
