"""GGL: its objective by hand, real digits through a generator trained here, adaptive attackers, and what it refuses."""

from dataclasses import replace

import pytest
import torch
from scenes import Diary
from torch import nn

from secateur import tree
from secateur.attacks.inversion.engines.autograd import evaluate_singly
from secateur.attacks.inversion.generator import train_generator
from secateur.attacks.inversion.generator_search import candidate_losses, divergence, through_generator
from secateur.attacks.inversion.ggl import GGL
from secateur.attacks.inversion.gradient_matching import aim_at, problems
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.catalogue import find
from secateur.errors import WrongInput
from secateur.interfaces import Batch, Gradient, Knowledge, ServerView
from secateur.models.create import create

TARGETS = 3
FAST = {"iterations": 6, "population": 6}


def knowledge_of(net, shape=(1, 8, 8), **more):
    ones = torch.ones(shape[0], 1, 1)
    return Knowledge(net, shape, 10, 0.3053 * ones, 0.376 * ones, **more)


def view_of(net, batch, **more):
    return ServerView(tree.state_of(net), gradient_update(net, tree.state_of(net), batch, **more))


def attacked(attack, targets, knowledge, seed=0, watch=None):
    for views in targets:
        attack.check(knowledge, views[0])
    found = dict(
        attack.reconstruct(targets, knowledge, [torch.Generator().manual_seed(seed)] * len(targets), watch or Diary())
    )
    return [found[i] for i in range(len(targets))]


def shown(found):
    return torch.cat([one.batch.inputs for one in found])


def first_entries(z, y):
    """A generator by hand: the first 64 numbers of the noise, and nothing of the label."""
    return z[:, :64].reshape(-1, 1, 8, 8)


@pytest.fixture(scope="module")
def digits():
    return find("dataset", "digits")().batch


@pytest.fixture(scope="module")
def scene(digits):
    """LeNet, a target each, and a generator trained on all other digits."""
    rng = torch.Generator().manual_seed(0)
    net = create("lenet-zhu", (1, 8, 8), 10, rng)
    knowledge = knowledge_of(net)
    public = digits.take(torch.arange(TARGETS, len(digits.inputs)))
    settings = {"width": 8, "learning_rate": 2e-3, "batch_size": 32}
    generator = train_generator(public, 10, (1, 8, 8), knowledge.box, 20, rng, **settings)
    targets = [[view_of(net, digits.take(torch.tensor([i])))] for i in range(TARGETS)]
    return replace(knowledge, generator=generator), targets


@pytest.fixture(scope="module")
def tiny(digits):
    """A network and a batch in float64, and the noise whose first entries are its pictures."""
    rng = torch.Generator().manual_seed(1)
    net = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Sigmoid(), nn.Flatten(), nn.Linear(108, 10)).double()
    for value in net.parameters():
        nn.init.uniform_(value, -0.5, 0.5, generator=rng)
    batch = Batch(digits.inputs[:2].double(), digits.labels[:2])
    noise = torch.randn(2, 128, generator=rng, dtype=torch.float64)
    noise[:, :64] = batch.inputs.flatten(1)
    return net, batch, noise


@pytest.mark.parametrize("settings", [{"iterations": 60, "population": 16}, {"search": "gradient", "iterations": 60}])
def test_digits_come_back_better_than_the_generators_average(scene, digits, settings, rng):
    knowledge, targets = scene
    truth = digits.take(torch.arange(TARGETS))
    found = attacked(GGL(**settings), targets, knowledge)
    assert [int(one.batch.labels) for one in found] == truth.labels.tolist()
    noise = torch.randn(200, 128, generator=rng)
    average = torch.stack([knowledge.generator(noise, label.expand(200)).mean(0) for label in truth.labels])

    def error(pictures):
        return (pictures - truth.inputs).square().mean((1, 2, 3))

    assert bool((error(shown(found)) < 0.6 * error(average)).all())
    for one in found:
        assert one.curve[0][1] > one.loss > 0 and one.note == "labels: iDLG, row sums"
        low, high = knowledge.box
        assert bool(((one.batch.inputs >= low) & (one.batch.inputs <= high)).all())


def test_the_divergence_by_hand():
    z = torch.tensor([[[0.0, 2.0], [1.0, 1.5]]], dtype=torch.float64)  # means 1, 1.25; variances 1, .0625
    expected = 0.5 * 1 + 0.5 * (1.25**2 + 0.0625 - 1 + 2.772588722)
    assert divergence(z).tolist() == pytest.approx([expected])


