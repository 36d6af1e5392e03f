"""Every inversion attack of the catalogue, found by itself: repeatable, blind to its neighbours, harmless, of use.

A method runs here with the hyper-parameters of its info key `demo`, which make it quick, and on the first of
three small networks that its `check` accepts: smooth and with biases, a plain chain without them (R-GAP), or with
ReLU and max-pooling (layerwise). The attacker may have a generator: class means and principal components of digits.
"""

from dataclasses import replace

import pytest
import torch
from torch import nn

from secateur import catalogue, tree
from secateur.attacks.inversion.updates import gradient_update
from secateur.data.embedded import digits
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView

ATTACKS = catalogue.methods("inversion")
SHAPE, CLASSES, TARGETS = (1, 8, 8), 10, (0, 60)


def smooth():
    net = nn.Sequential(nn.Conv2d(1, 8, 3, 1, 1), nn.Sigmoid(), nn.Flatten(), nn.Linear(512, CLASSES))
    for value in net.parameters():
        nn.init.uniform_(value, -0.5, 0.5)
    return net


def chain():
    convolution = nn.Conv2d(1, 6, 3, 2, 1, bias=False)
    return nn.Sequential(convolution, nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(96, CLASSES, bias=False))


def pooled():
    convolution = nn.Conv2d(1, 6, 3, 1, 1)
    return nn.Sequential(convolution, nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(96, CLASSES))


def made(make):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().double().eval()


@pytest.fixture(scope="module")
def pool():
    data = digits()
    return Batch(data.inputs.double(), data.labels)


@pytest.fixture(scope="module")
def generator(pool):
    """The attacker's: of digits that are none of the targets."""
    public = pool.take(torch.arange(200, pool.size))
    means = torch.stack([public.inputs[public.labels == c].mean(0).flatten() for c in range(CLASSES)])
    rest = public.inputs.flatten(1) - means[public.labels]
    _, size, axes = torch.linalg.svd(rest, full_matrices=False)
    axes = axes[:32] * (size[:32, None] / len(rest) ** 0.5)

    def generate(z, y):
        return (means[y] + z[:, :32].to(means) @ axes).view(-1, *SHAPE).to(z)

    return generate


class Quiet:
    """A watch that only counts."""

    def __init__(self):
        self.iterations = 0

    def advance(self, iterations):
        self.iterations += iterations

    def load(self):
        return None

    def save(self, state, pictures):
        assert all(isinstance(value, torch.Tensor) for value in state.values())


class Scene:
    """An attack, the model that was sent, what came back of two clients, and the truth."""

    def __init__(self, name, pool, generator, **changes):
        entry = ATTACKS[name]
        short = {key: value for key, value in changes.items() if key in entry.defaults}
        self.attack = entry(**entry.info.get("demo", {}) | short)
        self.truths = [pool.take(torch.tensor([row])) for row in TARGETS]
        mean, std = torch.full((1, 1, 1), 0.3053), torch.full((1, 1, 1), 0.3760)
        for make in (smooth, chain, pooled):
            net = made(make)
            known = Knowledge(net, SHAPE, CLASSES, mean.double(), std.double(), generator=generator)
            self.net, self.state = self.attack.tamper(net, tree.state_of(net), known, torch.Generator().manual_seed(1))
            self.known = replace(known, net=self.net)
            self.targets = [
                [ServerView(self.state, gradient_update(self.net, self.state, truth))] for truth in self.truths
            ]
            try:
                self.attack.check(self.known, self.targets[0][0])
                return
            except WrongInput as error:
                refusal = error
        raise refusal

    def run(self, targets=None, rng=None):
        rng = rng or torch.Generator().manual_seed(0)
        targets = targets or self.targets
        found = dict(self.attack.reconstruct(targets, self.known, [rng] * len(targets), Quiet()))
        return [found[i] for i in range(len(found))]


@pytest.fixture(scope="module")
def scenes(pool, generator):
    return {name: Scene(name, pool, generator, iterations=3) for name in ATTACKS}


@pytest.mark.parametrize("name", ATTACKS)
def test_it_states_its_threat(name, scenes):
    info = ATTACKS[name].info
    assert len(info["threat"].split()) > 5 and isinstance(info["active"], bool)
    net = made(smooth)
    state = tree.state_of(net)
    sent, changed = scenes[name].attack.tamper(net, state, scenes[name].known, torch.Generator().manual_seed(1))
    assert ((sent is net) and (changed is state)) != info["active"], "a passive server sends what it should"


@pytest.mark.parametrize("name", ATTACKS)
def test_it_repeats_itself_and_changes_nothing_that_it_was_given(name, scenes):
    scene = scenes[name]
    before = tree.clone(scene.state), tree.state_of(scene.net), tree.clone(scene.targets[0][0].update.values)
    modes = [module.training for module in scene.net.modules()]
    first, second = scene.run(), scene.run()
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a.batch.inputs, b.batch.inputs) and torch.equal(a.batch.labels, b.batch.labels)
        assert a.loss == b.loss and list(a.curve) == list(b.curve)
    after = scene.state, tree.state_of(scene.net), scene.targets[0][0].update.values
    for old, new in zip(before, after, strict=True):
        assert all(torch.equal(old[key], new[key]) for key in old)
    assert modes == [module.training for module in scene.net.modules()]
    assert all(value.grad is None for value in scene.net.parameters())


@pytest.mark.parametrize("name", ATTACKS)
def test_targets_together_are_what_they_are_one_by_one(name, scenes):
    scene = scenes[name]
    together, rng = scene.run(), torch.Generator().manual_seed(0)
    for i, target in enumerate(scene.targets):
        (alone,) = scene.run([target], rng)
        torch.testing.assert_close(alone.batch.inputs, together[i].batch.inputs, rtol=1e-6, atol=1e-6)
    drawn, none = torch.Generator().manual_seed(0), torch.Generator().manual_seed(0)
    for _ in scene.targets:
        torch.randint(2**62, (), generator=drawn)
    assert any(torch.equal(rng.get_state(), other.get_state()) for other in (drawn, none))


@pytest.mark.parametrize("name", ATTACKS)
def test_it_finds_more_than_chance_does(name, pool, generator):
    scene = Scene(name, pool, generator)
    rng = torch.Generator().manual_seed(2)
    for found, truth in zip(scene.run(), scene.truths, strict=True):
        wanted = scene.known.pixels(truth.inputs)
        pictures = scene.known.pixels(found.batch.inputs)
        chance = torch.rand(1000, *SHAPE, generator=rng, dtype=torch.float64)
        chance = (chance - wanted).square().mean((1, 2, 3)).min()
        assert (pictures - wanted).square().mean((1, 2, 3)).min() < chance, "than the best of 1000 random pictures"


@pytest.mark.parametrize("name", ATTACKS)
def test_an_update_that_does_not_fit_is_refused(name, scenes):
    scene = scenes[name]
    view = scene.targets[0][0]
    last = list(view.update.values)[-1]
    without = {key: value for key, value in view.update.values.items() if key != last}
    longer = view.update.values | {last: torch.zeros(3)}
    for values in (without, longer):
        with pytest.raises(WrongInput):
            broken = ServerView(view.sent, Gradient(values))
            scene.attack.check(scene.known, broken)
            scene.run([[broken]])
