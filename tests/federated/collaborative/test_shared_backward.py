"""One backward over all users' batches gives what a backward each gives, or is not taken."""

import pytest
import torch
from test_collaborative_training import apart, average_of_a_fake_step, needs_cuda, plan_of, rows_of, training_of
from torch import nn

from alone import pictures, small
from secateur import tree
from secateur.catalogue import methods
from secateur.defenses.precode import with_bottleneck, with_divergence
from secateur.defenses.uploads import SendAll
from secateur.federated.collaborative.plan import Given, Round
from secateur.federated.collaborative.rounds import Rounds
from secateur.functional import Functional
from secateur.gpu.batchnorm import normalised, returned
from secateur.gpu.graphs import Aside
from secateur.interfaces import Batch
from secateur.models.create import create


def rounds_of(net, plan, at_once=True, stacked=True, device="cpu"):
    return Rounds(net, plan, tree.state_of(net), torch.device(device), stacked=stacked, at_once=at_once)


def given_of(net, plan, shape=(1, 6, 6), classes=3, sizes=None, seed=0, batch=3):
    rng = torch.Generator().manual_seed(seed)
    learner, like = Functional(net, training=True, device="cpu"), next(net.parameters())
    users = []
    for size in sizes or [batch] * plan.users:
        inputs = torch.randn(size, *shape, generator=rng).to(like)
        labels = torch.randint(classes, (size,), generator=rng)
        asks = learner.asks(tree.state_of(net), inputs)
        users.append(Given(Batch(inputs, labels), tuple(ask.draw(rng) for ask in asks)))
    return Round(users, torch.tensor(0.1), torch.tensor([0]))


def compare(net, given, plan=None, stacked=True, within=1e-12):
    """Both ways of a step; the rounds that tried one backward."""
    plan = plan or plan_of(SendAll())
    found = []
    for at_once in (False, True):
        rounds = rounds_of(net, plan, at_once, stacked)
        found.append(rounds.gradients(given))
    one, other = found
    assert torch.allclose(torch.stack(one.losses), torch.stack(other.losses), rtol=within, atol=0)
    for own, again in zip(one.grads, other.grads, strict=True):
        assert list(own) == list(again)
        size = max(float(value.abs().max()) for value in own.values())
        assert apart(own, again) < within * size
    for own, again in zip(rounds.statistics.taken(one.buffers), rounds.statistics.taken(other.buffers), strict=True):
        assert torch.allclose(own.double(), again.double(), rtol=within, atol=within)
    return rounds


# Which networks -------------------------------------------------------------------------------------------------------
SLOW = {"densenet121", "resnet18", "resnet18-pool", "vgg16-bn"}  # more than a few seconds on one core


@pytest.mark.parametrize("name", sorted({*methods("model")} - SLOW))
def test_every_model_is_taken_and_gets_the_gradients_of_a_backward_each(name):
    shape = methods("model")[name].info["input_shape"]
    net = create(name, shape, 3, torch.Generator().manual_seed(0)).double()
    plan = plan_of(SendAll(), users=2)
    assert compare(net, given_of(net, plan, shape), plan, stacked=False).one_batch.fits


