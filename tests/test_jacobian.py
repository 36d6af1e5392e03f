"""The gradients of many features at once, against autograd one by one: our models, and forwards of users' own."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secateur import tree
from secateur.attacks.inversion.problem import structure
from secateur.jacobian import walk
from secateur.jacobian.flows import Flow
from secateur.jacobian.walk import Walk, features, given
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
    net = structure(net, batchnorm)
    own = {name for name, _ in [*net.named_parameters(), *net.named_buffers()]}
    tensors = {name: value for name, value in tree.state_of(net).items() if name in own}
    found, back = features(net, tensors, layer, inputs)
    leaf = inputs.clone().requires_grad_()
    truth = given(net, tensors, layer, leaf)
    rows = torch.linspace(0, truth.shape[1] - 1, wanted).long().unique()
    gradients = back(torch.eye(truth.shape[1], dtype=truth.dtype)[rows, None].expand(-1, *truth.shape))
    one_by_one = [torch.autograd.grad(truth[:, row].sum(), leaf, retain_graph=True)[0] for row in rows]
    assert gradients.shape == (len(rows), *inputs.shape)
    pairs = (found, truth.detach()), (gradients, torch.stack(one_by_one))
    return [float((one - other).norm() / other.norm()) for one, other in pairs]


def traced(net, layer):
    try:
        Walk(net, layer).trace()
    except walk.Untraceable:
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


BODIES = [skip_in_place, two_skips, doubled, functions, joined, masked]
BODIES += [halves, branches, overwritten, through_a_view, scalar]


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_forwards_of_users(body, batchnorm, rng):
    net, inputs = Own(body).double(), torch.randn(3, 2, 9, 8, generator=rng, dtype=torch.float64)
    net(inputs.double())
    assert max(differences(lively(net, rng), "last", inputs, batchnorm)) < 1e-9


def test_features_that_the_inputs_do_not_move_have_gradients_of_zero(rng):
    net, inputs = Own(lambda net, x: net.first(x.detach()).flatten(1)).double(), torch.randn(3, 2, 9, 8).double()
    net(inputs)
    _, back = features(structure(net, "eval"), tree.state_of(net), "last", inputs)
    assert not back(torch.ones(2, 3, net.last.in_features).double()).any()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 1e-2), (torch.float16, 1e-3)])
def test_gradients_are_carried_in_the_type_that_they_are_given_in(dtype, bound, rng):
    net, inputs = create("resnet18-w16", (3, 32, 32), 10, rng), torch.randn(4, 3, 32, 32, generator=rng)
    for batchnorm in ("eval", "batch"):
        copied = structure(net, batchnorm)
        found, back = features(copied, {}, "13", inputs)
        seeds = torch.eye(found.shape[1])[::9, None].expand(-1, *found.shape)
        exact, rounded = back(seeds), back(seeds.to(dtype))
        assert rounded.dtype == dtype
        exact, rounded = (slopes.float().flatten(2).norm(dim=2) for slopes in (exact, rounded))
        assert float(((exact - rounded).abs() / exact.clamp_min(1e-9)).max()) < bound


def test_a_rows_network_with_batchnorm(rng):
    net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.GELU(), nn.Linear(4, 2))
    inputs = torch.randn(7, 6, generator=rng, dtype=torch.float64)
    for batchnorm in ("eval", "batch"):
        assert max(differences(lively(net, rng), "5", inputs, batchnorm)) < 1e-9


def test_a_flow_by_hand():
    # one feature, two examples of one channel: (1 + 3, 2 + 4) times (1, 2) = (4, 12)
    flow = Flow((torch.tensor([[1.0], [2.0]]),)).joined(Flow((torch.tensor([[3.0], [4.0]]),)))
    flow = flow.scaled(torch.tensor([[1.0], [2.0]]))
    assert flow.whole().tolist() == [[4], [12]]
    # less the mean 8, and x (1, -1) times the mean -4 of g x
    assert flow.centred(torch.tensor([[1.0], [-1.0]])).tolist() == [[0], [0]]
    assert flow.joined(flow).whole().tolist() == [[8], [24]]
