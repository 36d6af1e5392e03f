"""PRECODE: the bottleneck by hand, its noise given from outside, training and attacks under it."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap

import secateur
from secateur import tree
from secateur.attacks.inversion import adaptive
from secateur.attacks.inversion.engines.autograd import evaluate_singly, evaluate_stacked
from secateur.attacks.inversion.engines.layerwise import layerwise
from secateur.attacks.inversion.problem import Matching, Problem, structure
from secateur.attacks.inversion.updates import gradient_update
from secateur.config import Invert, defense, inversion, read
from secateur.data.dataset import Dataset
from secateur.defenses.ats import AutomaticTransformationSearch
from secateur.defenses.precode import (
    Bottleneck,
    Precode,
    bottleneck_of,
    divergence,
    moments,
    sample,
    with_bottleneck,
    with_divergence,
    with_noise,
)
from secateur.errors import WrongInput
from secateur.evaluation.client import AttackedClient
from secateur.experiments.invert import run_invert
from secateur.federated.collaborative.plan import Plan, Schedule
from secateur.federated.collaborative.training import CollaborativeTraining
from secateur.functional import Functional, classifier, noise_of
from secateur.interfaces import Batch, Knowledge
from secateur.models.create import create
from secateur.models.small import lenet_zhu
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit_many

IG = inversion("ig:iterations=2")


@pytest.fixture
def net(rng):
    plain = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.Sigmoid(), nn.Linear(6, 4)).double()
    return with_bottleneck(plain, 4, rng, 5)


@pytest.fixture
def batch(rng):
    return Batch(torch.rand(3, 1, 3, 3, generator=rng, dtype=torch.double), torch.tensor([3, 0, 3]))


def test_the_sample_by_hand():
    encoded = torch.tensor([[1.0, -2.0, 0.0, math.log(math.e - 1)]])  # softplus: ln 2 and 1
    assert [value.tolist() for value in moments(encoded)] == [
        [[1.0, -2.0]],
        [[pytest.approx(math.log(2)), pytest.approx(1)]],
    ]
    assert sample(encoded, torch.tensor([[2.0, 0.5]])).tolist() == [[pytest.approx(1 + 2 * math.log(2)), -1.5]]
    four = sample(encoded.repeat(4, 1), torch.tensor([[0.0, 0.0], [0.0, 3.0], [0.0, 7.0]]))
    assert four[:, 1].tolist() == pytest.approx([-2, 1, 5, -2])  # again from its start


def test_the_divergence_by_hand():
    one = math.log(math.e - 1)
    assert float(divergence(torch.tensor([[0.0, 0.0, one, one]]))) == pytest.approx(0, abs=1e-6)
    two = math.log(math.e**2 - 1)  # deviation 2: (m^2 + 4 - 1 - ln 4) / 2
    rows = torch.tensor([[0.0, 0.0, one, one], [3.0, 1.0, one, two]])
    assert float(divergence(rows)) == pytest.approx((9 / 2 + (1 + 3 - math.log(4)) / 2) / 2)


def test_the_bottleneck_stands_before_the_classifier_and_the_given_network_stays(rng):
    plain = lenet_zhu((1, 8, 8), 10)
    before, name = tree.state_of(plain), classifier(plain, 10)
    wrapped = with_bottleneck(plain, 10, rng)
    made = wrapped.get_submodule(f"{name}.0")
    assert isinstance(made, Bottleneck) and bottleneck_of(wrapped) == f"{name}.0" and bottleneck_of(plain) is None
    width = plain.get_submodule(name).in_features
    assert made.encoder.weight.shape == (512, width) and made.decoder.weight.shape == (width, 256)
    assert classifier(wrapped, 10) == f"{name}.1"
    assert torch.equal(wrapped.get_submodule(f"{name}.1").weight, before[f"{name}.weight"])
    assert all(torch.equal(value, before[key]) for key, value in tree.state_of(plain).items())
    assert not [key for key in wrapped.state_dict() if "noise" in key]  # neither saved nor sent
    with pytest.raises(WrongInput, match=r"no nn.Linear with 7 outputs"):
        with_bottleneck(plain, 7, rng)


def test_initialisation_and_forward_touch_no_global_generator(batch):
    state = torch.get_rng_state()
    plain = nn.Sequential(nn.Flatten(), nn.Linear(9, 4)).double()
    torch.set_rng_state(state)
    one, two = (with_bottleneck(plain, 4, torch.Generator().manual_seed(2)) for _ in range(2))
    assert all(torch.equal(value, two.state_dict()[name]) for name, value in one.state_dict().items())
    assert torch.equal(one(batch.inputs), one(batch.inputs))
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_given_in_training_and_in_evaluation(net, batch):
    for training in (True, False):
        function = Functional(net, training=training, device="cpu")
        tensors = tree.state_of(net)
        (ask,) = function.asks(tensors, batch.inputs)
        noise = ask.draw(torch.Generator().manual_seed(4))
        assert noise.shape == (3, 5) and noise.dtype == torch.double
        given = function(tensors, batch.inputs, [noise])
        name = f"{bottleneck_of(net)}.noise"
        assert torch.equal(given, functional_call(net, tensors | {name: noise}, (batch.inputs,)))
        assert torch.equal(given, with_noise(net, {name: noise})(batch.inputs))
        assert not torch.equal(given, function(tensors, batch.inputs))  # without noise it is the mean
        features = net[:3](batch.inputs)
        mean, deviation = moments(net[3][0].encoder(features))
        assert torch.allclose(given, net[3][1](net[3][0].decoder(mean + deviation * noise)))


def test_noise_differs_by_lane_under_vmap(net, batch, rng):
    function, tensors = Functional(net, training=True, device="cpu"), tree.state_of(net)
    noise = torch.randn(2, 3, 5, generator=rng, dtype=torch.double)
    many = vmap(lambda one: function(tensors, batch.inputs, [one]))(noise)
    assert torch.allclose(many, torch.stack([function(tensors, batch.inputs, [one]) for one in noise]))


def test_it_trains_with_its_divergence_and_a_seed_repeats_it(net, batch):
    net, loss = with_divergence(net, nn.functional.cross_entropy, 0.1)
    task = Task(tree.state_of(net), batch, batch, torch.Generator().manual_seed(0))
    recipe = Recipe(epochs=2, batch_size=2, patience=None)
    state = torch.get_rng_state()
    runs = [
        dict(fit_many(net, [task, task], recipe, loss=loss, execution=execution))
        for execution in ("sequential", "stacked")
    ]
    assert torch.equal(torch.get_rng_state(), state)
    for found in runs[1].values():
        for name, value in found.state.items():
            torch.testing.assert_close(value, runs[0][0].state[name])


def test_users_train_together_under_it_and_under_ats(rng):
    inputs, labels = torch.rand(12, 1, 8, 8, generator=rng), torch.randint(4, (12,), generator=rng)
    plain = nn.Sequential(nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 4))
    net, loss = with_divergence(with_bottleneck(plain, 4, rng, 8), nn.functional.cross_entropy, 1e-3)
    data = Dataset("few", inputs, labels, 4, 8, mean=(0.0,), std=(1.0,))
    transform = AutomaticTransformationSearch().transform(torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    plan = Plan(2, schedule=Schedule(2, ((1, 0.1),)), batch_size=2, transform=transform, loss=loss)
    rows = [
        [
            {**epoch.row, "seconds": 0}
            for epoch in CollaborativeTraining(net, data, plan, torch.Generator().manual_seed(1)).epochs()
        ]
        for _ in range(2)
    ]
    assert rows[0] == rows[1] and "test_accuracy" in rows[0][-1]


def test_the_divergence_is_added_to_the_loss(net, batch):
    both, loss = with_divergence(net, nn.functional.cross_entropy, 0.5)
    outputs = both(batch.inputs)
    expected = nn.functional.cross_entropy(net(batch.inputs), batch.labels)
    encoded = net[3][0].encoder(net[:3](batch.inputs))
    assert torch.allclose(loss(outputs, batch.labels), expected + 0.5 * divergence(encoded))


@pytest.mark.parametrize("distance", ["cosine", "euclidean"])
def test_all_engines_run_it_alike(net, batch, rng, distance):
    fixed = structure(net, "eval")
    noise = noise_of(net, 3, rng)
    sent = tree.state_of(net) | noise
    observed = gradient_update(net, sent, batch).values
    problem = Problem(fixed, sent, {name: torch.stack([value, value]) for name, value in observed.items()})
    inputs = torch.rand(2, 3, 1, 3, 3, generator=rng, dtype=torch.double)
    inputs[1] = batch.inputs
    labels = batch.labels.repeat(2, 1)
    objective = Matching(distance)
    found = [
        engine(problem, objective)({"inputs": inputs}, labels, {})
        for engine in (evaluate_singly, evaluate_stacked, layerwise)
    ]
    assert float(found[0].matching[1]) == pytest.approx(0, abs=1e-9) and float(found[0].matching[0]) > 1e-6
    for other in found[1:]:
        torch.testing.assert_close(other.matching, found[0].matching)
        torch.testing.assert_close(other.gradient["inputs"], found[0].gradient["inputs"])


def client_of(net, **more):
    unit = torch.zeros(1, 1, 1).double(), torch.ones(1, 1, 1).double()
    return AttackedClient(
        net, tree.state_of(net), Knowledge(net, (1, 3, 3), 4, *unit, batch_size=3), precode=Precode(5, **more)
    )


def seen(client, batch, first=0, attack=IG):
    knowledge, ((view,),) = client.show_targets(attack.make(), [batch], None, first)
    return knowledge, view


def test_the_clients_noise_stays_at_home_and_the_attacker_draws_its_own(net, batch):
    client, name = client_of(net), f"{bottleneck_of(net)}.noise"
    knowledge, view = seen(client, batch)
    assert name not in view.sent
    own = dict(knowledge.net.named_buffers())[name]
    assert own.shape == (3, 5) and bool((own != 0).all())
    imagined = gradient_update(knowledge.net, view.sent, batch).values
    assert not torch.allclose(imagined["1.weight"], view.update.values["1.weight"])
    _, again = seen(client, batch)
    _, other = seen(client, batch, first=1)
    for key, value in view.update.values.items():
        assert torch.equal(value, again.update.values[key])
    assert not torch.equal(view.update.values["1.weight"], other.update.values["1.weight"])
    mean, same = seen(client, batch, attack=inversion("ig:iterations=2:adaptive=layer"))
    assert not bool(dict(mean.net.named_buffers())[name].any()) and not bool(net[3][0].noise.any())
    assert torch.equal(same.update.values["1.weight"], view.update.values["1.weight"])


def test_the_attacked_gradient_is_without_the_divergence_unless_asked(net, batch):
    (_, plainly), (_, whole) = (seen(client_of(net, beta=2.0, divergence=asked), batch) for asked in (False, True))
    classifier_bias = "3.1.bias"  # behind the bottleneck the divergence is not felt
    assert torch.equal(plainly.update.values[classifier_bias], whole.update.values[classifier_bias])
    encoded = net[3][0].encoder(net[:3](batch.inputs))
    (expected,) = torch.autograd.grad(2.0 * divergence(encoded), net[3][0].encoder.bias)
    found = whole.update.values["3.0.encoder.bias"] - plainly.update.values["3.0.encoder.bias"]
    torch.testing.assert_close(found, expected)


def test_the_adaptive_attacker_leaves_out_what_is_a_product_of_the_noise(net, batch):
    update = gradient_update(net, tree.state_of(net), batch).values
    layer = adaptive.find_defended_layer(update, net, 4)
    assert layer == "3"
    assert set(adaptive.without_layer(update, layer)) == {"1.weight", "1.bias"}
    assert set(adaptive.without_layer(update, "3.0")) == {"1.weight", "1.bias", "3.1.weight", "3.1.bias"}


def test_r_gap_cannot_be_mounted(rng):
    chain = nn.Sequential(nn.Flatten(), nn.Linear(9, 6), nn.LeakyReLU(0.2), nn.Linear(6, 4))
    batch = Batch(torch.rand(1, 1, 3, 3, generator=rng), torch.tensor([3]))
    assert secateur.invert(chain, batch, "r-gap").rows
    with pytest.raises(WrongInput, match=r"attack r-gap: cannot invert this network: 3\.0 is a sample of noise"):
        secateur.invert(chain, batch, "r-gap", defense="precode")


def test_from_python_with_every_kind_of_defense_at_once(rng):
    batch, net = Batch(torch.rand(2, 1, 8, 8, generator=rng), torch.tensor([3, 1])), lenet_zhu((1, 8, 8), 10)
    report = secateur.invert(net, batch, ["ig:iterations=2:tv=0.0001", "rob:bins=8"], defense="precode:size=8+ats+dgp")
    found = {(row.attack, row.extra["against"]): row for row in report.rows if row.metric == "psnr_median"}
    assert len(found) == 4 and {row.defense for row in found.values()} == {"precode:size=8+ats+dgp"}
    assert bottleneck_of(net) is None
    both = [
        [row.value for row in report.rows if row.metric == "psnr" and row.extra["against"] == x]
        for x in ("used", "raw")
    ]
    assert both[0] != both[1]


def test_the_command(tmp_path):
    config = read(
        Invert,
        None,
        {"defense": "none,precode:size=8,ats", "targets": 2, "iterations": 2, "device": "cpu", "together": 1},
    )
    rows = run_invert(config, tmp_path / "run")
    found = {(row.defense, row.extra.get("against")) for row in rows if row.metric == "psnr"}
    assert found == {("none", None), ("precode:size=8", None), ("ats", "used"), ("ats", "raw")}
    (note,) = {r.note for r in rows if r.metric == "psnr" and r.defense != "ats" and r.note and "precode" in r.note}
    assert "precode:size=8 was attacked plainly only" in note and "adaptive: layer" in note


def test_an_attacker_who_knows_of_it_sees_the_pictures(rng):
    net = create("lenet-zhu", (1, 8, 8), 10, rng)
    batch = Batch(
        torch.rand(2, 1, 4, 4, generator=rng).repeat_interleave(2, 2).repeat_interleave(2, 3), torch.arange(2)
    )
    setting = {"defense": "precode", "batch_size": 1, "labels": "oracle", "iterations": 150}
    psnr = {}
    for adaptive_ in ("none", "layer"):
        rows = secateur.invert(net, batch, "ig:tv=0.0001", adaptive=adaptive_, **setting).rows
        (psnr[adaptive_],) = [row.value for row in rows if row.metric == "psnr" and row.extra["target"] is None]
    assert psnr["layer"] > psnr["none"] + 3


def test_what_is_refused():
    for given, sentence in (("precode:size=0", "size: 0 is not"), ("precode:beta=-1", "beta: -1.0 is not allowed")):
        with pytest.raises(WrongInput, match=sentence):
            defense(given)
    assert dataclasses.asdict(Precode()) == {"size": 256, "beta": 1e-3, "divergence": False}
