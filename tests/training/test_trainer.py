"""Fit equals a loop that anyone would write, stops where it should, and changes nothing that it was given."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.defenses.ppb import PairBasedPosteriorBalancing
from secateur.errors import WrongInput
from secateur.inference import logits, per_example_gradients, predict
from secateur.interfaces import Batch
from secateur.training.aided_trainer import fit_by_losses
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit, fit_many

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


class Net(nn.Module):
    def __init__(self, rate=0.3, bias=False):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=bias)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(4 * 25, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


def batch(seed, size, dtype=torch.float64, device="cpu"):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 2, 5, 5, generator=rng, dtype=dtype)
    return Batch(inputs.to(device), torch.randint(0, 3, (size,), generator=rng).to(device))


def part(data, start, end):
    return data.take(torch.arange(start, end))


def make(seed, net, size=22, masked=True, device="cpu"):
    """A task with its own start, data and chance; 22 examples in batches of 8 leave a partial batch of 6."""
    dtype = net.head.weight.dtype
    rng = torch.Generator().manual_seed(seed)
    state = {k: v + 0.01 * seed if v.is_floating_point() else v.clone() for k, v in net.state_dict().items()}
    mask = {"conv.weight": torch.rand(4, 2, 3, 3, generator=rng) > 0.5} if masked else None
    train, validation = batch(seed, size, dtype, device), batch(seed + 100, 9, dtype, device)
    return Task(state, train, validation, torch.Generator().manual_seed(seed + 7), mask)


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


RECIPE = Recipe(epochs=2, batch_size=8, patience=None)


def plain_loop(net, task, recipe, optimiser):
    """Training as a PyTorch user writes it, with the noise of the dropout put in from outside."""

    class Given(nn.Module):
        def forward(self, x):
            keep = torch.rand(x.shape, generator=noise) >= net.drop.p
            return x * keep / (1 - net.drop.p)

    model = copy.deepcopy(net)
    model.load_state_dict(task.state)
    model.drop = Given()
    rng = task.rng.clone_state()
    noise = torch.Generator().manual_seed(int(torch.randint(2**62, (), generator=rng)))
    steps = optimiser(model.parameters())
    tree.apply_mask(model, task.mask or {})
    for _ in range(recipe.epochs):
        for rows in torch.randperm(task.train.size, generator=rng).split(recipe.batch_size):
            steps.zero_grad()
            cross_entropy(model(task.train.inputs[rows]), task.train.labels[rows]).backward()
            steps.step()
            tree.apply_mask(model, task.mask or {})
    return model.state_dict()


def near(first, second, tolerance=1e-9, leave_out=()):
    assert list(first) == list(second)
    for name, value in first.items():
        if name not in leave_out:
            assert torch.allclose(value.double(), second[name].double(), rtol=tolerance, atol=tolerance), name


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_fit_equals_a_plain_pytorch_loop(net, name, masked):
    recipe = Recipe(epochs=2, batch_size=8, optimiser=name, learning_rate=0.01, weight_decay=0.01, patience=None)
    peers = {
        "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.01),
        "sgd": lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, weight_decay=0.01),
    }
    task = make(1, net, masked=masked)
    near(fit(net, task, recipe).state, plain_loop(net, task, recipe, peers[name]))


def test_stacked_equals_sequential_also_for_other_sizes_and_with_a_penalty_and_a_transform(net):
    tasks = [make(0, net), make(1, net, size=17), make(2, net, masked=False), make(3, net, size=17)]
    extras = {
        "penalty": lambda params: 1e-2 * params["norm.weight"].abs().sum(),
        "transform": lambda x, rng: x + 0.1 * torch.randn(x.shape, generator=rng, dtype=x.dtype),
    }
    one = dict(fit_many(net, tasks, RECIPE, execution="sequential", **extras))
    several = dict(fit_many(net, tasks, RECIPE, execution="stacked", **extras))
    assert sorted(one) == sorted(several) == [0, 1, 2, 3]
    for index, fitted in one.items():
        near(several[index].state, fitted.state)
        for row, other in zip(fitted.history, several[index].history, strict=True):
            assert row == pytest.approx(other, rel=1e-9)


def test_stacked_equals_sequential_but_for_a_bias_before_batchnorm():
    # Its gradient is zero: Adam makes steps out of what rounding leaves of it, and only the running mean sees them.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = Net(bias=True).double()
    tasks = [make(seed, net) for seed in range(2)]
    one = dict(fit_many(net, tasks, RECIPE, execution="sequential"))
    several = dict(fit_many(net, tasks, RECIPE, execution="stacked"))
    for index, fitted in one.items():
        near(several[index].state, fitted.state, leave_out=("conv.bias", "norm.running_mean"))


@pytest.mark.parametrize("execution", ["stacked", "sequential"])
def test_models_of_several_losses_that_step_together_equal_each_alone(net, execution):
    tasks, recipe = [make(seed, net) for seed in range(4)], Recipe(epochs=3, batch_size=8, patience=1)
    losses = [cross_entropy, PairBasedPosteriorBalancing(4.0), PairBasedPosteriorBalancing(16.0), cross_entropy]
    together = dict(fit_by_losses(net, tasks, recipe, losses=losses, execution=execution))
    for index, (task, loss) in enumerate(zip(tasks, losses, strict=True)):
        alone = fit(net, task, recipe, loss=loss)
        near(together[index].state, alone.state)
        assert together[index].history[-1] == pytest.approx(alone.history[-1])


def test_a_task_that_stops_early_does_not_change_the_others(net):
    recipe = Recipe(epochs=12, batch_size=8, learning_rate=0.02, patience=2)
    tasks = [make(seed, net) for seed in range(4)]
    one = dict(fit_many(net, tasks, recipe, execution="sequential"))
    finished = list(fit_many(net, tasks, recipe, execution="stacked"))
    assert len({len(fitted.history) for fitted in one.values()}) > 1  # they stop in different epochs
    lengths = [len(fitted.history) for _, fitted in finished]
    assert lengths == sorted(lengths)  # given out as they finish
    for index, fitted in finished:
        assert fitted.best_epoch == one[index].best_epoch and fitted.stopped == one[index].stopped
        near(fitted.state, one[index].state, 1e-6)


@pytest.mark.system
def test_ray_equals_sequential(net):
    pytest.importorskip("ray")
    tasks = [make(seed, net) for seed in range(3)]
    one = dict(fit_many(net, tasks, RECIPE))
    spread = dict(fit_many(net, tasks, RECIPE, execution="ray"))
    for index, fitted in one.items():
        assert all(torch.equal(value, spread[index].state[name]) for name, value in fitted.state.items())


def scripted(values):
    """A loss that is cross-entropy in training and the next of `values` in validation."""
    left = iter(values)
    return lambda scores, labels: cross_entropy(scores, labels) if scores.requires_grad else torch.tensor(next(left))


@pytest.mark.parametrize(
    ("values", "patience", "best", "epochs"),
    [
        ([3.0, 2.0, 1.0, 1.5, 1.0, 9.0], 2, 3, 5),  # an equal loss is no better
        ([3.0, 2.0, 2.5, 1.0, 1.25, 1.5], 2, 4, 6),
        ([1.0, 2.0], 1, 1, 2),
        ([6.0, 5.0, 4.0, 3.0, 2.0, 1.0], 2, 6, 6),
        ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], None, 6, 6),
    ],
)
def test_early_stopping_keeps_the_best_epoch(net, values, patience, best, epochs):
    task = make(1, net)
    fitted = fit(net, task, Recipe(epochs=6, batch_size=8, patience=patience), loss=scripted(values))
    assert (fitted.best_epoch, len(fitted.history), fitted.stopped) == (best, epochs, epochs < 6)
    assert [row["validation_loss"] for row in fitted.history] == values[:epochs]
    near(fitted.state, fit(net, task, Recipe(epochs=best, batch_size=8, patience=None)).state, 0)


def test_monitor_accuracy_takes_the_most_accurate_epoch(net):
    recipe = Recipe(epochs=8, batch_size=8, learning_rate=0.05, patience=8, monitor="accuracy")
    fitted = fit(net, make(1, net), recipe)
    accuracies = [row["validation_accuracy"] for row in fitted.history]
    assert fitted.best_epoch == accuracies.index(max(accuracies)) + 1


def test_history_tells_the_truth_about_the_kept_state(net):
    task = make(1, net)
    fitted = fit(net, task, Recipe(epochs=4, batch_size=8, patience=4))
    row = fitted.history[fitted.best_epoch - 1]
    scores = logits(net, fitted.state, task.validation.inputs)
    assert row["validation_loss"] == pytest.approx(float(cross_entropy(scores, task.validation.labels)))
    assert row["validation_accuracy"] == pytest.approx(
        float((scores.argmax(1) == task.validation.labels).double().mean())
    )


def test_masked_weights_are_zero_at_the_end_and_after_a_reload(net, tmp_path):
    task = make(1, net)
    fitted = fit(net, task, Recipe(epochs=3, batch_size=8, weight_decay=0.1))
    torch.save(fitted.state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt")
    dropped = ~task.mask["conv.weight"]
    assert (state["conv.weight"][dropped] == 0).all() and (state["conv.weight"][~dropped] != 0).all()
    again = fit(net, Task(state, task.train, task.validation, task.rng, task.mask), RECIPE)
    assert (again.state["conv.weight"][dropped] == 0).all()


def test_labels_of_data_that_is_not_used_change_nothing(net):
    pool = batch(3, 60)
    poisoned = Batch(pool.inputs, torch.cat([pool.labels[:35], (pool.labels[35:] + 1) % 3]))
    results = []
    for data in (pool, poisoned):
        task = Task(net.state_dict(), part(data, 0, 25), part(data, 25, 35), torch.Generator().manual_seed(0))
        results.append(fit(net, task, RECIPE).state)
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_nothing_that_was_given_changes_and_a_task_repeats_itself(net):
    task = make(1, net)
    before, start = tree.state_of(net), tree.clone(task.state)
    chance, own = torch.get_rng_state(), task.rng.get_state()
    first, second = fit(net, task, RECIPE), fit(net, task, RECIPE)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(value, start[name]) for name, value in task.state.items())
    assert torch.equal(torch.get_rng_state(), chance) and torch.equal(task.rng.get_state(), own)
    assert all(torch.equal(value, second.state[name]) for name, value in first.state.items())
    assert first.history == second.history
    net.load_state_dict(first.state)
    assert int(first.state["norm.num_batches_tracked"]) == 6


def test_progress_hears_of_every_epoch(net):
    heard = []
    list(fit_many(net, [make(0, net), make(1, net)], RECIPE, progress=lambda i, row: heard.append((i, row["epoch"]))))
    assert heard == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_a_last_single_example_joins_the_batch_before_it_under_batchnorm():
    flat = nn.Sequential(nn.Flatten(), nn.Linear(50, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    seen = []

    def count(scores, labels):
        seen.append(len(labels))
        return cross_entropy(scores, labels)

    data = batch(0, 17)
    task = Task(flat.state_dict(), data, part(data, 0, 0), torch.Generator().manual_seed(0))
    fitted = fit(flat, task, Recipe(epochs=1, batch_size=8, patience=None), loss=count)
    assert seen == [8, 9] and set(fitted.history[0]) == {"epoch", "train_loss"}


def test_training_learns_to_tell_classes_apart():
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (300,), generator=rng)
    data = Batch(torch.randn(300, 2, 5, 5, generator=rng) + labels[:, None, None, None], labels)
    net = Net(rate=0.1)
    task = Task(net.state_dict(), part(data, 0, 200), part(data, 200, 300), rng)
    fitted = fit(net, task, Recipe(epochs=30, learning_rate=0.01, batch_size=32))
    assert fitted.history[fitted.best_epoch - 1]["validation_accuracy"] > 0.9
    assert all(value.is_contiguous() for value in fitted.state.values())  # as safetensors wants them


def test_a_loss_that_becomes_nan_is_wrong_input(net):
    with pytest.raises(WrongInput, match=r"model: the loss became NaN in epoch 2"):
        fit(net, make(1, net), RECIPE, loss=scripted([1.0, math.nan]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 0},
        {"batch_size": 0},
        {"optimiser": "adm"},
        {"learning_rate": -1.0},
        {"learning_rate": math.nan},
        {"momentum": 1.0},
        {"weight_decay": -1e-3},
        {"patience": 0},
        {"monitor": "test"},
    ],
)
def test_a_recipe_refuses_nonsense_by_name(wrong):
    with pytest.raises(WrongInput) as caught:
        Recipe(**wrong)
    assert caught.value.field == next(iter(wrong))


def test_wrong_labels_weights_and_ways_are_refused(net):
    task = make(1, net)
    far = Batch(task.train.inputs, task.train.labels + 1)
    with pytest.raises(WrongInput, match=r"labels: .*allowed: 0 to 2"):
        fit(net, Task(task.state, far, task.validation, task.rng), RECIPE)
    with pytest.raises(WrongInput, match=r"weights: head.weight has shape"):
        fit(net, Task({**task.state, "head.weight": torch.ones(2, 2)}, task.train, task.validation, task.rng), RECIPE)
    with pytest.raises(WrongInput, match="execution"):
        next(fit_many(net, [task], RECIPE, execution="parallel"))
    with pytest.raises(WrongInput, match="at least one example"):
        fit(net, Task(task.state, task.train, part(task.validation, 0, 0), task.rng), Recipe())


def test_predict_is_the_softmax_in_eval_mode_in_any_batch_size(net):
    inputs = batch(5, 11).inputs
    expected = copy.deepcopy(net).eval()(inputs).softmax(1)
    for size in (1, 4, None):
        given = predict(net.train(), net.state_dict(), inputs, size)
        assert torch.allclose(given, expected) and not given.requires_grad
    assert net.training


def test_predict_computes_in_full_float32_and_puts_the_flags_back():
    flags = []

    class Looks(nn.Module):
        def forward(self, x):
            flags.append((torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32))
            return x

    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    predict(Looks(), {}, torch.ones(2, 3))
    assert flags == [(False, False)]
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == before


def test_a_model_that_returns_nan_is_wrong_input(net):
    state = {name: value * math.nan if name == "head.bias" else value for name, value in net.state_dict().items()}
    with pytest.raises(WrongInput, match="model: returned NaN"):
        predict(net, state, batch(0, 3).inputs)


def test_per_example_gradients_equal_a_loop(net):
    examples = batch(4, 5)
    found = per_example_gradients(net, net.state_dict(), examples)
    plain = copy.deepcopy(net).eval()
    for i in range(5):
        plain.zero_grad()
        cross_entropy(plain(examples.inputs[i : i + 1]), examples.labels[i : i + 1]).backward()
        for name, parameter in plain.named_parameters():
            assert torch.allclose(found[name][i], parameter.grad, rtol=1e-9, atol=1e-12), name


@needs_cuda
@pytest.mark.parametrize("execution", ["sequential", "stacked", "eager", "auto"])
def test_every_way_on_a_gpu_equals_the_others(net, execution):
    recipe = Recipe(epochs=3, batch_size=8, patience=2)
    tasks = [make(seed, net, device="cuda") for seed in range(3)]
    one = dict(fit_many(net, tasks, recipe, execution="eager"))
    other = dict(fit_many(net, tasks, recipe, execution=execution))
    for index, fitted in one.items():
        assert fitted.state["conv.weight"].is_cuda
        near(other[index].state, fitted.state)


@needs_cuda
def test_predict_on_a_gpu_is_near_float64(net):
    inputs = batch(5, 64).inputs
    exact = predict(net, net.state_dict(), inputs)
    given = predict(net, tree.state_of(copy.deepcopy(net).float()), inputs.float().cuda())
    assert torch.allclose(given.cpu().double(), exact, atol=1e-6)
