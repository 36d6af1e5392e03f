"""Cutting sub-models and mapping them back: cells, shapes, counts, and that a sub-model computes what it should."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call

from secateur import catalogue
from secateur.catalogue import find
from secateur.errors import WrongInput
from secateur.federated.submodels.networks import build_narrow, without_statistics
from secateur.federated.submodels.structure import ClientAndRound, Structure, flat_of, params_of
from secateur.models.create import create
from secateur.models.resnet import Block

CUTS = [name for name in catalogue.methods("submodel") if name not in ("none", "local")]
SHAPE = (1, 8, 8)


def chain(widths, norm, flat):
    """Convolutions, then a flattened or pooled head with a hidden linear layer."""
    layers, before = [], 1
    for width in widths:
        layers += [nn.Conv2d(before, width, 3, padding=1), *([nn.BatchNorm2d(width)] if norm else []), nn.ReLU()]
        before = width
    layers += [nn.Flatten()] if flat else [nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    size = before * (64 if flat else 1)
    return nn.Sequential(*layers, nn.Linear(size, 8), nn.ReLU(), nn.Linear(8, 3))


def residual(width):
    """A stem, a block without and a block with a convolution on the shortcut."""
    stem = [nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    blocks = [Block(width, width, 1), Block(width, 2 * width, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 3))


def drawn(net, seed=0):
    """The network with random numbers in all of its parameters, in float64."""
    rng, net = torch.Generator().manual_seed(seed), without_statistics(net).double()
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=rng, dtype=torch.float64))
    return net


nets = st.one_of(
    st.builds(chain, st.lists(st.integers(4, 9), min_size=1, max_size=3), st.booleans(), st.booleans()),
    st.builds(residual, st.integers(4, 7)),
)
rules = st.sampled_from([(name, {}) for name in CUTS] + [("osm", {"reading": "paper"}), ("mapp-fl-r", {})])


@settings(max_examples=25, deadline=None)
@given(
    net=nets,
    rule=rules,
    rate=st.sampled_from([0.25, 0.5, 0.6, 0.9]),
    client=st.integers(0, 9),
    number=st.integers(1, 99),
)
def test_cut_then_map_back(net, rule, rate, client, number):
    net, (name, fields) = drawn(net), rule
    structure, flat = Structure(net, SHAPE), flat_of(dict(net.named_parameters()))
    cut = structure.cut(find("submodel", name)(**fields), ClientAndRound(client, 10, number), rate)
    small = build_narrow(net, structure, rate, False, SHAPE, 3)
    assert {n: tuple(v.shape) for n, v in small.named_parameters()} == cut.shapes
    assert len(cut.index) == len(set(cut.index.tolist())) == sum(v.numel() for v in small.parameters())

    own, back = flat[cut.index], torch.zeros_like(flat)
    back[cut.index] = own
    assert torch.equal(back[cut.index], own)  # what was cut comes back
    rest = torch.ones(len(flat), dtype=torch.bool)
    rest[cut.index] = False
    assert bool((back[rest] == 0).all())  # and nothing else
    for part, whole in params_of(flat, structure.shapes).items():
        assert torch.equal(cut.take(part, whole), params_of(own, cut.shapes)[part])
        assert torch.equal(cut.put(part, whole, cut.take(part, whole)), whole)

    # A sub-model computes what the server computes when all other channels are silent.
    rows = torch.randn(6, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        wanted = functional_call(net, params_of(back, structure.shapes), (rows,))
        found = functional_call(small, params_of(own, cut.shapes), (rows,))
    assert torch.allclose(found, wanted, atol=1e-9)


@settings(max_examples=15, deadline=None)
@given(net=nets, name=st.sampled_from(["fdropout", "mapp-fl-r", "ufr"]), client=st.integers(0, 9))
def test_independent_inputs_are_drawn_apart_and_no_cell_is_taken_twice(net, name, client):
    structure = Structure(drawn(net), SHAPE)
    cut = structure.cut(find("submodel", name)(coupling="independent"), ClientAndRound(client, 10, 3), 0.5)
    coupled = structure.cut(find("submodel", name)(), ClientAndRound(client, 10, 3), 0.5)
    assert cut.shapes == coupled.shapes and len(set(cut.index.tolist())) == len(cut.index)
    assert {n: rows.tolist() for n, rows in cut.channels.items()} == {
        n: rows.tolist() for n, rows in coupled.channels.items()
    }


@pytest.mark.parametrize("name", ["fdropout", "mapp-fl-r", "ufr"])
def test_independent_inputs_are_not_the_outputs_before_them(name):
    structure = Structure(without_statistics(create("mapp-cnn-16", (3, 32, 32), 10, torch.Generator())), (3, 32, 32))
    cut, coupled = (
        structure.cut(find("submodel", name)(coupling=how), ClientAndRound(1, 10, 3), 0.5)
        for how in ("independent", "layer-wise")
    )
    inputs, outputs = ({int(cell) // 9 % 16 for cell in each.parts["5.weight"]} for each in (cut, coupled))
    assert len(inputs) == len(outputs) == 8 and inputs != outputs  # of the second convolution's 16 input channels


@pytest.mark.parametrize(
    ("classes", "shape", "counts"),
    [
        (10, (3, 32, 32), (25_418, 99_210)),
        (100, (3, 32, 32), (31_268, 110_820)),
        (62, (1, 28, 28), (28_654, 105_630)),
    ],
)
def test_the_papers_parameter_counts(classes, shape, counts):
    net = without_statistics(create("mapp-cnn-16", shape, classes, torch.Generator()))
    structure = Structure(net, shape)
    for rate, count in zip((0.5, 1.0), counts, strict=True):
        small = build_narrow(net, structure, rate, True, shape, classes)
        assert sum(v.numel() for v in small.parameters()) == count
        assert len(structure.cut(find("submodel", "heterofl")(), ClientAndRound(0, 10, 1), rate).index) == count


def test_heterofls_five_widths_at_once():
    structure = Structure(without_statistics(create("mapp-cnn-16", (3, 32, 32), 10, torch.Generator())), (3, 32, 32))
    widths = [structure.widths(rate) for rate in (1, 0.5, 0.25, 0.125, 0.0625)]
    assert widths == [[16, 32, 64, 128], [8, 16, 32, 64], [4, 8, 16, 32], [2, 4, 8, 16], [1, 2, 4, 8]]


def test_slots_of_a_residual_network():
    structure = Structure(without_statistics(residual(4)), SHAPE)
    assert [(slot.name, slot.size, slot.depth) for slot in structure.slots] == [
        *(("0", 4, 0), ("3.conv1", 4, 1), ("4.conv1", 8, 1), ("4.conv2", 8, 2))
    ]
    cut = structure.cut(find("submodel", "mapp-fl")(), ClientAndRound(4, 10, 1), 0.5)
    assert torch.equal(cut.channels["3.conv2"], cut.channels["0"])  # joined by a shortcut
    assert torch.equal(cut.channels["4.shortcut.0"], cut.channels["4.conv2"])


def test_mapp_fl_covers_all_of_a_residual_network_but_half_of_its_shortcuts_convolutions():
    net = without_statistics(residual(4))
    structure = Structure(net, SHAPE)
    cuts = [structure.cut(find("submodel", "mapp-fl")(), ClientAndRound(client, 10, 1), 0.5) for client in range(10)]
    for name, size in structure.sizes.items():
        share = len({int(cell) for cut in cuts for cell in cut.parts[name].tolist()}) / size
        assert share == (0.5 if name == "4.shortcut.0.weight" else 1.0), name


@pytest.mark.parametrize("name", ["conv-2", "vgg-4", "resnet18-w16", "densenet121"])
def test_the_projects_networks_can_be_cut(name):
    shape = (1, 28, 28) if name == "conv-2" else (3, 32, 32)
    net = without_statistics(create(name, shape, 10, torch.Generator()))
    structure = Structure(net, shape)
    cut = structure.cut(find("submodel", "fdropout")(), ClientAndRound(0, 10, 1), 0.5)
    small = build_narrow(net, structure, 0.5, True, shape, 10)
    assert {n: tuple(v.shape) for n, v in small.named_parameters()} == cut.shapes


def test_the_scaler_divides_what_hidden_layers_give():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    small = build_narrow(net, Structure(net, (2,)), 0.5, True, (2,), 2)
    with torch.no_grad():
        for value in small.parameters():
            value.fill_(1.0)
        assert small(torch.tensor([[1.0, 2.0]])).tolist() == [[17.0, 17.0]]  # (4 / .5) * 2 + 1
        plain = build_narrow(net, Structure(net, (2,)), 0.5, False, (2,), 2)
        for value in plain.parameters():
            value.fill_(1.0)
        assert plain(torch.tensor([[1.0, 2.0]])).tolist() == [[9.0, 9.0]]


class Grouped(nn.Module):
    """A network with a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.depthwise = nn.Conv2d(4, 4, 3, groups=4)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x):
        """Through all of it."""
        return self.head(self.depthwise(self.stem(x)))


