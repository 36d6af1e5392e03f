"""R-GAP recovers the input of an invertible chain exactly, and nothing from a perturbed gradient."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from secateur import catalogue
from secateur.attacks.inversion.r_gap import RGap, complete, heads
from secateur.attacks.inversion.r_gap_network import INVERSES, chain
from secateur.attacks.inversion.r_gap_solver import System, solve, weight_gram
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView
from secateur.models.create import create
from secateur.models.small import cnn6, lenet_zhu
from secateur.tree import state_of


class Silent:
    def __init__(self):
        self.steps = 0

    def advance(self, iterations):
        self.steps += iterations

    def load(self):
        return None

    def save(self, state, pictures):
        pass


def knowledge_of(net, shape, classes, **more):
    zero = torch.zeros(shape[0], 1, 1)
    return Knowledge(net, shape, classes, zero, zero + 1, **more)


def unchanged(name, value):
    return value


def mount(net, shape, classes, rng, targets=1, change=unchanged, dtype=torch.double, attack=None, **more):
    """Pictures of noise, their perturbed gradients, and what the attack makes of them."""
    net = net.to(dtype)
    state = state_of(net)
    knowledge = knowledge_of(net, shape, classes, **more)
    truth = Batch(
        torch.randn(targets, *shape, generator=rng, dtype=torch.double).to(dtype),
        torch.randint(classes, (targets,), generator=rng),
    )
    views = []
    for i in range(targets):
        values = gradient_update(net, state, truth.take(torch.tensor([i])), loss=knowledge.loss).values
        views.append([ServerView(state, Gradient({name: change(name, value) for name, value in values.items()}))])
    attack = attack or RGap()
    attack.check(knowledge, views[0][0])
    found = dict(attack.reconstruct(views, knowledge, [rng] * len(views), Silent()))
    return truth, [found[i] for i in range(targets)]


def small(activation, shape=(1, 12, 12), classes=4, bias=False, hidden=None):
    """Two convolutions as LeNet's, with rank to spare."""
    torch.manual_seed(1)
    features = [nn.Conv2d(shape[0], 12, 5, 2, 2, bias=False), activation()]
    features += [nn.Conv2d(12, 24, 3, 2, 1, bias=False), activation(), nn.Flatten()]
    size = nn.Sequential(*features)(torch.zeros(1, *shape)).shape[1]
    head = [nn.Linear(size, classes, bias=bias)]
    if hidden is not None:
        head = [nn.Linear(size, hidden), activation(), nn.Linear(hidden, classes, bias=bias)]
    return nn.Sequential(*features, *head)


def error(truth, found):
    return max(float((one.batch.inputs - truth.inputs[i]).abs().max()) for i, one in enumerate(found))


def largest(share):
    def keep(name, value):
        least = value.abs().flatten().kthvalue(max(1, int((1 - share) * value.numel()))).values
        return torch.where(value.abs() > least, value, 0)

    return keep


def some(share):
    def keep(name, value):
        drawn = torch.rand(value.shape, generator=torch.Generator().manual_seed(len(name)))
        drawn[0] = 0  # so that something of every column is left
        return torch.where(drawn < share, value, 0)

    return keep


def noisy(name, value):
    return value + 1e-2 * torch.randn(
        value.shape, generator=torch.Generator().manual_seed(len(name)), dtype=value.dtype
    )


@pytest.fixture(scope="module")
def seen_through_cnn6():
    """A picture and its label, and what is made of its gradient: as it is, its largest fifth, with noise of 1e-2."""
    torch.manual_seed(0)
    shape = (3, 24, 24)  # the matrices of 32 x 32 take three times as long
    net = cnn6(shape).double()
    state, rng = state_of(net), torch.Generator().manual_seed(0)
    truth = Batch(torch.randn(1, *shape, generator=rng, dtype=torch.double), torch.tensor([7]))
    values = gradient_update(net, state, truth).values
    changes = {"exact": lambda name, value: value, "top-k": largest(0.2), "noise": noisy}
    views = [
        [ServerView(state, Gradient({name: change(name, value) for name, value in values.items()}))]
        for change in changes.values()
    ]
    watch = Silent()
    found = dict(RGap().reconstruct(views, knowledge_of(net, shape, 10), [rng] * len(views), watch))
    assert watch.steps == 3
    return truth, dict(zip(changes, found.values(), strict=True))


