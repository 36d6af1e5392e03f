"""The gradients of many features at once, against autograd one by one: our models, and forwards of users' own."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secateur import tree
from secateur.gpu.jacobian import network
from secateur.gpu.jacobian.flows import Flow, Lone, Shared, Thin
from secateur.gpu.jacobian.network import Network, Untraceable, features
from secateur.models.create import create


def lively(net, rng):
    """In float64, with BatchNorms as a trained network has them."""
    for module in net.double().modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.running_mean.normal_(generator=rng)
            module.running_var.uniform_(0.5, 2, generator=rng)
            nn.init.uniform_(module.weight, -1, 2, generator=rng)
    return net


def differences(net, layer, inputs, batchnorm, wanted=4):
    """How far features and their gradients are, relatively, from what autograd finds, for features spread over all."""
    network = Network(net, tree.state_of(net), batchnorm)
    found, back = features(network, layer, inputs)
    leaf = inputs.clone().requires_grad_()
    truth = network.given(layer, leaf)
    rows = torch.linspace(0, truth.shape[1] - 1, wanted).long().unique()
    gradients = back(rows)
    one_by_one = [torch.autograd.grad(truth[:, row].sum(), leaf, retain_graph=True)[0] for row in rows]
    assert gradients.shape == (len(rows), *inputs.shape)
    pairs = (found, truth.detach()), (gradients, torch.stack(one_by_one))
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


def traced(net, layer):
    try:
        network.traced(Network(net, {}, "eval"), layer)
    except Untraceable:
        return False
    return True


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize(
    "model", ["lenet-zhu", "cnn6", "vgg11-bn", "resnet18", "resnet18-pool", "densenet121", "conv-2"]
)
def test_our_models(model, batchnorm, rng):
    net = lively(create(model, (3, 32, 32), 10, rng), rng)
    layer = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)][-1]
    assert traced(net, layer)
    inputs = torch.randn(3, 3, 32, 32, generator=rng, dtype=torch.float64)
    assert max(differences(net, layer, inputs, batchnorm)) < 1e-9


class Own(nn.Module):
    """A small network around a body that a test gives."""

    def __init__(self, body):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=(2, 1)), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.last = nn.LazyLinear(3)
        self.body = [body]  # no module: what it does is traced

    def forward(self, x):
        return self.last(self.body[0](self, x))


def skip_in_place(net, x):
    x = net.norm(net.first(x))
    out = net.second(x)
    out += x
    return net.relu(out).flatten(1)


def two_skips(net, x):
    a = net.relu(net.norm(net.first(x)))
    b = net.second(a) + a
    return (net.second(b) + a + b).mean((2, 3))


def doubled(net, x):
    a = net.first(x)
    return torch.add(a, a).flatten(1)


def functions(net, x):
    a = F.relu(net.norm(net.first(x)), inplace=True)
    return F.softplus(net.pool(a) * net.scale).view(x.size(0), -1)


def joined(net, x):
    a = net.norm(net.first(x))
    return torch.cat([a, net.second(a).sigmoid()], 1).permute(0, 2, 3, 1).reshape(len(a), -1)


def masked(net, x):
    a = net.first(x)
    return torch.where(a > 0, a, a * net.scale).flatten(1)


def halves(net, x):
    one, other = net.first(x).chunk(2, 1)
    return (one * other).flatten(1)


def branches(net, x):
    return net.first(x if x.sum() > 0 else -x).flatten(1)


def evaluated(net, x):
    return net.first(F.dropout(x, 0.5, net.training)).flatten(1)


def with_a_constant(net, x):
    return net.first(x * torch.tensor([1.0, -2.0]).view(2, 1, 1)).flatten(1)


def overwritten(net, x):
    a = net.norm(net.first(x))
    b = 3 * a
    net.relu(a)  # changes a in place, which the next line looks at
    return (a + b).flatten(1)


def through_a_view(net, x):
    a = net.first(x)
    b = a.flatten(1)
    a.mul_(2)
    return b * b


def scalar(net, x):
    a = net.first(x)
    return (a * a.mean()).flatten(1)


def stopped(net, x):
    a = net.first(x)
    with torch.no_grad():  # which no trace shows
        b = net.second(a)
    return (a + b).flatten(1)


BODIES = [skip_in_place, two_skips, doubled, functions, joined, masked]
BODIES += [evaluated, with_a_constant, halves, branches, overwritten, through_a_view, scalar, stopped]


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_forwards_of_users(body, batchnorm, rng):
    net, inputs = Own(body).double(), torch.randn(3, 2, 9, 8, generator=rng, dtype=torch.float64)
    net(inputs.double())
    assert max(differences(lively(net, rng), "last", inputs, batchnorm)) < 1e-9


def test_features_that_the_inputs_do_not_move_have_gradients_of_zero(rng):
    net, inputs = Own(lambda net, x: net.first(x.detach()).flatten(1)).double(), torch.randn(3, 2, 9, 8).double()
    net(inputs)
    _, back = features(Network(net, {}, "eval"), "last", inputs)
    assert not back(torch.arange(2)).any()


def test_a_rows_network_with_batchnorm(rng):
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))
    inputs = torch.randn(7, 6, generator=rng, dtype=torch.float64)
    for batchnorm in ("eval", "batch"):
        assert max(differences(lively(net, rng), "5", inputs, batchnorm)) < 1e-9


def small():
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)).double()


def test_a_trace_is_kept_until_the_network_is_changed(monkeypatch):
    made, net, inputs = [], small(), torch.randn(3, 4, dtype=torch.float64)
    tracing = network._trace
    monkeypatch.setattr(network, "_trace", lambda *given: made.append(given[1]) or tracing(*given))

    def right():
        return max(differences(net, "4", inputs, "eval")) < 1e-12

    assert right() and right() and made == ["4"]
    net[2] = nn.Sigmoid()
    assert right() and made == ["4", "4"]
    net[1].eps = 0.5  # settings are read every time, and so are hooks
    net[3].register_forward_hook(lambda module, given, output: 2 * output)
    assert right() and made == ["4", "4"]
    net.insert(3, nn.ReLU())
    assert max(differences(net, "5", inputs, "batch")) < 1e-12 and made == ["4", "4", "5"]


def test_a_kept_trace_does_not_keep_the_network():
    net = small()
    features(Network(net, {}, "eval"), "4", torch.randn(3, 4, dtype=torch.float64))
    watched = [weakref.ref(net), weakref.ref(net[0]), weakref.ref(net[0].weight)]
    del net
    gc.collect()
    assert [each() for each in watched] == [None] * 3


def test_what_is_sent_counts_also_where_it_is_tied():
    net, other, inputs = small(), small(), torch.randn(3, 4, dtype=torch.float64)
    for each in (net, other):
        each.insert(4, nn.Linear(5, 5).double())
        each[4].weight = each[3].weight
    sent = {name: value.detach().clone() for name, value in other.named_parameters()}
    assert "4.weight" not in sent
    found, _ = features(Network(net, sent, "batch"), "5", inputs)
    assert torch.allclose(found, other[:5](inputs), rtol=1e-12)


def test_a_flow_by_hand():
    # one feature, two examples of one channel: (1 + 3, 2 + 4) times (1, 2) = (4, 12)
    flow = Flow((torch.tensor([[1.0], [2.0]]),)).joined(Flow((torch.tensor([[3.0], [4.0]]),)))
    flow = flow.scaled(torch.tensor([[1.0], [2.0]]))
    assert flow.whole().tolist() == [[4], [12]]
    # less the mean 8, and x (1, -1) times the mean -4 of g x
    assert flow.centred(torch.tensor([[1.0], [-1.0]])).tolist() == [[0], [0]]
    assert flow.joined(flow).whole().tolist() == [[8], [24]]


def test_a_flow_in_one_channel_by_hand():
    # two features of two examples, in the channels 2 and 0 of three; the slopes of these channels are (1, 4) and (3, 5)
    lone = Lone(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), torch.tensor([2, 0]), 3)
    assert lone.whole().tolist() == [[0, 0, 1], [0, 0, 2], [3, 0, 0], [4, 0, 0]]
    flow = Flow((lone,), torch.tensor([[3.0, 9.0, 1.0], [5.0, 9.0, 4.0]]))
    assert flow.lone().values.flatten().tolist() == [1, 8, 9, 20]
    assert flow.lone().whole().equal(flow.whole()) and Flow((torch.ones(4, 3),)).lone() is None
    normal = torch.tensor([[1.0, 0.0, -1.0], [-1.0, 0.0, 1.0]])
    assert flow.centred(normal).whole().equal(Flow((flow.whole(),)).centred(normal))


def test_a_thin_part_comes_last_and_a_shared_one_is_taken_once():
    thin, ones = Thin(torch.ones(1, 1, 1, 2), (2, 3), (2, 2)), torch.ones(1, 1, 2, 3)
    flow = Flow((thin,)).joined(Flow((ones,)))
    assert flow.parts[1] is thin and flow.whole().tolist() == [[[[2, 1, 2], [1, 1, 1]]]]
    shared = Shared(flow)
    assert shared.whole() is shared.whole() and shared.left is None
