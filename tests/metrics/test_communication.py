"""What updates cost on the wire: dgp's limits, and its own accounting (Table 3)."""

from __future__ import annotations

import pytest
import torch

from secateur.catalogue import find
from secateur.defenses.adgp import AlignedDualGradientPruning
from secateur.defenses.dgp import DualGradientPruning
from secateur.interfaces import Mask, Params
from secateur.metrics.cost import Communication, communication, count_as_paper, parameters
from secateur.wire import encode, encode_mask

SHAPES = {"conv": (512, 256, 3, 3), "norm": (512,), "fc.weight": (10, 512), "fc.bias": (10,)}


def gradient(shapes: dict[str, tuple[int, ...]]) -> Params:
    rng = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def aligned(grads: Params) -> tuple[Params, Mask]:
    method = AlignedDualGradientPruning()
    return method.compress(grads), method.positions(grads)


def within_limits(grads: Params) -> None:
    pruned = DualGradientPruning().compress(grads)
    sent, inside = aligned(grads)
    assert communication(pruned).ratio <= 0.6125
    assert communication(sent, inside).ratio <= 0.3215
    assert count_as_paper(pruned).ratio == pytest.approx(0.6125, abs=2e-5)
    assert count_as_paper(sent, inside).ratio == pytest.approx(0.31875, abs=2e-5)


def test_layers_of_a_real_size_stay_within_the_limits():
    within_limits(gradient(SHAPES))


def test_resnet18_stays_within_the_limits():
    net = find("model", "resnet18").make()
    within_limits(gradient({name: tuple(value.shape) for name, value in net.named_parameters()}))


def test_what_is_counted_is_what_is_sent():
    sent, inside = aligned(gradient(SHAPES))
    back = {name: torch.where(where, 2.0, 0.0) for name, where in inside.items()}
    found = communication(sent, inside)
    assert found.up == len(encode(sent, inside=inside))
    assert found.down == len(encode(back, inside=inside))
    assert found.broadcast == len(encode_mask(inside))
    assert found.bytes == found.up + found.down + found.broadcast
    assert found.bits == pytest.approx(64 * found.ratio)
    assert communication(sent, inside, received=sent).down == found.up


def test_a_dense_update_costs_what_it_holds():
    grads = gradient({"w": (1000, 100)})
    found = communication(grads)
    assert (found.entries, found.dense, found.broadcast) == (100_000, 800_000, 0)
    assert found.dense < found.bytes < found.dense + 100


def test_the_papers_accounting_by_hand():
    sent = {"w": torch.tensor([0.0] * 8 + [1.0] * 2)}
    inside = {"w": torch.tensor([False] * 6 + [True] * 4)}
    # 2 * 32 + 8 = 72 bits up, 320 down; inside: 2 * 32 + 2 = 66 up, 128 down, 10 for the positions, in whole bytes
    assert count_as_paper(sent) == Communication(up=9, down=40, broadcast=0, entries=10, dense=80)
    assert count_as_paper(sent, inside) == Communication(up=9, down=16, broadcast=2, entries=10, dense=80)


@pytest.mark.parametrize(
    ("model", "baseline", "dgp", "adgp"),
    [
        ("lenet-zhu", 0.121, 0.074, 0.038),
        ("vgg11-bn", 70.428, 43.137, 22.449),
        ("resnet18", 85.251, 52.216, 27.174),
        ("cnn6", 1.177, 0.721, 0.375),
    ],
)
def test_table_3(model, baseline, dgp, adgp):
    dense = 8 * parameters(find("model", model).make()) / 2**20
    assert dense == pytest.approx(baseline, abs=5e-4)
    assert 0.6125 * dense == pytest.approx(dgp, abs=1e-3)
    assert 0.31875 * dense == pytest.approx(adgp, abs=1e-3)  # the paper cuts the third digit off


def test_soterias_zeros_cost_a_bit_each_in_table_3():
    grads = {name: torch.ones_like(value) for name, value in find("model", "lenet-zhu").make().named_parameters()}
    last = [name for name, value in grads.items() if value.ndim == 2][-1]
    grads[last][:, : int(0.8 * grads[last].shape[1])] = 0
    assert count_as_paper(grads).bytes / 2**20 == pytest.approx(0.098, abs=5e-4)
