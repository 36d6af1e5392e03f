from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secateur.catalogue import find
from secateur.metrics.cost import bytes_on_disk, cost, flops, latency, parameters


def small_net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 6, 3, stride=2, groups=2, bias=False), nn.Flatten(), nn.Linear(6, 10)),
    )


def test_parameters_by_hand():
    # 3*8*9 + 8, 2*8, 8/2*6*9, 6*10 + 10
    assert parameters(small_net()) == 224 + 16 + 216 + 70


def test_flops_by_hand():
    # an 8x8 image: 64 places of the first conv and its norm, one of the second conv
    macs = 64 * 8 * 27 + 64 * 8 + 1 * 6 * 36 + 6 * 10
    assert flops(small_net(), (3, 8, 8)) == 2 * macs == 29_224


def test_flops_of_resnet18_on_cifar():
    convs = 1_769_472 + 150_994_944 + 3 * 134_217_728  # stem, four convs of 64, three stages that are alike
    norms = 5 * 65_536 + 5 * 128 * 256 + 5 * 256 * 64 + 5 * 512 * 16
    net = find("model", "resnet18")(input_shape=(3, 32, 32), classes=10)
    assert flops(net, (3, 32, 32)) == 2 * (convs + norms + 5120)


def test_bytes_are_those_of_the_file(tmp_path):
    net = small_net()
    save_file(net.state_dict(), tmp_path / "net.safetensors")
    assert bytes_on_disk(net) == (tmp_path / "net.safetensors").stat().st_size
    numbers = parameters(net) + 16  # the running mean and variance; the count of batches is an int64
    assert bytes_on_disk(net) >= 4 * numbers + 8


def test_bytes_of_tied_and_channels_last_tensors():
    net = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last)
    net[1].weight = net[0].weight
    assert bytes_on_disk(net) > 0


def test_latency_is_the_median_of_a_forward_with_one_thread():
    slow, fast = nn.Linear(2048, 2048), nn.Linear(8, 8)
    threads = torch.get_num_threads()
    assert latency(slow, (2048,), 20) > latency(fast, (8,), 20) > 0
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no CUDA device")
def test_latency_on_a_gpu_waits_for_the_result():
    assert latency(nn.Linear(4096, 4096).cuda(), (4096,), 20) > 0


def test_the_model_is_left_as_it_was():
    net = small_net().train()
    before = copy.deepcopy(net.state_dict())
    found = cost(net, (3, 8, 8), repeats=3)
    assert (found.parameters, found.flops) == (526, 29_224) and found.seconds > 0
    assert all(module.training and not module._forward_hooks for module in net.modules())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
