"""Soteria's scores by hand and against one backward per feature."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secateur import tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.defenses import soteria
from secateur.defenses.soteria import Soteria, by_vmap, features, find_layer, one_by_one, scores
from secateur.errors import WrongInput
from secateur.interfaces import Batch, UploadContext
from secateur.models.create import create

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


def turning_of(net, batch, batchnorm="eval"):
    return UploadContext(net, tree.state_of(net), batch, 0, torch.Generator().manual_seed(0), batchnorm=batchnorm)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(96, 12), nn.ReLU(), nn.Dropout(0.5), nn.Linear(12, 5),
    ).double()  # fmt: skip


@pytest.fixture
def batch(rng):
    return Batch(torch.randn(4, 3, 8, 8, generator=rng, dtype=torch.float64), torch.tensor([0, 1, 2, 4]))


def one_backward_per_feature(net, layer, inputs):
    """The authors' way: for every feature, the gradient of its sum over the batch with respect to the inputs."""
    seen = []
    hook = net.get_submodule(layer).register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    inputs = inputs.clone().requires_grad_()
    net(inputs)
    hook.remove()
    found = []
    for feature in range(seen[0].shape[1]):
        target = torch.zeros_like(seen[0])
        target[:, feature] = 1
        (given,) = torch.autograd.grad(seen[0], inputs, target, retain_graph=True)
        norms = given.flatten(1).norm(dim=1)
        found.append((norms / (seen[0][:, feature].abs() + 1e-10)).sum())
    return torch.stack(found).detach()


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("layer", ["5", "8"])
def test_many_features_at_once_equal_one_backward_each(batch, layer, batchnorm, monkeypatch):
    net, reference = convolutional(), convolutional()  # the client is sent the reference's weights
    nn.init.uniform_(reference[1].running_var, 0.5, 2)
    turning = replace(turning_of(net, batch, batchnorm), sent=tree.state_of(reference))
    reference.eval()
    reference[1].train(batchnorm == "batch")
    expected = one_backward_per_feature(reference, layer, batch.inputs)
    for at_once in (256, 20):  # in one part, and in parts of five features
        monkeypatch.setitem(soteria.AT_ONCE, "cpu", at_once)
        assert torch.allclose(scores(turning, layer), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
def test_scores_of_a_residual_network_equal_one_backward_each(batchnorm, rng):
    net = create("resnet18-w16", (3, 8, 8), 10, rng).double()
    net[-1] = nn.Linear(12, 10).double()
    net[-2] = nn.Sequential(nn.Flatten(), nn.Linear(128, 12)).double()  # few features, so that it is fast
    inputs = torch.randn(3, 3, 8, 8, generator=rng, dtype=torch.float64)
    found = scores(turning_of(net, Batch(inputs, torch.tensor([0, 1, 2])), batchnorm), "13")
    net.eval()
    for module in net.modules():
        module.train(batchnorm == "batch" and isinstance(module, nn.BatchNorm2d))
    assert torch.allclose(found, one_backward_per_feature(net, "13", inputs), rtol=1e-9)


@needs_cuda
@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("model", ["lenet-zhu", "cnn6", "vgg11-bn", "resnet18"])
def test_a_gpu_finds_what_a_cpu_finds_in_float64(model, batchnorm, rng):
    net = create(model, (3, 32, 32), 10, rng)
    net[-1] = nn.Sequential(nn.Linear(net[-1].in_features, 6), nn.Linear(6, 10))  # few features, so that it is fast
    for value in net[-1].parameters():
        nn.init.normal_(value, generator=rng)
    layer = find_layer(net, None)
    batch = Batch(torch.randn(2, 3, 32, 32, generator=rng), torch.tensor([0, 1]))
    exact = scores(
        turning_of(copy.deepcopy(net).double(), batch._replace(inputs=batch.inputs.double()), batchnorm), layer
    )
    found = scores(turning_of(net.cuda(), batch.to("cuda"), batchnorm), layer).cpu()
    # TF32 cuts a factor by up to 2^-10, and each layer on the way back multiplies two of them
    depth = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in net.modules()) - 1
    assert float(((found - exact) / exact).abs().max()) < depth * 2**-9
    fine = turning_of(net.double(), batch._replace(inputs=batch.inputs.double()).to("cuda"), batchnorm)
    assert torch.allclose(scores(fine, layer).cpu(), exact, rtol=1e-9)