def test_cnn6_is_recovered_exactly(seen_through_cnn6):
    truth, found = seen_through_cnn6
    assert error(truth, [found["exact"]]) < 1e-10
    assert found["exact"].loss < 1e-10
    assert int(found["exact"].batch.labels) == 7
    assert "0 rank 1728 of 1728, condition" in found["exact"].note


@pytest.mark.parametrize("change", ["top-k", "noise"])
def test_any_perturbation_breaks_it(change, seen_through_cnn6):
    """The expected result under every gradient defense: worse than a grey picture, whose MSE is 1, and no crash."""
    truth, found = seen_through_cnn6
    assert torch.isfinite(found[change].batch.inputs).all()
    assert float((found[change].batch.inputs - truth.inputs).square().mean()) > 10
    assert found[change].loss > 0.1
    assert "condition" in found[change].note


def test_cnn6_from_a_float32_gradient(rng):
    """The rounding of the gradient is all that is lost: about 1e-4 of pictures whose deviation is 1."""
    torch.manual_seed(0)
    truth, found = mount(cnn6((1, 16, 16)), (1, 16, 16), 10, rng, targets=3, dtype=torch.float32)
    assert found[0].batch.inputs.dtype == torch.float32
    assert error(truth, found) < 1e-2
    assert [int(one.batch.labels) for one in found] == truth.labels.tolist()


@pytest.mark.parametrize(
    "activation", [lambda: nn.LeakyReLU(0.2), nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softplus, lambda: nn.LeakyReLU(0.1, True)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_small_networks_are_recovered_exactly(activation, bias, rng):
    truth, found = mount(small(activation, bias=bias), (1, 12, 12), 4, rng, targets=2)
    assert error(truth, found) < 1e-6
    assert [int(one.batch.labels) for one in found] == truth.labels.tolist()


@pytest.mark.parametrize("shape", [(3, 9, 12), (1, 12, 12)])
def test_hidden_linear_layers_with_bias(shape, rng):
    net = small(nn.Tanh, shape, hidden=30)
    truth, found = mount(net, shape, 4, rng, targets=2)
    assert error(truth, found) < 1e-6


@pytest.mark.parametrize("bias", [True, False])
def test_one_layer_alone_is_read_off(bias, rng):
    truth, (found,) = mount(nn.Sequential(nn.Flatten(), nn.Linear(12, 4, bias=bias)), (3, 2, 2), 4, rng)
    assert error(truth, [found]) < 1e-9 and torch.equal(found.batch.labels, truth.labels)
    assert found.loss < 1e-9 and found.note == "read off the only layer"


def test_an_mlp_and_a_hundred_classes(rng):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ELU(), nn.Linear(32, 100, bias=False))
    truth, found = mount(net, (1, 8, 8), 100, rng, targets=3)
    assert error(truth, found) < 1e-8
    assert [int(one.batch.labels) for one in found] == truth.labels.tolist()


@pytest.mark.parametrize("told", [False, True])
def test_two_classes_have_several_readings_and_the_residual_tells_them_apart(told, rng):
    more = {}
    if told:
        seen = torch.Generator()
        seen.set_state(rng.get_state())
        torch.randn(4, 1, 12, 12, generator=seen, dtype=torch.double)
        more = {"labels": torch.randint(2, (4, 1), generator=seen)}
    truth, found = mount(small(lambda: nn.LeakyReLU(0.2), classes=2), (1, 12, 12), 2, rng, targets=4, **more)
    assert error(truth, found) < 1e-6
    assert [int(one.batch.labels) for one in found] == truth.labels.tolist()


def test_one_logit(rng):
    def loss(logits, labels):
        return F.binary_cross_entropy_with_logits(logits[:, 0], labels.to(logits))

    truth, found = mount(small(lambda: nn.LeakyReLU(0.2), classes=1), (1, 12, 12), 2, rng, targets=4, loss=loss)
    assert error(truth, found) < 1e-6
    assert [int(one.batch.labels) for one in found] == truth.labels.tolist()


def test_the_scale_of_the_features_by_hand():
    """W = I of two classes, x = (1, 0), y = 0: k = (p - 1, 1 - p) with p = 1 / (1 + 1/e)."""
    p = 1 / (1 + math.exp(-1))
    k = torch.tensor([p - 1, 1 - p], dtype=torch.double)
    gradient = k[:, None] * torch.tensor([[1.0, 0.0]], dtype=torch.double)
    net = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).double()
    nn.init.eye_(net[1].weight)
    layer = chain(knowledge_of(net, (2, 1, 1), 2), state_of(net))[0]
    readings = heads(layer, gradient, None, F.cross_entropy, None)
    nearest = min(float((one.features - torch.tensor([1.0, 0.0])).abs().max()) for one in readings)
    assert nearest < 1e-12
    assert all(torch.allclose(one.k[:, None] * one.features, gradient) for one in readings)


