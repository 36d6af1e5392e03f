from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pruning_nets import Dense, PreActivation, Residual, made
from torch import nn

from secateur.errors import WrongInput
from secateur.pruning.channels import Norm, analyse

IMAGE = (3, 6, 6)


def groups_of(channels, atoms):
    return channels.group[atoms].tolist()


def test_a_shortcut_joins_the_layers_that_it_adds():
    channels = analyse(made(Residual), IMAGE)
    assert groups_of(channels, channels.makes["stem"]) == groups_of(channels, channels.makes["conv2"])
    assert groups_of(channels, channels.reads["head"]) == groups_of(channels, channels.makes["stem"])
    assert groups_of(channels, channels.reads["conv2"]) == groups_of(channels, channels.makes["conv1"])
    assert len(set(groups_of(channels, channels.makes["conv1"]) + groups_of(channels, channels.makes["stem"]))) == 18


def test_a_concatenation_puts_channels_side_by_side():
    channels = analyse(made(Dense), IMAGE)
    parts = [groups_of(channels, channels.makes[name]) for name in ("stem", "conv1", "conv2")]
    assert groups_of(channels, channels.norms["norm2"].reads) == [*parts[0], *parts[1], *parts[2]]
    assert groups_of(channels, channels.reads["conv2"]) == parts[0] + parts[1]
    # conv1 reads the stem behind its BatchNorm, norm1 reads conv1 itself
    assert channels.norms["norm1"].reads[6:].tolist() == channels.makes["conv1"].tolist()


def test_a_value_may_be_concatenated_with_or_added_to_itself():
    twice = analyse(Functional(lambda x: torch.cat([x, x], 1), nn.BatchNorm2d(4)), (4, 6, 6))
    assert twice.fixed[twice.norms["layer"].gives].all()
    channels = analyse(nn.Sequential(Functional(lambda x: torch.cat([x + x, x], 1)), nn.Conv2d(8, 2, 1)), (4, 6, 6))
    assert groups_of(channels, channels.reads["1"]) == groups_of(channels, channels.makes["0.conv"]) * 2


def test_flattening_repeats_a_channel_for_each_of_its_places():
    channels = analyse(made(PreActivation), IMAGE)
    wanted = [group for group in groups_of(channels, channels.makes["after"]) for _ in range(4)]
    assert groups_of(channels, channels.reads["head"]) == wanted


def test_inputs_and_outputs_stay_and_raw_readers_are_known():
    channels = analyse(made(Residual), IMAGE)
    assert channels.fixed[channels.reads["stem"]].all() and channels.fixed[channels.makes["head"]].all()
    assert channels.fixed.sum() == 3 + 4
    assert not channels.raw[channels.makes["stem"]].any()  # only norm0 reads it
    assert channels.raw[channels.norms["norm0"].gives].all()


def test_spread_passes_a_sum_only_where_both_sides_are_dead():
    channels = analyse(made(PreActivation), IMAGE)
    dead = torch.zeros(len(channels.group), dtype=torch.bool)
    dead[channels.makes["left"][:2]] = True
    dead[channels.makes["right"][1:3]] = True
    (norm,) = [step for step in channels.steps if isinstance(step, Norm)]
    assert channels.spread(dead)[norm.gives].tolist() == [False, True, False, False]


class Functional(nn.Module):
    def __init__(self, operation, layer=None):
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 1)
        self.operation, self.layer = operation, layer

    def forward(self, x):
        return self.operation(self.conv(x) if self.layer is None else self.layer(self.conv(x)))


@pytest.mark.parametrize(
    "operation",
    [
        *(F.relu, F.gelu, torch.tanh, lambda x: F.dropout(x, 0.5), lambda x: x * 2, lambda x: 2 * x / 3),
        *(lambda x: F.max_pool2d(x, 2), lambda x: F.avg_pool2d(x, 2), lambda x: F.adaptive_avg_pool2d(x, 1)),
        *(lambda x: x.mean((2, 3)), lambda x: x.mean(dim=[-1, -2]), lambda x: torch.mean(x, (2, 3), keepdim=True)),
        *(lambda x: x.flatten(2), lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)),
        *(lambda x: x.view(x.shape[0], 4, -1), lambda x: F.adaptive_avg_pool2d(x, 1).reshape(x.shape[0], -1)),
    ],
)
def test_what_passes_a_channel_on(operation):
    channels = analyse(Functional(operation), (4, 6, 6))
    assert channels.fixed[channels.makes["conv"]].all()