def test_the_objective_by_hand(rng):
    """One linear layer: the gradient is (p - e_y) x^T, so its distance can be written down."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False)).double()
    knowledge = knowledge_of(net, generator=first_entries, labels=torch.tensor([[3]]))
    truth = torch.rand(1, 1, 8, 8, generator=rng, dtype=torch.float64)
    view = view_of(net, Batch(truth, torch.tensor([3])))
    attack = GGL(kl=0.7)
    losses = attack.losses([aim_at(attack, [view], knowledge, 0)], knowledge, attack.pictures(knowledge, truth))
    z = torch.randn(1, 5, 1, 128, generator=rng, dtype=torch.float64)
    weight, hit = net[1].weight.detach(), torch.eye(10, dtype=torch.float64)[3]

    def gradient(x):
        return torch.outer((weight @ x).softmax(0) - hit, x)

    for found, latent in zip(losses(z)[0], z[0, :, 0], strict=True):
        gap = (gradient(latent[:64]) - gradient(truth.flatten())).square().sum()
        mean, variance = latent.mean(), latent.square().mean() - latent.mean() ** 2
        kl = (mean**2 + variance - 1 - variance.log()) / 2
        assert float(found) == pytest.approx(float(gap + 0.7 * kl), rel=1e-9)


@pytest.mark.parametrize("batchnorm", ["eval", "batch"])
def test_candidates_are_judged_as_by_the_plain_engine(digits, batchnorm, rng):
    net = create("digits-cnn", (1, 8, 8), 10, rng).double()
    pairs = [Batch(digits.inputs[i : i + 2].double(), digits.labels[i : i + 2]) for i in (0, 2)]
    knowledge = knowledge_of(
        net, batch_size=2, labels=torch.stack([pair.labels for pair in pairs]), batchnorm=batchnorm
    )
    attack = GGL()
    aims = [aim_at(attack, [view_of(net, pair, batchnorm=batchnorm)], knowledge, i) for i, pair in enumerate(pairs)]
    ((problem, fixed),) = problems(aims, knowledge, 1)
    candidates = torch.randn(2, 3, 2, 1, 8, 8, generator=rng, dtype=torch.float64)
    found = candidate_losses(problem, attack.objective, knowledge.labels, fixed)(candidates)
    for i in range(3):
        expected = evaluate_singly(problem, attack.objective)(
            {"inputs": candidates[:, i]}, knowledge.labels, fixed
        ).total
        assert torch.allclose(found[:, i], expected, rtol=1e-9)


def test_the_gradient_goes_through_the_generator(tiny, rng):
    net, batch, _ = tiny
    knowledge = knowledge_of(net, labels=batch.labels[:1, None])
    attack = GGL(search="gradient")
    aims = [aim_at(attack, [view_of(net, batch.take(torch.tensor([0])))], knowledge, 0)]
    ((problem, fixed),) = problems(aims, knowledge, 1)
    mixing = torch.randn(128, 64, generator=rng, dtype=torch.float64) / 10

    def pictures(z, y):
        return (z @ mixing).tanh().reshape(*z.shape[:-1], 1, 8, 8)

    evaluate = through_generator(evaluate_singly(problem, attack.objective), pictures, 0.1)
    z = torch.randn(1, 1, 128, generator=rng, dtype=torch.float64)
    found = evaluate({"inputs": z}, knowledge.labels, fixed)
    step = torch.randn(z.shape, generator=rng, dtype=torch.float64) * 1e-5
    ahead, behind = (evaluate({"inputs": z + sign * step}, knowledge.labels, fixed).total for sign in (1, -1))
    assert float((found.gradient["inputs"] * step).sum()) == pytest.approx(float((ahead - behind) / 2), rel=1e-5)


def test_the_truth_has_no_distance_whatever_the_update_and_the_attacker(tiny):
    """Latents that make the true pictures are left with their divergence alone."""
    net, batch, noise = tiny
    sent = tree.state_of(net)
    whole = gradient_update(net, sent, batch).values

    def top(gradient):
        """Keep of each tensor what lies above a fixed size."""
        return {name: torch.where(value.abs() > 0.02, value, 0) for name, value in gradient.items()}

    noisy = {name: value.clone() for name, value in whole.items()}
    noisy["3.weight"].zero_()
    client = {"steps": 3, "learning_rate": 0.1, "step_batch": 1}
    cases = [
        ("none", Gradient(whole), {}),
        ("support", Gradient(top(whole)), {}),
        ("reapply", Gradient(top(whole)), {"compression": top}),
        ("layer", Gradient(noisy), {}),
        (
            "none",
            weights_update(net, sent, batch, **client),
            {"local_steps": 3, "learning_rate": 0.1, "local_batch": 1},
        ),
    ]
    for adaptive, update, known in cases:
        knowledge = knowledge_of(net, batch_size=2, labels=batch.labels[None], **known)
        attack = GGL(adaptive=adaptive)
        aim = aim_at(attack, [ServerView(sent, update)], knowledge, 0)
        losses = attack.losses(
            [aim], replace(knowledge, generator=first_entries), lambda z, y: z[..., :64].reshape(*z.shape[:-1], 1, 8, 8)
        )
        candidates = torch.stack([noise, noise.flip(1)])[None]
        found = losses(candidates) - 0.1 * divergence(candidates)
        assert abs(float(found[0, 0])) < 1e-12 < 1e-4 < float(found[0, 1]), adaptive


def test_where_memory_runs_out_fewer_candidates_are_judged_at_once(scene, monkeypatch):
    knowledge, targets = scene
    expected = attacked(GGL(**FAST), targets, knowledge)
    asked = []

    def small(function, axes, chunk_size):
        asked.append(chunk_size)
        if chunk_size > 2:
            raise torch.OutOfMemoryError
        return torch.func.vmap(function, axes, chunk_size=chunk_size)

    monkeypatch.setattr("secateur.attacks.inversion.generator_search.vmap", small)
    found = attacked(GGL(**FAST), targets, knowledge)
    assert torch.allclose(shown(found), shown(expected), atol=1e-2)
    assert asked[0] == 6 and asked[-2:] == [2, 1] and len(asked) < 50


@pytest.mark.parametrize("settings", [FAST, {"search": "gradient", "iterations": 6}])
def test_equal_chance_gives_equal_pictures(scene, settings):
    knowledge, targets = scene
    one, other, another = (attacked(GGL(**settings), targets, knowledge, seed) for seed in (0, 0, 1))
    assert torch.equal(shown(one), shown(other)) and not torch.equal(shown(one), shown(another))
    assert [found.loss for found in one] == [found.loss for found in other]


def test_an_interrupted_search_goes_on_to_the_same_end(scene, monkeypatch):
    monkeypatch.setattr("secateur.attacks.inversion.generator_search.SAVE_SECONDS", 0)
    knowledge, targets = scene
    watch = Diary()
    whole = attacked(GGL(**FAST), targets, knowledge, watch=watch)
    assert watch.iterations == FAST["iterations"] and len(watch.states) == FAST["iterations"] + 1
    state, pictures = watch.states[2], watch.pictures[2]
    assert len(pictures) == TARGETS and pictures[0].batch.inputs.shape == (1, 1, 8, 8)
    later = Diary(state)
    assert torch.equal(shown(attacked(GGL(**FAST), targets, knowledge, watch=later)), shown(whole))
    assert later.iterations == FAST["iterations"] - 3


def test_the_best_restart_is_taken_by_its_own_loss(scene):
    knowledge, targets = scene
    three = attacked(GGL(**FAST, restarts=3), targets[:1], knowledge)[0]
    alone = attacked(GGL(**FAST), targets[:1], knowledge)[0]
    assert three.loss <= alone.loss * (1 + 1e-4) and 0 <= three.trial < 3


@pytest.mark.parametrize("adaptive", ["none", "support", "layer", "reapply", "mask"])
@pytest.mark.parametrize("search", ["cma", "gradient"])
def test_a_pruned_update_is_attacked_by_every_adaptive_attacker(scene, search, adaptive):
    knowledge, targets = scene
    sent, update = targets[0][0].sent, targets[0][0].update.values
    kept = {name: torch.where(value.abs() >= value.abs().median(), value, 0) for name, value in update.items()}
    attack = GGL(search=search, adaptive=adaptive, **FAST)
    (found,) = attacked(attack, [[ServerView(sent, Gradient(kept))]], knowledge)
    assert found.curve[0][1] >= found.loss > 0


def test_several_rounds_and_batches_are_searched_together(tiny):
    net, batch, _ = tiny
    later = {name: value * 0.9 for name, value in tree.state_of(net).items()}
    views = [view_of(net, batch), ServerView(later, gradient_update(net, later, batch))]
    knowledge = knowledge_of(net, batch_size=2, labels=batch.labels[None], generator=first_entries)
    for search in ("cma", "gradient"):
        (found,) = attacked(GGL(search=search, **FAST), [views], knowledge)
        assert found.batch.inputs.shape == (2, 1, 8, 8) and found.batch.inputs.dtype == torch.float64
        assert found.note == "labels: given"


def test_the_users_own_generator_is_found_by_name(scene, tmp_path, monkeypatch):
    (tmp_path / "my_pictures.py").write_text(
        "def paint(z, y):\n    return z[:, :64].reshape(-1, 1, 8, 8).clamp(-0.1, 0.1)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    knowledge, targets = scene
    (found,) = attacked(GGL(generator="my_pictures:paint", **FAST), targets[:1], replace(knowledge, generator=None))
    assert float(found.batch.inputs.abs().max()) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("generator", "settings", "message"),
    [
        (None, {}, "ggl needs one"),
        (lambda z, y: z[:, :9].reshape(-1, 1, 3, 3), {}, r"became \(2, 1, 3, 3\)"),
        (lambda z, y: first_entries(z, y) / 0, {}, "finite"),
        (lambda z, y: z @ y, {}, "raised RuntimeError"),
        (lambda z, y: first_entries(z, y).detach(), {"search": "gradient"}, "search with cma"),
        (first_entries, {"labels": "joint"}, "labels: ggl's generator needs them"),
        (first_entries, {"group": 0.1}, "group"),
        (first_entries, {"population": 3}, "population: 3"),
        (first_entries, {"sigma": 0.0}, "sigma: 0.0"),
        (first_entries, {"kl": -1.0}, "kl: -1.0"),
        (first_entries, {"iterations": 0}, "iterations: 0"),
        (None, {"generator": "nowhere:at_all"}, "cannot be imported"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_the_reason(scene, generator, settings, message):
    knowledge, targets = scene
    with pytest.raises(WrongInput, match=message):
        GGL(**settings).check(replace(knowledge, generator=generator), targets[0][0])
