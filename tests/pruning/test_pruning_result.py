from __future__ import annotations

import pytest
import torch
from pruning_nets import Residual, made, rows_of
from torch import nn

from secateur.metrics.cost import bytes_on_disk
from secateur.pruning.filters import L1Structured
from secateur.pruning.removal import savings
from secateur.pruning.scores import L1Unstructured

IMAGES = rows_of((3, 6, 6))


def test_savings_of_a_coupled_pruning_by_hand(rng):
    net = made(Residual)  # 3-6-12-6 channels, biases, 6x6 images, head 6-4
    found = savings(net, L1Structured(groups="coupled")(net, IMAGES, 0.5, rng), (3, 6, 6), repeats=3)
    assert found.masked.parameters == (162 + 6) + 12 + (648 + 12) + 24 + (648 + 6) + 12 + 28
    assert found.removed.parameters == (81 + 3) + 6 + (162 + 6) + 12 + (162 + 3) + 6 + 16
    # the head's columns that read a dead channel are gone, but not zero; the convs' inputs too
    assert found.nonzero == (81 + 3) + 6 + (324 + 6) + 12 + (324 + 3) + 6 + 28
    assert found.masked_share == pytest.approx(0.5)
    assert found.removed_share == pytest.approx(1 - (81 + 162 + 162) / (162 + 648 + 648))
    assert found.masked.flops == 2 * (36 * (162 + 648 + 648) + 36 * 24 + 24)
    assert found.removed.flops == 2 * (36 * (81 + 162 + 162) + 36 * 12 + 12)
    assert found.masked.bytes == bytes_on_disk(net) > found.removed.bytes
    assert found.masked.seconds > 0 and found.removed.seconds > 0 and found.note == ""


def test_a_mask_that_cannot_be_removed_says_why(rng):
    net = made(Residual)
    found = savings(net, L1Unstructured()(net, IMAGES, 0.5, rng), (3, 6, 6), repeats=3)
    assert found.removed is None and found.removed_share == 0 and "single weights" in found.note
    assert found.masked_share == pytest.approx(0.5)


def test_without_convs_the_share_is_of_the_linear_weights(rng):
    net = made(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    found = savings(net, L1Structured()(net, rows_of((4,)), 0.5, rng), (4,), repeats=3)
    assert found.masked_share == pytest.approx(16 / 48) and found.removed_share == pytest.approx(24 / 48)


def test_the_net_is_left_as_it_was(rng):
    net = made(Residual).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    savings(net, L1Structured()(net, IMAGES, 0.5, rng), (3, 6, 6), repeats=1)
    assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