def test_the_rows_are_the_layer_and_its_gradient(rng):
    """Against autograd, and the transposed rows against the rows."""
    net = nn.Sequential(nn.Conv2d(2, 3, 3, 2, 1, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(27, 2)).double()
    state = state_of(net)
    layer = chain(knowledge_of(net, (2, 6, 5), 2), state)[0]
    x, k = (torch.randn(*s, generator=rng, dtype=torch.double) for s in ((2, 6, 5), layer.output_shape))
    weight = layer.weight.clone().requires_grad_()
    z = F.conv2d(x[None], weight, stride=2, padding=1)[0]
    gradient = torch.autograd.grad((z * k).sum(), weight)[0]
    system = System(layer, k, 0.5)
    rows = system.rows(x)
    assert torch.allclose(rows[0], z) and torch.allclose(rows[1], 0.5 * gradient.flatten(1))
    other = [torch.randn(r.shape, generator=rng, dtype=torch.double) for r in rows]
    assert torch.allclose((system.back(*other) * x).sum(), sum((a * b).sum() for a, b in zip(rows, other, strict=True)))


def test_rank_condition_and_solution_are_those_of_the_dense_matrix(rng):
    """A layer that loses rank: one filter, a gradient of one filter; the shortest solution, as a pseudo-inverse."""
    torch.manual_seed(0)
    for filters, deficient in ((1, True), (6, False)):
        net = nn.Sequential(nn.Conv2d(2, filters, 3, 2, 1, bias=False), nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
        net(torch.zeros(1, 2, 8, 8))
        net = net.double()
        layer = chain(knowledge_of(net, (2, 8, 8), 3), state_of(net))[0]
        x = torch.randn(2, 8, 8, generator=rng, dtype=torch.double)
        k = torch.randn(layer.output_shape, generator=rng, dtype=torch.double)
        z, gradient = System(layer, k).rows(x)
        gram = weight_gram(layer)
        solved = solve(layer, k, z, gradient, gram)
        plain = System(layer, k)
        weigh = float((gram.trace() / plain.gradient_gram().diagonal(dim1=1, dim2=2).sum()).sqrt())
        system = System(layer, k, weigh)
        basis = torch.eye(128, dtype=torch.double).view(128, 2, 8, 8)
        dense = torch.stack([torch.cat([r.flatten() for r in system.rows(one)]) for one in basis]).T
        values = torch.linalg.svdvals(dense)
        assert torch.allclose(dense.T[:, : z.numel()] @ dense[: z.numel()], gram)
        assert (solved.rank < 128) == deficient
        assert solved.rank == int(torch.linalg.matrix_rank(dense, rtol=3e-6))
        shortest = torch.linalg.pinv(dense, rtol=3e-6) @ torch.cat([z.flatten(), weigh * gradient.flatten()])
        assert torch.allclose(solved.x.flatten(), shortest, atol=1e-8)
        assert solved.condition == pytest.approx(float(values[0] / values[solved.rank - 1]), rel=0.01)


@pytest.mark.parametrize("kind", [nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Softplus])
def test_activations_are_undone(kind):
    z = torch.linspace(-4, 4, 101, dtype=torch.double)
    assert torch.allclose(INVERSES[kind](kind(), kind()(z)), z, atol=1e-10)
    beyond = INVERSES[kind](kind(), torch.linspace(-9, 9, 7, dtype=torch.double))
    assert torch.isfinite(beyond).all()


def test_weights_after_one_step_and_the_best_of_two_rounds(rng):
    net = small(nn.Tanh).double()
    state = state_of(net)
    x = torch.randn(1, 1, 12, 12, generator=rng, dtype=torch.double)
    update = weights_update(net, state, Batch(x, torch.tensor([2])), learning_rate=0.1)
    broken = Gradient({name: torch.randn_like(value) for name, value in update.values.items()})
    knowledge = knowledge_of(net, (1, 12, 12), 4, learning_rate=0.1)
    views = [ServerView(state, broken), ServerView(state, update)]
    ((_, found),) = RGap().reconstruct([views], knowledge, [rng], Silent())
    assert found.trial == 1
    assert float((found.batch.inputs - x).abs().max()) < 1e-6


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("value", [0.0, 1e30])
def test_an_empty_or_absurd_gradient_does_not_crash_it(bias, value, rng):
    net = small(nn.Sigmoid, bias=bias)
    _, (found,) = mount(net, (1, 12, 12), 4, rng, change=lambda name, g: torch.full_like(g, value))
    assert torch.isfinite(found.batch.inputs).all()


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 1, 3, 1, 1, bias=False)
        self.act = nn.Tanh()
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        return self.fc((x + self.act(self.conv(x))).flatten(1))


class Functional(Skip):
    def forward(self, x):
        return self.fc(F.relu(self.act(self.conv(x))).flatten(1))


class Twice(Skip):
    def forward(self, x):
        return self.fc(self.act(self.conv(self.conv(x))).flatten(1))


class Plain(Skip):
    def forward(self, x):
        return self.fc(self.act(self.conv(x)).flatten(1))


def net_with(*middle):
    return nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1, bias=False), *middle, nn.Flatten(), nn.LazyLinear(3))


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        (lenet_zhu((1, 8, 8), 3), r"0 \(Conv2d\) has a bias"),
        (net_with(nn.ReLU()), r"1 \(ReLU\) loses"),
        (net_with(nn.BatchNorm2d(8)), r"1 \(BatchNorm2d\)"),
        (net_with(nn.Tanh(), nn.MaxPool2d(2)), r"2 \(MaxPool2d\) pools"),
        (net_with(nn.LeakyReLU(0.0)), "slope"),
        (net_with(nn.GELU()), r"1 \(GELU\) is no layer"),
        (net_with(nn.Tanh(), nn.Tanh()), "one activation"),
        (nn.Sequential(nn.Tanh(), net_with()), "must follow"),
        (nn.Sequential(net_with(), nn.Tanh()), "last module must be Linear"),
        (nn.Sequential(nn.Conv2d(1, 1, 3, bias=False, padding_mode="reflect", padding=1), net_with()), "zeros"),
        (Skip(), "fc does not take the output"),
        (Functional(), "fc does not take the output"),
        (Twice(), "conv is used more than once"),
        (create("resnet18", (3, 32, 32), 3, torch.Generator().manual_seed(0)), "BatchNorm2d"),
    ],
)
def test_what_it_cannot_invert_is_refused_with_the_layer(net, reason):
    shape = (3, 32, 32) if reason == "BatchNorm2d" else (1, 8, 8)
    if isinstance(net, nn.Sequential) and any(isinstance(m, nn.LazyLinear) for m in net.modules()):
        net(torch.zeros(2, *shape))
    state = state_of(net)
    view = ServerView(state, Gradient({name: value.detach() for name, value in net.named_parameters()}))
    with pytest.raises(WrongInput, match=reason):
        RGap().check(knowledge_of(net, shape, 3), view)


