import math

import pytest
import torch
from torch import nn

from secateur.interfaces import BlackBox
from secateur.metrics import gaps as module
from secateur.metrics.gaps import sensitivity
from secateur.seeding import initialise


def directions(seed, *shape):
    """What `sensitivity` draws: its own generator, seeded from the given one."""
    rng = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=rng)))
    return torch.randn(shape, generator=own)


def test_equation_2_by_hand():
    # f(x) = (a x^2, 1 - a x^2): |f(x + e d) - f(x)| / e = a |2 x d + e d^2|
    a, x, epsilon = 0.1, 2.0, 1e-3
    box = BlackBox(lambda inputs: torch.cat([a * inputs**2, 1 - a * inputs**2], 1))
    drawn = directions(0, 10, 1).double()
    expected = sum(a * abs(2 * x * float(d) + epsilon * float(d) ** 2) for d in drawn) / 10
    inputs = torch.tensor([[x]], dtype=torch.float64)
    for shared in (True, False):
        found = sensitivity(box, inputs, torch.Generator().manual_seed(0), shared=shared)
        assert found.tolist() == [[pytest.approx(expected, rel=1e-9)] * 2]


def test_directions_are_gaussian_with_unit_variance():
    # linear f: the mean of |w . d| is |w| sqrt(2 / pi)
    weight = torch.tensor([[0.03], [0.04]], dtype=torch.float64)
    box = BlackBox(lambda inputs: torch.cat([0.5 + inputs @ weight, 0.5 - inputs @ weight], 1))
    found = sensitivity(box, torch.zeros(2000, 2, dtype=torch.float64), torch.Generator().manual_seed(0))
    assert float(found.mean()) == pytest.approx(0.05 * math.sqrt(2 / math.pi), rel=0.02)


@pytest.fixture
def net(rng):
    return initialise(lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)), rng)


def test_float32_agrees_with_float64(net, rng):
    inputs = torch.randn(200, 20, generator=rng)
    single = sensitivity(BlackBox(lambda x: net(x).softmax(1)), inputs, torch.Generator().manual_seed(1))
    twin = initialise(lambda: nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)), torch.Generator()).double()
    twin.load_state_dict(net.state_dict())
    double = sensitivity(BlackBox(lambda x: twin(x).softmax(1)), inputs.double(), torch.Generator().manual_seed(1))
    assert single.dtype == torch.float32 and double.dtype == torch.float64
    # a rounding of 6e-8 divided by eps is 6e-5, and half of it goes either way
    torch.testing.assert_close(single.double(), double, rtol=1e-2, atol=1e-4)
    assert float(single.mean()) == pytest.approx(float(double.mean()), rel=1e-3)


def test_shared_directions_do_not_depend_on_the_other_rows(net, rng, monkeypatch):
    net.double()
    box = BlackBox(lambda x: net(x).softmax(1))
    inputs = torch.randn(30, 20, generator=rng, dtype=torch.float64)
    whole = sensitivity(box, inputs, torch.Generator().manual_seed(1), shared=True)
    alone = sensitivity(box, inputs[7:8], torch.Generator().manual_seed(1), shared=True)
    torch.testing.assert_close(whole[7:8], alone)
    monkeypatch.setattr(module, "ROWS", 8)  # nor on how many are asked at once
    torch.testing.assert_close(sensitivity(box, inputs, torch.Generator().manual_seed(1), shared=True), whole)


def test_own_directions_differ_from_row_to_row(net):
    net.double()
    inputs = torch.zeros(2, 20, dtype=torch.float64)
    first, second = sensitivity(BlackBox(lambda x: net(x).softmax(1)), inputs, torch.Generator().manual_seed(1))
    assert not torch.allclose(first, second)
