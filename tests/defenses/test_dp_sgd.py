"""DP-SGD clips every example by itself, adds the noise it says, pays for it, and refuses what would break it."""

import importlib.util
import math
import re
import subprocess
import sys
from statistics import NormalDist

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from secateur import catalogue, tree
from secateur.defenses import dp_sgd
from secateur.defenses.dp_common import Phase, count_steps, epsilon
from secateur.defenses.dp_sgd import DpSgd, DpSgdScratch
from secateur.defenses.ppb import PairBasedPosteriorBalancing as Ppb
from secateur.errors import WrongInput, install_command
from secateur.inference import per_example_gradients, predict
from secateur.interfaces import Batch
from secateur.training.recipe import Recipe, Task

pytest.importorskip("opacus")

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
RECIPE = Recipe(epochs=2, batch_size=8, learning_rate=0.01, patience=None)
FROZEN = ("norm.weight", "norm.bias", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked")


class Net(nn.Module):
    def __init__(self, rate=0.0):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(4 * 25, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


def build(make=Net, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


@pytest.fixture
def net():
    made = build().double()
    made.norm.running_mean.fill_(0.1)
    made.norm.weight.data.fill_(1.5)
    return made


def batch(seed, size):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 2, 5, 5, generator=rng, dtype=torch.float64)
    return Batch(inputs, torch.randint(0, 3, (size,), generator=rng))


def make(net, seed=0, size=22):
    mask = {"conv.weight": torch.rand(4, 2, 3, 3, generator=torch.Generator().manual_seed(seed)) > 0.5}
    rng = torch.Generator().manual_seed(seed + 7)
    return Task(tree.state_of(net), batch(seed, size), batch(seed + 100, 9), rng, mask)


def private(net, task, recipe=RECIPE, defense=None, **arguments):
    ((_, fitted),) = (defense or DpSgd()).fit_many(net, [task], recipe, **arguments)
    return fitted


def equal(first, second):
    return list(first) == list(second) and all(torch.equal(value, second[name]) for name, value in first.items())


def by_hand(net, task, recipe, max_grad_norm):
    """DP-SGD without noise, example by example, as Abadi et al. write it; also how large the batches were."""
    state, sizes = tree.mask_tree(task.state, task.mask), []
    trained = {name: nn.Parameter(state[name].clone()) for name, _ in net.named_parameters() if name not in FROZEN}
    kinds = {"adam": torch.optim.Adam, "sgd": lambda *a, **k: torch.optim.SGD(*a, momentum=0.9, **k)}
    optimiser = kinds[recipe.optimiser](trained.values(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    rng, size = task.rng.clone_state(), task.train.size
    torch.randint(2**62, (), generator=rng)  # the noise's seed
    for _ in range(recipe.epochs * math.ceil(size / recipe.batch_size)):
        rows = (torch.rand(size, generator=rng) < recipe.batch_size / size).nonzero()[:, 0]
        sizes.append(len(rows))
        total = {name: torch.zeros_like(value) for name, value in trained.items()}
        now = state | {name: value.detach() for name, value in trained.items()}
        for row in rows:
            found = tree.mask_tree(per_example_gradients(net, now, task.train.take(row[None])), task.mask)
            norm = math.sqrt(sum(float(found[name].square().sum()) for name in trained))
            for name, value in total.items():
                value += found[name][0] * min(1.0, max_grad_norm / (norm + 1e-6))
        for name, value in trained.items():
            value.grad = total[name] / recipe.batch_size
        optimiser.step()
        with torch.no_grad():
            for name, kept in task.mask.items():
                trained[name].masked_fill_(~kept, 0)
    return state | {name: value.detach() for name, value in trained.items()}, sizes


@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6])  # the second clips nothing
@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
def test_without_noise_it_equals_a_loop_over_examples(net, optimiser, max_grad_norm):
    recipe = Recipe(epochs=2, batch_size=8, optimiser=optimiser, learning_rate=0.01, weight_decay=0.01, patience=None)
    task = make(net)
    fitted = private(net, task, recipe, DpSgd(0.0, max_grad_norm))
    expected, _ = by_hand(net, task, recipe, max_grad_norm)
    for name, value in expected.items():
        assert torch.allclose(fitted.state[name].double(), value.double(), rtol=1e-9, atol=1e-9), name


@pytest.mark.parametrize(("size", "batch_size"), [(9, 2), (30, 12)])
def test_batches_may_be_empty_and_large_ones_come_in_parts(net, monkeypatch, size, batch_size):
    recipe, task = Recipe(epochs=3, batch_size=batch_size, patience=None), make(net, size=size)
    expected, sizes = by_hand(net, task, recipe, 1.0)
    assert min(sizes) == 0 or max(sizes) > 8
    monkeypatch.setitem(dp_sgd.AT_ONCE, "cpu", 1)  # so that there are parts of 8
    state = private(net, task, recipe, DpSgd(0.0)).state
    for name, value in expected.items():
        assert torch.allclose(state[name].double(), value.double(), rtol=1e-9, atol=1e-9), name


@needs_cuda
def test_a_gpu_equals_the_cpu_without_noise_and_repeats_itself_with_it(net):
    task, device = make(net), make(net).to("cuda")
    here, there = private(net, task, defense=DpSgd(0.0)), private(net, device, defense=DpSgd(0.0))
    for name, value in here.state.items():
        assert torch.allclose(value.double(), there.state[name].double().cpu(), rtol=1e-9, atol=1e-9), name
    assert equal(private(net, device).state, private(net, device).state)


@pytest.mark.system
def test_ray_equals_sequential(net):
    pytest.importorskip("ray")
    tasks = [make(net, seed) for seed in range(2)]
    one = dict(DpSgd().fit_many(net, tasks, RECIPE))
    spread = dict(DpSgd().fit_many(net, tasks, RECIPE, execution="ray"))
    assert all(equal(fitted.state, spread[index].state) for index, fitted in one.items())


def test_the_noise_has_the_deviation_that_the_accounting_assumes():
    """One step of plain SGD with and without noise: the difference is noise / batch size, times the learning rate."""
    net = build(lambda: nn.Sequential(nn.Flatten(), nn.Linear(50, 1000), nn.Linear(1000, 3))).double()
    recipe = Recipe(1, 10, "sgd", learning_rate=1.0, momentum=0.0, weight_decay=0.0, patience=None)
    task = Task(tree.state_of(net), batch(0, 10), batch(1, 5), torch.Generator().manual_seed(3))
    noisy, quiet = (private(net, task, recipe, DpSgd(sigma, max_grad_norm=0.5)).state for sigma in (3.0, 0.0))
    noise = torch.cat([(noisy[name] - value).flatten() for name, value in quiet.items()]) * 10
    assert len(noise) > 50000  # so the deviation is known to 0.3 %
    assert float(noise.std()) == pytest.approx(3.0 * 0.5, rel=0.015)
    assert abs(float(noise.mean())) < 0.03
    assert float(noise.pow(4).mean() / noise.var() ** 2) == pytest.approx(3.0, abs=0.15)  # as a Gaussian's


def test_batchnorm_is_frozen_and_pruned_weights_are_exactly_zero(net):
    task = make(net)
    fitted = private(net, task, defense=DpSgd(10.0))
    assert all(torch.equal(fitted.state[name], task.state[name]) for name in FROZEN)
    assert (fitted.state["conv.weight"][~task.mask["conv.weight"]] == 0).all()
    assert (
        fitted.state["conv.weight"][task.mask["conv.weight"]] != task.state["conv.weight"][task.mask["conv.weight"]]
    ).all()
    assert not torch.equal(fitted.state["head.bias"], task.state["head.bias"])


def test_a_task_repeats_itself_and_leaves_everything_as_it_was():
    net = build(lambda: Net(rate=0.5)).double()
    task, chance = make(net), torch.get_rng_state()
    own, start, before = task.rng.get_state(), tree.clone(task.state), tree.state_of(net)
    first, second = private(net, task), private(net, task, execution="stacked")
    assert equal(first.state, second.state) and first.history == second.history
    assert torch.equal(torch.get_rng_state(), chance) and torch.equal(task.rng.get_state(), own)
    assert equal(task.state, start) and equal(net.state_dict(), before)
    assert all(value.requires_grad for value in net.parameters()) and net.norm.training
    other = Task(task.state, task.train, task.validation, torch.Generator().manual_seed(99), task.mask)
    assert not equal(first.state, private(net, other).state)


def test_labels_of_data_that_is_not_used_change_nothing(net):
    pool = batch(3, 60)
    poisoned = Batch(pool.inputs, torch.cat([pool.labels[:35], (pool.labels[35:] + 1) % 3]))
    results = []
    for data in (pool, poisoned):
        train, validation = data.take(torch.arange(25)), data.take(torch.arange(25, 35))
        task = Task(tree.state_of(net), train, validation, torch.Generator().manual_seed(0))
        results.append(private(net, task).state)
    assert equal(*results)


def test_early_stopping_keeps_the_best_epoch_and_progress_hears_of_all(net):
    heard = []
    recipe = Recipe(epochs=40, batch_size=8, learning_rate=0.05, patience=2)
    fitted = private(net, make(net), recipe, progress=lambda index, row: heard.append((index, row["epoch"])))
    losses = [row["validation_loss"] for row in fitted.history]
    assert fitted.stopped and len(losses) == fitted.best_epoch + 2 and min(losses) == losses[fitted.best_epoch - 1]
    assert heard == [(0, epoch) for epoch in range(1, len(losses) + 1)]


def test_epsilon_is_what_the_accountants_say():
    phases = [Phase(1 / 16, 16)]  # also found by dp-accounting
    assert epsilon(1.1, phases, 1e-5) == pytest.approx(2.242, abs=1e-3)
    assert epsilon(1.1, phases, 1e-5, "prv") == pytest.approx(1.823, abs=1e-3)
    assert epsilon(1.1, [Phase(1 / 16, 10), Phase(1 / 16, 6)], 1e-5) == pytest.approx(2.242, abs=1e-3)
    assert epsilon(0.0, phases, 1e-5) == math.inf
    values = [epsilon(sigma, [Phase(0.01, 1000)], 1e-5) for sigma in (0.01, 0.1, 1.0, 10.0, 100.0)]
    assert values == sorted(values, reverse=True) and values[-1] < 0.02 and math.isfinite(values[0])


def test_epsilon_of_whole_batches_is_near_the_gaussian_mechanisms_own():
    """Sixteen steps at sigma 20 are one at sigma 5, whose exact delta is known (Balle and Wang 2018, Eq. 6)."""

    def delta(epsilon, sigma=5.0):
        low, high = (normal.cdf(sign / (2 * sigma) - epsilon * sigma) for sign in (-1, 1))
        return high - math.exp(epsilon) * low

    normal = NormalDist()
    rdp, prv = (epsilon(20.0, [Phase(1.0, 16)], 1e-5, accountant) for accountant in ("rdp", "prv"))
    assert delta(rdp) < 1e-5 < delta(0.85 * rdp)
    assert delta(prv) < 1e-5 < delta(0.98 * prv)


def test_the_guarantee_counts_all_epochs_and_says_what_it_covers():
    train, finetune = Recipe(epochs=10, batch_size=100), Recipe(epochs=5, batch_size=50)
    assert count_steps(1024, finetune) == Phase(50 / 1024, 21 * 5)
    assert count_steps(30, finetune) == Phase(1.0, 5)
    given = DpSgd().guarantee(1024, finetune)
    assert given.delta == 1 / 1024 and given.epsilon == epsilon(1.0, [Phase(50 / 1024, 105)], 1 / 1024)
    assert str(given).startswith(f"epsilon {given.epsilon:.4g} at delta 0.000977 (rdp) for fine-tuning only")
    both = DpSgdScratch(delta=1e-5).guarantee(1024, train, finetune)
    assert both.epsilon == epsilon(1.0, [Phase(100 / 1024, 110), Phase(50 / 1024, 105)], 1e-5)
    assert both.epsilon > DpSgd(delta=1e-5).guarantee(1024, finetune).epsilon
    assert "training and fine-tuning" in str(both)


def test_scratch_puts_groupnorm_in_the_place_of_batchnorm():
    net = build(
        lambda: nn.Sequential(Net(), nn.BatchNorm1d(3), nn.Sequential(nn.BatchNorm1d(3, affine=False)))
    ).double()
    made = DpSgdScratch().structure(net)
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in made.modules())
    assert isinstance(made[0].norm, nn.GroupNorm) and isinstance(net[0].norm, nn.BatchNorm2d)
    assert torch.equal(made[0].conv.weight, net[0].conv.weight) and made[0].norm.weight.dtype == torch.float64
    inputs = batch(0, 4).inputs
    assert torch.allclose(made(inputs)[:2], made(inputs[:2]))  # no example sees another
    for channels, groups in ((1, 1), (3, 1), (16, 4), (60, 15), (64, 16), (512, 32)):
        norm = DpSgdScratch().structure(nn.Sequential(nn.BatchNorm1d(channels)))[0]
        assert (norm.num_groups, norm.num_channels) == (groups, channels)


def test_scratch_learns_digits_and_much_noise_forgets_them():
    data, rng = load_digits(), torch.Generator().manual_seed(0)
    rows = torch.randperm(len(data.data), generator=rng)
    pool = Batch(torch.tensor(data.images / 16, dtype=torch.float32)[rows][:, None], torch.tensor(data.target)[rows])
    parts = [pool.take(part) for part in torch.arange(1500).split([900, 200, 400])]
    plain = build(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))
    )
    accuracies = []
    for sigma in (1.0, 100.0):
        defense = DpSgdScratch(sigma)
        net = defense.structure(plain)
        task = Task(tree.state_of(net), *parts[:2], rng)
        fitted = private(net, task, Recipe(epochs=8, batch_size=64, learning_rate=5e-3), defense)
        assert not torch.equal(fitted.state["1.weight"], task.state["1.weight"])  # GroupNorm is trained
        hits = predict(net, fitted.state, parts[2].inputs).argmax(1) == parts[2].labels
        accuracies.append(float(hits.double().mean()))
    assert accuracies[0] > 0.7 and accuracies[1] < accuracies[0] - 0.2