class Skips(nn.Module):
    """Residual blocks in the ways people write them; the norms' outputs are used twice, in place, or after the sum."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.convs = nn.ModuleList([nn.Conv2d(1 if i == 0 else 4, 4, 3, padding=1) for i in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(4) for _ in range(3)])
        self.relu, self.last = nn.ReLU(inplace="in place" in way), nn.Linear(4 * 36, 3)
        self.double()

    def forward(self, x):
        x = self.relu(self.norms[0](self.convs[0](x)))
        y, z = self.norms[1](self.convs[1](x)), self.norms[2](self.convs[2](x))
        if self.way == "both":
            x = self.relu(y + z)
        elif self.way == "in place":
            y += x
            x = self.relu(y)
        elif self.way == "in place of the other":
            z.mul_(2)
            z += y
            x = torch.relu(z) + y
        elif self.way == "twice":
            x = torch.relu(torch.add(x, y)) + y
        elif self.way == "broadcast":
            x = torch.relu(y + x[:, :1]) + torch.relu(z.mean((2, 3), keepdim=True) + x)
        elif self.way == "scaled":
            x = torch.relu(torch.add(y, x, alpha=2)) * nn.functional.relu(z)
        elif self.way == "itself":
            x = torch.relu(y + y) + nn.functional.relu(z + 1.0)
        return self.last(x.flatten(1))


@pytest.mark.parametrize(
    "way", ["both", "in place", "in place of the other", "twice", "broadcast", "scaled", "itself", "neither"]
)
def test_norms_that_are_fused_with_what_follows_are_right(way):
    torch.manual_seed(0)
    net, plan = Skips(way), plan_of(SendAll())
    assert compare(net, given_of(net, plan)).one_batch.fits


def test_blocks_of_a_resnet_are_fused_and_a_network_that_cannot_be_traced_stays_as_it_is():
    net = create("resnet18-w16", (3, 32, 32), 10, torch.Generator().manual_seed(0))
    structure = rounds_of(net, plan_of(SendAll())).one_batch.together.structure
    calls = [str(node.target) for node in structure.graph.nodes if node.op == "call_module"]
    assert not any("relu" in name for name in calls) and sum("norm" in name for name in calls) == 16
    assert {name for name, _ in structure.named_parameters()} == {name for name, _ in net.named_parameters()}

    class Asks(Twice):
        def forward(self, x):
            return self.last(self.one(x.flatten(1))) if x.sum() > 0 else self.last(x.flatten(1))

    rounds = rounds_of(Asks(), plan_of(SendAll()))
    assert rounds.one_batch.together.structure is rounds.learner.structure


def net_of(*layers):
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


def flat(shape=(4, 6, 6), classes=3):
    return [nn.Flatten(), nn.Linear(torch.Size(shape).numel(), classes)]


TAKEN = {
    "strides and groups": lambda: net_of(
        nn.Conv2d(1, 4, 3, stride=(2, 1), padding=(0, 1), dilation=(1, 2)),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2, padding=1),
        *flat((6, 3, 5)),
    ),
    "reflected": lambda: net_of(nn.Conv2d(1, 4, 3, padding=1, padding_mode="reflect"), *flat()),
    "no affine, no statistics": lambda: net_of(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, affine=False, track_running_stats=False), *flat()
    ),
    "no momentum": lambda: net_of(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=None), *flat()),
    "one channel": lambda: net_of(nn.BatchNorm2d(1), *flat((1, 6, 6))),
    "rows": lambda: net_of(nn.Flatten(), nn.Linear(36, 8), nn.BatchNorm1d(8, 1e-2, 0.3), nn.Tanh(), nn.Linear(8, 3)),
    "sequences": lambda: net_of(
        nn.Flatten(1, 2), nn.Linear(6, 4), nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(24, 3, bias=False)
    ),
    "dropout": lambda: small(dropout=0.4),
    "channel dropout": lambda: net_of(nn.Conv2d(1, 4, 3, padding=1), nn.Dropout2d(0.5), *flat()),
    "precode": lambda: with_bottleneck(small(dropout=0.2), 3, torch.Generator().manual_seed(0), 5),
}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Linear(36, 36).double(), nn.Linear(36, 3).double()

    def forward(self, x):
        return self.last(self.one(torch.tanh(self.one(x.flatten(1)))))


class Temperature(Twice):
    def __init__(self):
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x):
        return self.last(torch.tanh(self.one(x.flatten(1)))) * self.by


class Penalised(Twice):
    """The weight of a known layer is used around it, too."""

    def forward(self, x):
        return self.last(torch.tanh(self.one(x.flatten(1)))) * self.last.weight.norm()


class Centred(Twice):
    def forward(self, x):
        x = x.flatten(1)
        return self.last(self.one(x - x.mean(0)))


class Sized(Twice):
    def forward(self, x):
        return self.last(self.one(x.reshape(3, 36)))


class Counting(Twice):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(len(x))
        return self.last(self.one(x.flatten(1)))


class Unused(Twice):
    def forward(self, x):
        return self.last(x.flatten(1))


class Ignored(Twice):
    """A layer whose output nobody reads."""

    def forward(self, x):
        self.one(x.flatten(1))
        return self.last(x.flatten(1))


class TimeFirst(nn.Module):
    """Its outputs are right for all users at once, and yet a user's rows are not together where a layer sees them."""

    def __init__(self):
        super().__init__()
        self.one, self.last = nn.Linear(6, 4).double(), nn.Linear(24, 3).double()

    def forward(self, x):
        return self.last(self.one(x.squeeze(1).transpose(0, 1)).transpose(0, 1).flatten(1))


class Stopped(Twice):
    def forward(self, x):
        with torch.no_grad():  # which no trace shows
            y = self.one(x.flatten(1))
        return self.last(x.flatten(1) + y)


NOT_TAKEN = {
    "a layer twice": Twice,
    "a parameter without a layer": Temperature,
    "a weight around its layer": Penalised,
    "a mean over examples": Centred,
    "one size only": Sized,
    "a count of examples": Counting,
    "another layer": lambda: net_of(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), *flat()),
    "same": lambda: net_of(nn.Conv2d(1, 4, 3, padding="same"), *flat()),
    "examples in the second axis": TimeFirst,
    "a part without gradients": Stopped,
    "normalised weights": lambda: net_of(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 4, 3, padding=1).double()), *flat()
    ),
}


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("name", TAKEN)
def test_layers_of_all_kinds_are_taken(name, stacked):
    net, plan = TAKEN[name](), plan_of(SendAll())
    assert compare(net, given_of(net, plan), stacked=stacked).one_batch.fits


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_what_one_batch_would_get_wrong_keeps_a_backward_each(name):
    net, plan = NOT_TAKEN[name](), plan_of(SendAll())
    assert not compare(net, given_of(net, plan)).one_batch.fits