def test_the_score_by_hand():
    # r = W x with W = ((3, 4), (0, 1)): ||d r / d x|| are 5 and 1; at x = (1, 1) r = (7, 1), at (1, 2) r = (11, 2)
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 3)).double()
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[3.0, 4.0], [0.0, 1.0]]))
    batch = Batch(torch.tensor([[1.0, 1.0], [1.0, 2.0]], dtype=torch.float64), torch.tensor([0, 1]))
    found = scores(turning_of(net, batch), "1")
    assert torch.allclose(found, torch.tensor([5 / 7 + 5 / 11, 1 + 1 / 2], dtype=torch.float64))
    sent, _ = Soteria(rate=0.5)(
        {"1.weight": torch.ones(3, 2), "0.weight": torch.ones(2, 2)}, {}, turning_of(net, batch)
    )
    assert sent["1.weight"].tolist() == [[0, 1]] * 3 and sent["0.weight"].tolist() == [[1, 1]] * 2


def test_only_the_columns_of_the_last_layer_with_the_smallest_scores_become_zero(batch):
    net = convolutional()
    turning = turning_of(net, batch)
    grads = gradient_update(net, turning.sent, batch).values
    sent, state = Soteria()(grads, {}, turning)
    lowest = scores(turning, "8").argsort(stable=True)[:9]  # int(.8 * 12)
    assert not sent["8.weight"][:, lowest].any()
    others = [column for column in range(12) if column not in lowest.tolist()]
    assert torch.equal(sent["8.weight"][:, others], grads["8.weight"][:, others])
    assert all(torch.equal(sent[name], value) for name, value in grads.items() if name != "8.weight") and state == {}


def test_a_feature_that_is_dead_is_among_the_first_to_go(batch):
    net = convolutional()
    with torch.no_grad():
        net[5].bias[3] = -1e3
    assert float(scores(turning_of(net, batch), "8")[3]) == 0


def test_an_untrained_network_with_many_dead_features_has_finite_scores(rng):
    net = create("vgg11-bn", (3, 32, 32), 10, rng)
    turning = turning_of(net, Batch(torch.randn(1, 3, 32, 32, generator=rng), torch.tensor([0])))
    dead = (net.eval()[:-1](turning.batch.inputs) == 0).all(0)
    found = scores(turning, find_layer(net, None))
    assert 50 < int(dead.sum()) < 512 and bool(found.isfinite().all())
    assert torch.equal(found == 0, dead)


def test_the_layer_can_be_chosen_and_the_last_is_taken_else():
    net = convolutional()
    assert find_layer(net, None) == "8" and find_layer(net, "5") == "5"
    with pytest.raises(WrongInput, match="layer: '6' is not known"):
        find_layer(net, "6")
    with pytest.raises(WrongInput, match="no fully connected layer"):
        find_layer(nn.Sequential(nn.Conv2d(1, 2, 3)), None)


def test_the_model_and_its_statistics_stay_as_they_are(batch):
    net = convolutional()
    before = tree.state_of(net)
    scores(turning_of(net, batch, "batch"), "8")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert not net[8]._forward_pre_hooks and net.training


def test_a_network_that_is_one_layer(batch):
    net = nn.Linear(8, 5)
    flat = Batch(torch.ones(2, 8), torch.tensor([0, 1]))
    sent, _ = Soteria(rate=0.5)(tree.params_of(net), {}, turning_of(net, flat))
    assert (sent["weight"] == 0).all(0).sum() == 4


def test_features_that_are_no_rows_are_refused():
    net = nn.Sequential(nn.Linear(4, 3))
    wide = Batch(torch.ones(2, 6, 4), torch.tensor([0, 1]))
    with pytest.raises(WrongInput, match=r"needs \(batch, features\)"):
        scores(turning_of(net, wide), "0")


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_wrong_rates_are_refused(rate):
    with pytest.raises(WrongInput, match=r"rate: .* is not allowed"):
        Soteria(rate)


class Own(nn.Module):
    """A small network around a body that a test gives."""

    def __init__(self, body):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, stride=2, padding=(2, 1)), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3, padding=1, groups=2)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.relu, self.pool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.last = nn.LazyLinear(3)
        self.body = [body]  # no module

    def forward(self, x):
        return self.last(self.body[0](self, x))


def skip_in_place(net, x):
    x = net.norm(net.first(x))
    out = net.second(x)
    out += x
    return net.relu(out).flatten(1)


def shared_modules(net, x):
    a = net.relu(net.norm(net.first(x)))
    b = net.second(a) + a
    return (net.second(b) + a + b).mean((2, 3))


def functions(net, x):
    a = F.relu(net.norm(net.first(x)), inplace=True)
    return F.softplus(net.pool(a) * net.scale).view(x.size(0), -1)


def input_in_place(net, x):
    return net.first(x.mul_(2)).flatten(1)


def branches(net, x):
    return net.first(x if x.sum() > 0 else -x).flatten(1)