class Sliced(nn.Module):
    def forward(self, x):
        return x[:, :2]


@pytest.mark.parametrize(
    ("net", "named"),
    [
        (Functional(torch.softmax, nn.Identity()), "traced"),
        (Functional(lambda x: torch.softmax(x, 1)), "softmax"),
        (Functional(lambda x: x * x.mean((2, 3), keepdim=True)), "mul"),
        (Functional(lambda x: x + 1), "add"),
        (Functional(lambda x: x + x.size(0)), "add"),
        (Functional(lambda x: x.mean((2, 3)).flatten(1) + x.mean(2).mean(2, keepdim=True)), "add"),
        (Functional(lambda x: x + x[:, :1]), r"getitem after Conv2d \(conv\) is not known"),
        (Functional(lambda x: F.relu(x).mean((2, 3))[:, 0], nn.Tanh()), r"getitem after Tanh \(layer\) is not known"),
        (Functional(lambda x: x.reshape(-1, 36)), r"reshape after Conv2d \(conv\) mixes"),
        (nn.Sequential(Sliced(), nn.Conv2d(2, 4, 1)), "getitem before any layer is not known"),
        (Functional(lambda x: torch.cat([x, x], 2)), "cat"),
        (Functional(lambda x: x.mean(1)), "mean"),
        (Functional(lambda x: x.mean()), "mean"),
        (Functional(lambda x: x.chunk(2, 1)[0]), "chunk"),
        (Functional(lambda x: x, nn.Conv2d(4, 4, 3, groups=2)), r"Conv2d \(layer\) is a grouped .* torch-pruning"),
        (Functional(lambda x: x, nn.Conv2d(4, 8, 3, groups=4)), r"Conv2d \(layer\) is a grouped .* torch-pruning"),
        (Functional(lambda x: x, nn.GroupNorm(2, 4)), r"GroupNorm \(layer\)"),
        (Functional(lambda x: x, nn.Linear(6, 6)), r"Linear \(layer\) reads more than rows"),
        (Functional(lambda x: x if x.sum() > 0 else -x), "traced"),
        (nn.Sequential(*[nn.Conv2d(4, 4, 1)] * 2), r"Conv2d \(0\) is called more than once"),
        (nn.Conv2d(5, 4, 1), "traced"),
    ],
)
def test_what_it_cannot_follow_is_wrong_input_that_names_the_operation(net, named):
    with pytest.raises(WrongInput, match=f"model: .*{named}"):
        analyse(net, (4, 6, 6))


def test_a_subclass_of_a_known_layer_is_known():
    class Mine(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x)

    assert list(analyse(nn.Sequential(nn.Conv2d(4, 4, 1), Mine(4)), (4, 6, 6)).norms) == ["1"]


def test_the_net_is_left_as_it_was():
    net = made(Residual).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    analyse(net, IMAGE)
    assert net.training and all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_a_depthwise_filter_is_in_the_group_of_the_channel_that_it_reads():
    net = nn.Sequential(nn.Conv2d(4, 6, 1), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 2, 1))
    channels = analyse(net, (4, 6, 6))
    expanded, filtered = channels.makes["0"], channels.makes["1"]
    assert torch.equal(channels.group[expanded], channels.group[filtered])
    assert not set(channels.group[expanded].tolist()) & set(channels.group[channels.makes["2"]].tolist())
    dead = torch.zeros(len(channels.group), dtype=torch.bool)
    dead[expanded[2]] = True
    assert channels.spread(dead)[filtered].tolist() == [False, False, True, False, False, False]