class Reading(nn.Module):
    """A network that reads a picture's rows one after another."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.recurrent = nn.LSTM(8, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        """The head reads the last state."""
        return self.head(self.recurrent(self.stem(x)[:, 0])[0][:, -1])


def test_where_a_function_stops_the_cut_the_layer_before_it_is_named():
    with pytest.raises(WrongInput, match=r"sub-models: getitem after Conv2d \(stem\) is not known"):
        Structure(Reading(), SHAPE)


def test_what_cannot_be_cut_is_refused_with_the_layers_name():
    with pytest.raises(WrongInput, match=r"cannot be cut to sub-models: depthwise is a depthwise convolution"):
        Structure(Grouped(), SHAPE)
    frozen = chain([4], False, False)
    frozen[0].weight.requires_grad_(False)
    with pytest.raises(WrongInput, match=r"0\.weight is frozen"):
        Structure(frozen, SHAPE)
    single = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    with pytest.raises(WrongInput, match="no layer between"):
        Structure(single, SHAPE).check(find("submodel", "heterofl")(), [0.5])


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_layers_that_share_a_tensor_are_refused_by_name(part):
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3))
    setattr(tied[4], part, getattr(tied[2], part))
    with pytest.raises(WrongInput, match=rf"cannot be cut to sub-models: 4\.{part} is another layer's too"):
        Structure(tied, SHAPE)


def test_norms_without_weights_follow_their_layers():
    made = [nn.Conv2d(1, 8, 3, bias=False), nn.BatchNorm2d(8, affine=False), nn.ReLU(), nn.AdaptiveAvgPool2d(1)]
    net = drawn(nn.Sequential(*made, nn.Flatten(), nn.Linear(8, 3)))
    structure = Structure(net, SHAPE)
    cut = structure.cut(find("submodel", "heterofl")(), ClientAndRound(0, 1, 1), 0.25)
    small = build_narrow(net, structure, 0.25, False, SHAPE, 3)
    assert cut.channels["1"].tolist() == [0, 1] and small[1].num_features == 2
    inputs = torch.randn(5, *SHAPE, dtype=torch.float64)
    found = functional_call(small, params_of(flat_of(dict(net.named_parameters()))[cut.index], cut.shapes), (inputs,))
    hidden = net[:5](inputs)[:, :2]  # without scaling a channel of a small model is that of the server's
    assert torch.allclose(found, hidden @ net[5].weight[:, :2].T + net[5].bias)


def test_widths_and_groups_that_do_not_fit_are_refused():
    structure = Structure(chain([8, 16], False, False), SHAPE)
    with pytest.raises(WrongInput, match="leaves the layer 0 without channels; use at least 1/8"):
        structure.check(find("submodel", "heterofl")(), [1.0, 0.1])
    with pytest.raises(WrongInput, match="16 are more than the 8 channels of the layer 0"):
        structure.check(find("submodel", "mapp-fl")(groups=16), [0.5])
    with pytest.raises(WrongInput, match=r"must be in \(0, 1\]"):
        structure.widths(1.5)


def test_a_rule_is_asked_once_for_a_client_and_round_and_never_for_the_whole_model(monkeypatch):
    structure, asked = (
        Structure(without_statistics(create("mapp-cnn-8", (1, 8, 8), 3, torch.Generator())), (1, 8, 8)),
        [],
    )
    rule = find("submodel", "fdropout")()
    call = type(rule).__call__
    monkeypatch.setattr(type(rule), "__call__", lambda self, at: asked.append(at) or call(self, at))
    first = structure.cut(rule, ClientAndRound(3, 10, 7), 0.5)
    count = len(asked)
    assert count == len(structure.slots) and structure.cut(rule, ClientAndRound(3, 10, 7), 0.5) is first
    whole = structure.cut(rule, ClientAndRound(0, 10, 1), 1.0)
    assert whole is structure.cut(find("submodel", "heterofl")(), ClientAndRound(5, 10, 2), 1.0) and len(asked) == count
    assert whole.index.tolist() == list(range(sum(structure.sizes.values())))
    assert structure.cut(rule, ClientAndRound(3, 10, 8), 0.5).index.tolist() != first.index.tolist()


def test_cuts_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr("secateur.federated.submodels.structure.REMEMBERED", 5)
    structure = Structure(without_statistics(create("mapp-cnn-8", (1, 8, 8), 3, torch.Generator())), (1, 8, 8))
    rule = find("submodel", "fdropout")()
    first = structure.cut(rule, ClientAndRound(0, 10, 1), 0.5)
    for number in range(2, 30):
        structure.cut(rule, ClientAndRound(0, 10, number), 0.5)
    assert len(structure._asked) == len(structure._cuts) == 5
    assert torch.equal(structure.cut(rule, ClientAndRound(0, 10, 1), 0.5).index, first.index)