def dropout(net, x):
    return net.first(F.dropout(x, 0.5, net.training)).flatten(1)


def through_a_view(net, x):
    a = net.first(x)
    b = a.flatten(1)
    a.mul_(2)
    return b * b


def stopped(net, x):
    a = net.first(x)
    with torch.no_grad():
        b = net.second(a)
    return (a + b).flatten(1)


def called_twice(net, x):
    a = net.first(x).flatten(1)
    net.last(a)
    return a * a


class Unmapped(torch.autograd.Function):
    """The square, in a form that torch.func refuses."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * ctx.saved_tensors[0] * gradient


def unmapped(net, x):
    return Unmapped.apply(net.first(x)).flatten(1)


def own_turning(body, rng, batchnorm="eval"):
    net, inputs = Own(body).double(), torch.randn(3, 2, 9, 8, generator=rng, dtype=torch.float64)
    net(inputs.clone())
    net.norm.running_var.uniform_(0.5, 2, generator=rng)
    return turning_of(net, Batch(inputs, torch.tensor([0, 1, 2])), batchnorm)


BODIES = [skip_in_place, shared_modules, functions, input_in_place, branches, dropout, through_a_view, stopped]
BODIES += [called_twice, unmapped]


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_forwards_of_users(body, batchnorm, rng):
    turning = own_turning(body, rng, batchnorm)
    before, inputs = tree.state_of(turning.net), turning.batch.inputs.clone()
    found = scores(turning, "last")
    assert torch.equal(turning.batch.inputs, inputs)
    assert all(torch.equal(value, before[name]) for name, value in turning.net.state_dict().items())
    leaf = inputs.requires_grad_()
    values = features(turning, "last", leaf)
    expected = []
    for feature in values.unbind(1):
        (slope,) = torch.autograd.grad(feature.sum(), leaf, retain_graph=True)
        expected.append((slope.flatten(1).norm(dim=1) / (feature.abs() + 1e-10)).sum())
    assert torch.allclose(found, torch.stack(expected).detach(), rtol=1e-9)


@pytest.mark.parametrize("body", [skip_in_place, functions, stopped, dropout])
def test_one_pass_per_feature_finds_what_vmap_finds(body, rng):
    turning = own_turning(body, rng)
    inputs = turning.batch.inputs
    pairs = [way(lambda x: features(turning, "last", x), inputs) for way in (by_vmap, one_by_one)]
    (values, back), (others, plain) = pairs
    ones = torch.eye(values.shape[1], dtype=values.dtype)[:3, None].expand(-1, *values.shape)
    assert torch.equal(values, others) and torch.allclose(back(ones), plain(ones), rtol=1e-10, atol=1e-12)


def test_only_a_network_that_torch_func_refuses_goes_one_by_one(rng, monkeypatch):
    turning = own_turning(unmapped, rng)
    monkeypatch.setattr(soteria, "one_by_one", lambda *_: pytest.fail("one by one"))
    with pytest.raises(pytest.fail.Exception, match="one by one"):
        scores(turning, "last")
    scores(own_turning(skip_in_place, rng), "last")


def test_features_that_the_inputs_do_not_move_have_the_score_zero(rng):
    assert not scores(own_turning(lambda net, x: net.first(x.detach()).flatten(1), rng), "last").any()


@pytest.mark.parametrize("chunk", [1, 5])
def test_half_as_many_features_where_memory_runs_out(batch, monkeypatch, chunk):
    turning, rows = turning_of(convolutional(), batch), []
    expected, mapped = scores(turning, "8"), soteria.vmap

    def small(pull):
        def run(gradients):
            if len(gradients) > chunk:
                raise torch.OutOfMemoryError("out of memory")
            rows.append(len(gradients))
            return mapped(pull)(gradients)

        return run

    monkeypatch.setattr(soteria, "vmap", small)
    assert torch.allclose(scores(turning, "8"), expected, rtol=1e-12) and max(rows) <= chunk and sum(rows) == 12


def test_what_is_sent_counts_also_where_it_is_tied(rng):
    def tied():
        net = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)).double()
        net[3].weight = net[1].weight
        return net

    net, other = tied(), tied()
    sent = {name: value.detach().clone() for name, value in other.named_parameters()}
    inputs = torch.randn(3, 4, generator=rng, dtype=torch.float64)
    turning = replace(turning_of(net, Batch(inputs, torch.tensor([0, 1, 0]))), sent=sent)
    assert "3.weight" not in sent
    assert torch.allclose(features(turning, "4", inputs), other[:4](inputs), rtol=1e-12)
    assert torch.allclose(scores(turning, "4"), one_backward_per_feature(other, "4", inputs), rtol=1e-9)