@pytest.mark.parametrize("name", ["dp-sgd", "dp-sgd-scratch"])
def test_it_is_refused_beside_another_defense(net, name):
    entry = catalogue.find("defense", name)
    assert entry.info["combines"] is False and "does not combine" in entry.info["reason"]
    assert entry.info["acts_on"] == {"dp-sgd": "fine-tuning", "dp-sgd-scratch": "training"}[name]
    defense = entry()
    model = defense.structure(net) if name == "dp-sgd-scratch" else net
    with pytest.raises(WrongInput, match="defense: dp-sgd does not combine"):
        defense.fit_many(model, [], RECIPE, loss=Ppb())


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": -1.0},
        {"noise_multiplier": math.inf},
        {"max_grad_norm": 0.0},
        {"delta": 1.0},
        {"accountant": "gdp"},
    ],
)
def test_nonsense_is_refused_by_name(wrong):
    with pytest.raises(WrongInput, match=next(iter(wrong))):
        DpSgd(**wrong)


def test_models_and_accountants_that_cannot_be_are_refused(net, monkeypatch):
    with pytest.raises(WrongInput, match="BatchNorm without running statistics"):
        net.norm = nn.BatchNorm2d(4, track_running_stats=False)
        private(net, make(net))
    with pytest.raises(WrongInput, match="dp-sgd-scratch cannot train"):
        private(net, make(net), defense=DpSgdScratch())
    with pytest.raises(WrongInput, match="accountant: prv is not allowed where epsilon is above 100"):
        DpSgd(0.01, accountant="prv").guarantee(100, RECIPE)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        WrongInput, match=re.escape(f"opacus: is not installed; install it with: {install_command('dp')}")
    ):
        private(build(), make(build()))


def test_opacus_leaves_logs_as_they_are():
    """Imported in a process of its own: it is imported once, and sets the root logger up then."""
    code = (
        "import logging; from secateur.defenses.dp_common import Phase, epsilon; "
        "assert epsilon(1.0, [Phase(0.1, 5)], 1e-5) > 0; root = logging.getLogger(); "
        "assert not root.handlers and root.level == logging.WARNING; logging.getLogger('secateur').warning('told')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "told\n"
