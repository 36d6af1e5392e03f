from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pruning_nets import Dense, PreActivation, Residual, made, rows_of
from torch import nn

from secateur.errors import WrongInput
from secateur.pruning.filters import L1Structured, L2Structured

IMAGES = rows_of((3, 6, 6))


def dropped(mask, name):
    """The rows that a mask drops whole; every row must be dropped or kept whole."""
    if name not in mask:
        return []
    flat = mask[name].flatten(1) if mask[name].dim() > 1 else mask[name][:, None]
    assert torch.equal(flat.any(1), flat.all(1))
    return (~flat.any(1)).nonzero().flatten().tolist()


def with_weights(*filters):
    conv = nn.Conv2d(1, len(filters), (1, 2))
    conv.weight.data.copy_(torch.tensor(filters)[:, None, None])
    return nn.Sequential(conv)


def test_l1_and_l2_choose_by_their_own_norm(rng):
    # L1 norms 6, 5, 7 and L2 norms sqrt(18), 5, 5
    net = with_weights([3.0, 3.0], [5.0, 0.0], [4.0, 3.0])
    batch = rows_of((1, 4, 4))
    assert dropped(L1Structured()(net, batch, 0.34, rng), "0.weight") == [1]
    assert dropped(L2Structured()(net, batch, 0.34, rng), "0.weight") == [0]


def test_a_full_mask_covers_the_filter_its_bias_and_the_norm_that_reads_it(rng):
    mask = L1Structured()(made(Residual), IMAGES, 0.5, rng)
    for conv, norm, count in (("stem", "norm0", 3), ("conv1", "norm1", 6), ("conv2", "norm2", 3)):
        rows = dropped(mask, f"{conv}.weight")
        assert len(rows) == count
        for name in (f"{conv}.bias", f"{norm}.weight", f"{norm}.bias"):
            assert dropped(mask, name) == rows
    assert not any(name.startswith("head") for name in mask)


def test_in_a_concatenation_every_later_norm_that_reads_the_channel_is_covered(rng):
    mask = L1Structured()(made(Dense), IMAGES, 0.5, rng)
    stem, conv1, conv2 = (dropped(mask, f"{name}.weight") for name in ("stem", "conv1", "conv2"))
    assert dropped(mask, "norm0.weight") == stem
    assert dropped(mask, "norm1.bias") == [*stem, *(6 + row for row in conv1)]
    assert dropped(mask, "norm2.weight") == [*stem, *(6 + row for row in conv1), *(10 + row for row in conv2)]


def test_a_norm_that_reads_a_sum_is_covered_only_where_both_sides_are_dropped(rng):
    mask = L1Structured()(made(PreActivation), IMAGES, 0.5, rng)
    both = set(dropped(mask, "left.weight")) & set(dropped(mask, "right.weight"))
    assert set(dropped(mask, "norm.weight")) == both


def test_conv_only_covers_the_weight_alone_and_needs_no_graph(rng):
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x):
            return self.conv(x) if x.sum() > 0 else self.conv(-x)

    net = made(Branching)
    mask = L1Structured(mask="conv-only")(net, IMAGES, 0.5, rng)
    assert list(mask) == ["conv.weight"] and len(dropped(mask, "conv.weight")) == 2
    with pytest.raises(WrongInput, match="model: its forward cannot be traced"):
        L1Structured()(net, IMAGES, 0.5, rng)


@pytest.mark.parametrize("order", [1, 2])
def test_coupled_chooses_the_channels_of_a_shortcut_by_their_joint_norm(order, rng):
    net = made(Residual)
    mask = (L1Structured, L2Structured)[order - 1](groups="coupled")(net, IMAGES, 0.5, rng)
    joint = torch.cat([net.stem.weight.flatten(1), net.conv2.weight.flatten(1)], 1).norm(order, dim=1)
    weakest = sorted(joint.argsort()[:3].tolist())
    for name in ("stem.weight", "stem.bias", "norm0.weight", "conv2.weight", "norm2.bias"):
        assert dropped(mask, name) == weakest
    own = sorted(net.conv1.weight.flatten(1).norm(order, dim=1).argsort()[:6].tolist())
    assert dropped(mask, "conv1.weight") == own


def test_coupled_conv_only_drops_the_same_filters(rng):
    net = made(Residual)
    full, conv = (L1Structured(groups="coupled", mask=form)(net, IMAGES, 0.5, rng) for form in ("full", "conv-only"))
    assert set(conv) == {"stem.weight", "conv1.weight", "conv2.weight"}
    assert all(torch.equal(full[name], conv[name]) for name in conv)


def test_channels_tied_to_an_input_are_never_chosen_in_coupled_groups(rng):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return (x + self.conv(x)).mean((2, 3))

    with pytest.raises(WrongInput, match="groups: coupled leaves nothing to prune"):
        L1Structured(groups="coupled")(Tied(), IMAGES, 0.5, rng)


def test_global_scope_meets_a_stated_floor(rng):
    net = made(Residual)
    net.stem.weight.data.mul_(1e-6)
    with pytest.warns(UserWarning, match="would have emptied stem"):
        mask = L1Structured(scope="global")(net, IMAGES, 0.5, rng)
    counts = [len(dropped(mask, f"{name}.weight")) for name in ("stem", "conv1", "conv2")]
    assert counts[0] == 5 and sum(counts) == 12


def test_on_an_mlp_filters_are_the_rows_of_every_layer_but_the_last(rng):
    net = made(lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.Linear(6, 2)))
    mask = L1Structured()(net, rows_of((5,)), 0.5, rng)
    assert {name: len(dropped(mask, name)) for name in mask} == {
        **{"0.weight": 4, "0.bias": 4, "1.weight": 4, "1.bias": 4},
        **{"3.weight": 3, "3.bias": 3},
    }
    with pytest.raises(WrongInput, match="no filters to prune"):
        L1Structured()(nn.Linear(5, 2), rows_of((5,)), 0.5, rng)


@pytest.mark.parametrize("wrong", [{"groups": "conv"}, {"mask": "fulll"}, {"scope": "layers"}])
def test_unknown_choices_are_wrong_input(wrong, rng):
    (field,) = wrong
    with pytest.raises(WrongInput, match=f"{field}: .* is not known"):
        L1Structured(**wrong)(made(Residual), IMAGES, 0.5, rng)


@given(st.integers(1, 12), st.integers(1, 12), st.floats(0, 1, exclude_max=True), st.sampled_from(["l1", "l2"]))
def test_exactly_int_s_times_out_filters_go_in_every_layer(first, second, sparsity, norm):
    net = made(lambda: nn.Sequential(nn.Conv2d(1, first, 1), nn.ReLU(), nn.Conv2d(first, second, 1, bias=False)))
    pruner = {"l1": L1Structured, "l2": L2Structured}[norm]()
    mask = pruner(net, rows_of((1, 2, 2)), sparsity, torch.Generator())
    for name, out in (("0.weight", first), ("2.weight", second)):
        assert len(dropped(mask, name)) == int(sparsity * out)
