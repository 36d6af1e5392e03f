"""int8 weights are q * scale, computed here by hand."""

import pytest
import torch
from torch import nn

from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.metrics.cost import bytes_on_disk
from secateur.pruning.quantisation import Int8

WEIGHT = torch.tensor([[1.0, -0.5, 0.25, 0.1], [-2.0, 0.02, 0.0, 1.99]])


@pytest.fixture
def layer():
    layer = nn.Linear(4, 2)
    with torch.no_grad():
        layer.weight.copy_(WEIGHT)
        layer.bias.copy_(torch.tensor([0.5, -0.5]))
    return nn.Sequential(layer)


@pytest.fixture
def rows(rng):
    inputs = torch.rand(64, 4, generator=rng)
    inputs[0], inputs[1] = 0.0, 1.0
    return Batch(inputs, torch.zeros(64, dtype=torch.long))


def integers(net):
    return next(value for value in net.state_dict().values() if value.dtype == torch.int8)


def test_static_weights_are_the_nearest_multiples_of_their_rows_scale(layer, rows):
    net = Int8().convert(layer, rows)
    scales = next(value for value in net.state_dict().values() if value.shape == (2,) and value.is_floating_point())
    expected = WEIGHT.abs().amax(1) / 127.5  # a symmetric range of 255 steps, from -128 to 127
    assert torch.allclose(scales, expected, rtol=1e-6)
    steps, smaller = WEIGHT / expected[:, None], WEIGHT.abs() < WEIGHT.abs().amax(1, keepdim=True)
    assert integers(net)[smaller].tolist() == [-64, 32, 13, 1, 0, 127] == steps[smaller].round().tolist()
    assert (integers(net)[~smaller].abs() >= 127).all()  # a row's largest weight is at the end of the range
    dequantised = integers(net).float() * scales[:, None]
    wanted = rows.inputs @ dequantised.T + torch.tensor([0.5, -0.5])
    step = 1 / 255  # of an input in [0, 1], which is off by half a step at most
    assert ((net(rows.inputs) - wanted).abs() <= 0.51 * step * WEIGHT.abs().sum(1) + 1e-6).all()


def test_dynamic_weights_are_q_times_scale_and_every_row_has_a_scale_of_its_own(layer, rows):
    net = Int8(mode="dynamic").convert(layer, rows)
    weight = net[0].weight
    assert weight.qdata.dtype == torch.int8
    dequantised = weight.qdata.float() * weight.scale.view(-1, 1)
    assert (dequantised - WEIGHT).abs().max() <= WEIGHT.abs().amax() / 127 / 2 + 1e-6
    assert torch.equal(weight.qdata.float(), (WEIGHT / weight.scale.view(-1, 1)).round().clamp(-128, 127))
    together, alone = net(rows.inputs), torch.cat([net(row[None]) for row in rows.inputs])
    assert torch.allclose(together, alone, atol=1e-6)
    assert (together - layer(rows.inputs)).abs().max() < 0.05


def test_the_original_stays_and_the_file_is_a_quarter(rng):
    layer = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3)).eval()
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    rows = Batch(torch.randn(8, 3, 8, 8, generator=rng), torch.zeros(8, dtype=torch.long))
    net = Int8().convert(layer, rows)
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert bytes_on_disk(net) < 0.32 * bytes_on_disk(layer)
    assert not net.train().training
    with torch.no_grad():
        assert (net(rows.inputs[:1]) - layer(rows.inputs[:1])).abs().max() < 0.05


def test_a_network_without_linear_layers_has_nothing_dynamic():
    with pytest.raises(WrongInput, match="int8:mode=dynamic quantises linear layers, and this model has none; use"):
        Int8(mode="dynamic").check(nn.Conv2d(1, 2, 3), (1, 8, 8))


def test_what_cannot_be_exported_is_one_sentence():
    class Branch(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(WrongInput, match="model: cannot be exported, which int8 needs"):
        Int8().check(Branch(), (4,))