def test_a_parameter_that_is_not_used_has_no_gradient_left_from_before():
    net, plan = Unused(), plan_of(SendAll())
    rounds, given = rounds_of(net, plan), given_of(net, plan)
    rounds.gradients(given)
    rounds.uploads.found.fill_(7)
    grads = rounds.gradients(given).grads
    assert rounds.one_batch.fits and not any(own["one.weight"].any() for own in grads)


@pytest.mark.parametrize("stacked", [True, False])
def test_a_layer_whose_output_nobody_reads_has_no_gradient(stacked):
    net, plan = Ignored(), plan_of(SendAll())
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    try:
        assert compare(net, given_of(net, plan), stacked=stacked).one_batch.fits
    finally:
        torch.use_deterministic_algorithms(False)


def test_frozen_parameters_stay_out_of_it():
    net = small()
    net[0].weight.requires_grad_(False)
    net[5].bias.requires_grad_(False)
    assert compare(net, given_of(net, plan_of(SendAll()))).one_batch.fits


def test_a_loss_of_the_users_own_is_each_users_mean():
    def loss(logits, labels):
        return nn.functional.cross_entropy(logits, labels) ** 2

    net, plan = small(), plan_of(SendAll(), loss=loss)
    assert compare(net, given_of(net, plan), plan).one_batch.fits


def test_a_loss_that_reads_what_the_network_noted_keeps_a_backward_each():
    net, loss = with_divergence(TAKEN["precode"](), nn.functional.cross_entropy, 0.5)
    plan = plan_of(SendAll(), loss=loss)
    assert compare(net, given_of(net, plan), plan).one_batch.fits is False


def test_batches_of_unequal_sizes_keep_a_backward_each():
    net, plan = small(), plan_of(SendAll())
    rounds = compare(net, given_of(net, plan, sizes=[3, 2, 3]))
    assert rounds.one_batch.fits is None  # not asked
    assert rounds.gradients(given_of(net, plan)) and rounds.one_batch.fits


# Whole trainings ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", [None, "dgp+error-feedback", "adgp+error-feedback", "outpost"])
def test_a_training_is_the_same_by_one_backward(text):
    net = small(dropout=0.2)
    plan = plan_of(SendAll() if text is None else text, rates=[0.1] * 3)
    one, other = (training_of(plan, net, pictures(25)) for _ in range(2))  # the last batches are unequal
    other.rounds = rounds_of(net, plan, stacked=text != "outpost")
    for row, again in zip(rows_of(one), rows_of(other), strict=True):
        assert row == pytest.approx(again, rel=1e-10, abs=1e-10)
    assert other.rounds.one_batch.fits
    assert apart(one.model(), other.model()) < 1e-10


def test_a_step_by_one_backward_reads_no_number_back():
    net, plan = small(dropout=0.3), plan_of(SendAll())
    rounds, given = rounds_of(net, plan), given_of(net, plan)
    rounds.one_batch.fits = True  # as the first steps on a GPU, before the capture, found
    shapes = {name: value.shape for name, value in rounds.params.items()}
    assert average_of_a_fake_step(rounds, given) == shapes


# BatchNorm by itself --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("relu", [False, True])
def test_batchnorm_of_many_users_is_torchs_own_of_each(relu, rng):
    x, g = (torch.randn(3, 10, 4, dtype=torch.float64, generator=rng) for _ in range(2))
    weight, bias = (torch.randn(4, dtype=torch.float64, generator=rng) for _ in range(2))
    out, moments = normalised(x, weight, bias, 0.1, relu=relu)
    found = returned(g, x, moments, bias if relu else None)
    for user in range(3):
        given = [value.clone().requires_grad_() for value in (x[user], weight, bias)]
        own = nn.functional.batch_norm(given[0], None, None, *given[1:], training=True, eps=0.1)
        own = own.relu() if relu else own
        assert torch.allclose(own, out[user], rtol=1e-12)
        for one, other in zip(torch.autograd.grad(own, given, g[user]), found, strict=True):
            assert torch.allclose(one, other[user], rtol=1e-12)


@needs_cuda
def test_work_aside_is_done_when_it_is_read():
    made, device = torch.zeros(8, 1000, device="cuda"), torch.device("cuda")
    with Aside(3, device) as aside:
        for _ in range(20):
            value = torch.randn(1000, 1000, device=device) @ torch.randn(1000, 1000, device=device)
            aside([lambda value=value, i=i: made[i].add_(value[i]) for i in range(8)], value)
            del value
    assert made.isfinite().all() and made.any(1).all()


@needs_cuda
@pytest.mark.parametrize("text", ["dgp+error-feedback", "outpost"])
def test_one_backward_equals_a_backward_each_on_a_gpu(text):
    plan, made = plan_of(text, rates=[0.1] * 5), []
    for at_once in (False, True):
        net = small(dropout=0.2)
        training = training_of(plan, net, pictures(46), device="cuda")
        training.rounds = rounds_of(net, plan, at_once, stacked=None, device="cuda")
        made.append((rows_of(training), training.model()))
    assert training.rounds.one_batch.fits
    assert apart(made[0][1], made[1][1]) < 1e-9
    for row, again in zip(made[0][0], made[1][0], strict=True):
        assert row == pytest.approx(again, rel=1e-9)
