"""Power iteration against explicit matrices, in float64."""

import pytest
import torch
from torch.func import jacfwd

from secateur.models.create import create
from secateur.theory.gradient_distance import gradient_map, jacobian_norm
from secateur.tree import state_of


@pytest.mark.parametrize("name", ["lenet-zhu", "cnn6", "digits-cnn"])
def test_the_norm_of_the_map_from_input_to_gradient_is_that_of_its_explicit_jacobian(name, rng):
    net = create(name, (1, 4, 4), 4, rng).double()
    inputs = torch.rand(1, 1, 4, 4, generator=rng, dtype=torch.float64)
    phi = gradient_map(net, state_of(net), torch.tensor([2]))
    explicit = torch.linalg.matrix_norm(jacfwd(phi)(inputs).flatten(1), 2)
    found = jacobian_norm(phi, inputs, rng, iterations=500, tolerance=1e-10)
    assert found.value == pytest.approx(float(explicit), rel=1e-6) and found.value <= float(explicit) * (1 + 1e-9)


def test_a_flat_map_has_norm_0(rng):
    assert jacobian_norm(lambda x: x.detach() * 0 + x * 0, torch.ones(3), rng).value == 0


def test_it_says_how_far_it_may_still_be(rng):
    scale = torch.linspace(1, 1.01, 50, dtype=torch.float64)
    short = jacobian_norm(lambda x: x * scale, torch.zeros(50, dtype=torch.float64), rng, iterations=3)
    assert short.iterations == 3 and short.change > 0 and short.value < 1.01
