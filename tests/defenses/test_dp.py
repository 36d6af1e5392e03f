"""An update with an epsilon: clipping by hand, sensitivity, and what the accountant says."""

import math

import pytest
import torch
from torch import nn

from secateur import tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.defenses import dp_sgd
from secateur.defenses.dp import DifferentialPrivacy, per_example
from secateur.defenses.dp_common import Phase, epsilon
from secateur.defenses.precode import with_bottleneck
from secateur.errors import WrongInput
from secateur.interfaces import Batch, UploadContext


def turning_of(net, batch, seed=0):
    return UploadContext(net, tree.state_of(net), batch, 0, torch.Generator().manual_seed(seed))


def zeros(net):
    return {name: torch.zeros_like(value) for name, value in tree.params_of(net).items()}


def silent(bound):
    return DifferentialPrivacy(noise_multiplier=0.0, max_grad_norm=bound)


@pytest.fixture
def small(rng):
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
    net.append(nn.Linear(12, 4)).double()
    net[1].running_mean += 0.1
    return net, Batch(torch.randn(5, 1, 4, 4, generator=rng, dtype=torch.float64), torch.tensor([0, 1, 2, 3, 3]))


def test_clipping_by_hand():
    # Mean squared error of a linear map: gradients 2 (w x - y) x, of the examples (6, 8) and (.1, 0)
    net = nn.Linear(2, 1, bias=False)
    nn.init.zeros_(net.weight)
    batch = Batch(torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([-1.0, -0.05]))
    turning = UploadContext(
        net, tree.state_of(net), batch, 0, None, loss=lambda out, y: (out[:, 0] - y).square().mean()
    )
    grads = torch.cat([part["weight"] for part in per_example(turning, tree.params_of(net))])
    assert torch.allclose(grads, torch.tensor([[[6.0, 8.0]], [[0.1, 0.0]]]))
    drawn = {"weight": torch.tensor([[1.0, -1.0]])}
    sent, _ = DifferentialPrivacy(0.5, 2.0)(zeros(net), {}, turning, noise=drawn)
    # (6, 8) is clipped to 2 (.6, .8); (.1, 0) stays; the noise is .5 * 2 * (1, -1)
    assert torch.allclose(sent["weight"], torch.tensor([[(1.2 + 0.1 + 1) / 2, (1.6 - 1) / 2]]))


def test_without_noise_and_with_a_wide_bound_it_is_the_gradient_with_batchnorm_frozen(small):
    net, batch = small
    sent, _ = silent(1e6)(zeros(net), {}, turning_of(net, batch))
    gradient = gradient_update(net, tree.state_of(net), batch, "eval").values
    assert sent.keys() == gradient.keys()
    for name, value in gradient.items():
        assert torch.allclose(sent[name], value, atol=1e-12)


def test_no_example_moves_the_sum_by_more_than_the_bound(small):
    net, batch = small
    whole, _ = silent(0.01)(zeros(net), {}, turning_of(net, batch))
    for left_out in range(batch.size):
        rows = torch.arange(batch.size) != left_out
        without, _ = silent(0.01)(zeros(net), {}, turning_of(net, batch.take(rows)))
        moved = [(5 * whole[name] - 4 * without[name]).square().sum() for name in whole]
        assert float(torch.stack(moved).sum().sqrt()) == pytest.approx(0.01, rel=1e-9)


def test_a_batch_in_parts_gives_the_same(small, monkeypatch):
    net, batch = small
    twice = Batch(torch.cat([batch.inputs] * 4), torch.cat([batch.labels] * 4))  # parts of 8, 8 and 4
    whole, _ = DifferentialPrivacy()(zeros(net), {}, turning_of(net, twice))
    monkeypatch.setitem(dp_sgd.AT_ONCE, "cpu", 1)
    assert len(per_example(turning_of(net, twice), zeros(net))) == 3
    parts, _ = DifferentialPrivacy()(zeros(net), {}, turning_of(net, twice))
    for name, value in whole.items():
        assert torch.allclose(parts[name], value, atol=1e-12)


def test_an_example_whose_gradient_vanishes_does_no_harm():
    net = nn.Linear(2, 1, bias=False)
    turning = turning_of(net, Batch(torch.zeros(1, 2), torch.tensor([0])))
    sent, _ = silent(1.0)(zeros(net), {}, turning)
    assert sent["weight"].tolist() == [[0, 0]]


def test_the_model_that_was_sent_stays_as_it_is(small):
    net, batch = small
    before = tree.state_of(net)
    DifferentialPrivacy()(zeros(net), {}, turning_of(net, batch))
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_its_epsilon_is_the_accountants():
    made = DifferentialPrivacy(noise_multiplier=4.0)
    one = made.guarantee()
    assert one.epsilon == epsilon(4.0, [Phase(1.0, 1)], 1e-5) and one.delta == 1e-5
    # the exact epsilon of one Gaussian mechanism (Balle and Wang 2018) is below every accountant's bound
    assert gaussian_epsilon(4.0, 1e-5) <= one.epsilon < 1.3 * gaussian_epsilon(4.0, 1e-5)
    many = made.guarantee(rounds=1000, sample_rate=0.01)
    assert many.epsilon > made.guarantee(rounds=10, sample_rate=0.01).epsilon
    assert "1000 updates, each example taken with probability 0.01" in str(many)
    assert math.isinf(silent(1.0).guarantee().epsilon)


def gaussian_epsilon(sigma, delta):
    def normal(x):
        return (1 + math.erf(x / math.sqrt(2))) / 2

    def delta_of(eps):
        half, shift = 1 / (2 * sigma), eps * sigma
        return normal(half - shift) - math.exp(eps) * normal(-half - shift)

    low, high = 0.0, 50.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if delta_of(middle) > delta else (low, middle)
    return high


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"delta": 1.0}, "delta"),
        ({"accountant": "gdp"}, "accountant"),
    ],
)
def test_wrong_settings_are_refused(given, field):
    with pytest.raises(WrongInput, match=f"^{field}: "):
        DifferentialPrivacy(**given)


def test_noise_inside_the_network_is_refused(rng):
    net = with_bottleneck(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)), 4, rng, size=3)
    batch = Batch(torch.rand(2, 1, 4, 4, generator=rng), torch.tensor([0, 1]))
    with pytest.raises(WrongInput, match="noise inside a network is drawn for batches; leave out precode"):
        DifferentialPrivacy()(zeros(net), {}, turning_of(net, batch))


def test_batchnorm_without_running_statistics_is_refused(small):
    net = nn.Sequential(nn.BatchNorm2d(1, track_running_stats=False), nn.Flatten(), nn.Linear(16, 4)).double()
    with pytest.raises(WrongInput, match="cannot be frozen"):
        DifferentialPrivacy()(zeros(net), {}, turning_of(net, small[1]))