def test_a_functional_flatten_is_a_plain_chain(rng):
    torch.manual_seed(0)
    truth, found = mount(Plain(), (1, 8, 8), 3, rng)
    assert error(truth, found) < 1e-6


def test_batches_local_steps_and_large_pictures_are_refused():
    net = Plain()
    knowledge = knowledge_of(net, (1, 8, 8), 3)
    view = ServerView(state_of(net), Gradient(state_of(net)))
    for more, reason in (({"batch_size": 2}, "one image"), ({"local_steps": 3}, "one local step")):
        with pytest.raises(WrongInput, match=reason):
            RGap().check(dataclasses.replace(knowledge, **more), view)
    large = cnn6((3, 96, 96))
    with pytest.raises(WrongInput, match="at most"):
        RGap().check(knowledge_of(large, (3, 96, 96), 10), ServerView(state_of(large), Gradient(state_of(large))))


def test_it_is_in_the_catalogue():
    entry = catalogue.find("inversion", "r-gap")
    assert entry.info["active"] is False
    assert entry.make is RGap


# Adaptive ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("bias", [False, True])
def test_equations_whose_entries_were_dropped_are_left_out(bias, rng):
    """A third of all entries is gone: the plain attack breaks, and one that leaves them out is exact."""
    state = rng.get_state()
    truth, plain = mount(small(nn.Tanh, bias=bias), (1, 12, 12), 4, rng, 2, some(0.67))
    rng.set_state(state)
    same, knowing = mount(small(nn.Tanh, bias=bias), (1, 12, 12), 4, rng, 2, some(0.67), attack=RGap("support"))
    assert torch.equal(truth.inputs, same.inputs)
    assert error(truth, plain) > 0.5
    assert error(truth, knowing) < 1e-5
    assert [int(one.batch.labels) for one in knowing] == truth.labels.tolist()
    assert "entries are equations" in knowing[0].note and "adaptive" not in plain[0].note


