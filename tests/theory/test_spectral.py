"""Power iteration against explicit matrices, in float64."""

import pytest
import torch
from torch.func import hessian, jacfwd

from secateur.models.create import create
from secateur.theory.reconstruction_bound import gradient_map, hessian_norm, jacobian_norm
from secateur.tree import state_of


@pytest.mark.parametrize("name", ["lenet-zhu", "cnn6", "digits-cnn"])
def test_the_norm_of_the_map_from_input_to_gradient_is_that_of_its_explicit_jacobian(name, rng):
    net = create(name, (1, 8, 8), 4, rng).double()
    inputs = torch.rand(1, 1, 8, 8, generator=rng, dtype=torch.float64)
    phi = gradient_map(net, state_of(net), torch.tensor([2]))
    explicit = torch.linalg.matrix_norm(jacfwd(phi)(inputs).flatten(1), 2)
    found = jacobian_norm(phi, inputs, rng, iterations=500, tolerance=1e-10)
    assert found.value == pytest.approx(float(explicit), rel=1e-6) and found.value <= float(explicit) * (1 + 1e-9)


def test_the_curvature_of_a_loss_is_that_of_its_explicit_hessian(rng):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    inputs, labels = torch.randn(6, 3, generator=rng, dtype=torch.float64), torch.tensor([0, 1, 0, 1, 1, 0])
    params = state_of(net)

    def loss(values):
        return torch.nn.functional.cross_entropy(torch.func.functional_call(net, values, (inputs,)), labels)

    flat = torch.cat([value.flatten() for value in params.values()])
    sizes = [value.numel() for value in params.values()]

    def of(vector):
        return loss({n: p.view_as(params[n]) for n, p in zip(params, torch.split(vector, sizes), strict=True)})

    explicit = torch.linalg.eigvalsh(hessian(of)(flat)).abs().max()
    assert hessian_norm(loss, params, rng, 2000, 1e-10).value == pytest.approx(float(explicit), rel=1e-5)


def test_a_negative_curvature_counts_by_its_size(rng):
    scale = torch.tensor([1.0, -3.0])
    assert hessian_norm(lambda p: (scale * p["w"] ** 2).sum() / 2, {"w": torch.ones(2)}, rng).value == pytest.approx(
        3, 1e-4
    )


def test_a_flat_map_has_norm_0(rng):
    assert jacobian_norm(lambda x: x.detach() * 0 + x * 0, torch.ones(3), rng).value == 0


def test_it_says_how_far_it_may_still_be(rng):
    scale = torch.linspace(1, 1.01, 50, dtype=torch.float64)
    short = jacobian_norm(lambda x: x * scale, torch.zeros(50, dtype=torch.float64), rng, iterations=3)
    assert short.iterations == 3 and short.change > 0 and short.value < 1.01