def test_features_that_no_entry_tells_are_left_out_too(rng):
    """Soteria's way: whole columns of the last layer are gone; the layer before is solved by what is left."""

    def columns(name, value):
        return value * (torch.arange(value.shape[1]) % 3 > 0) if value.ndim == 2 else value

    shape = (1, 12, 12)
    state = rng.get_state()
    truth, plain = mount(small(nn.Tanh), shape, 4, rng, change=columns)
    for attack in (RGap("support"), RGap("layer")):
        rng.set_state(state)
        _, knowing = mount(small(nn.Tanh), shape, 4, rng, change=columns, attack=attack)
        assert error(truth, knowing) < 0.5 * error(truth, plain)


def test_a_layer_that_lies_is_left_out_by_name(rng):
    def first(name, value):
        return torch.randn_like(value) if name == "0.weight" else value

    state = rng.get_state()
    truth, plain = mount(small(nn.Tanh), (1, 12, 12), 4, rng, change=first)
    rng.set_state(state)
    _, knowing = mount(small(nn.Tanh), (1, 12, 12), 4, rng, change=first, attack=RGap("layer", "0"))
    assert error(truth, plain) > 1e-2 > 1e-6 > error(truth, knowing)
    assert "0 of 300 entries of 0 are equations" in knowing[0].note


def test_mask_takes_small_entries_for_noise(rng):
    def filled(name, value):
        kept = some(0.67)(name, value)
        return torch.where(kept == 0, 1e-12 * torch.randn_like(kept), kept)

    state, found = rng.get_state(), {}
    for how in ("support", "mask"):
        rng.set_state(state)
        truth, found[how] = mount(small(nn.Tanh), (1, 12, 12), 4, rng, change=filled, attack=RGap(how))
    assert error(truth, found["mask"]) < 1e-5 < 0.5 < error(truth, found["support"])


def test_without_dropped_entries_support_reads_the_same(rng):
    truth, found = mount(small(nn.Tanh), (1, 12, 12), 4, rng, attack=RGap("support"))
    assert error(truth, found) < 1e-6


def test_a_product_is_completed_from_what_survived(rng):
    k, x = torch.tensor([2.0, -1.0, 0.5]).double(), torch.randn(8, generator=rng, dtype=torch.double)
    kept = torch.ones(3, 8, dtype=torch.bool)
    kept[0, :4] = kept[1, 4:] = kept[2, 2:6] = kept[:, 7] = False
    matrix = torch.where(kept, torch.outer(k, x), 99.0)
    x[7] = 0  # nothing of this column survived
    found = complete(matrix, kept)
    assert torch.allclose(torch.outer(found.k, found.x), torch.outer(k, x)) and float(found.x.norm()) == pytest.approx(
        1
    )
    assert found.known.tolist() == [True] * 7 + [False]
    told = complete(matrix, kept, torch.tensor([0.0, -1.0, 0.0]).double(), torch.tensor([False, True, False]))
    assert torch.allclose(told.x, x) and torch.allclose(told.k, k)


def test_what_means_nothing_here_is_refused_with_the_reason(rng):
    with pytest.raises(WrongInput, match=r"reapply means nothing here: r-gap .*no trial.*allowed: none, support"):
        RGap(adaptive="reapply")
    with pytest.raises(WrongInput, match="layer: '9' is not known"):
        mount(small(nn.Tanh), (1, 12, 12), 4, rng, attack=RGap("layer", "9"))
