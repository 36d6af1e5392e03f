"""ADV plays both sides of the game: nothing changes at alpha 0, and the attack's gain falls as alpha rises."""

import math

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from secateur import catalogue, tree
from secateur.defenses.adv import AdversarialRegularisation as Adv
from secateur.defenses.adv import membership
from secateur.defenses.ppb import PairBasedPosteriorBalancing as Ppb
from secateur.errors import WrongInput
from secateur.inference import predict
from secateur.interfaces import Batch
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
RECIPE = Recipe(epochs=3, batch_size=8, learning_rate=0.01, patience=None)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4 * 25, 3)

    def forward(self, x):
        return self.head(self.drop(torch.relu(self.norm(self.conv(x))).flatten(1)))


@pytest.fixture
def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net().double()


def batch(seed, size):
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, 2, 5, 5, generator=rng, dtype=torch.float64)
    return Batch(inputs, torch.randint(0, 3, (size,), generator=rng))


def make(net, seed=0, size=22):
    mask = {"conv.weight": torch.rand(4, 2, 3, 3, generator=torch.Generator().manual_seed(seed)) > 0.5}
    rng = torch.Generator().manual_seed(seed + 7)
    return Task(tree.state_of(net), batch(seed, size), batch(seed + 100, 9), rng, mask)


def adv(net, task, recipe=RECIPE, alpha=1.0, **arguments):
    ((index, fitted),) = Adv(alpha).fit_many(net, [task], recipe, **arguments)
    assert index == 0
    return fitted


def equal(first, second):
    return list(first) == list(second) and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("loss", [cross_entropy, Ppb(4.0)])
def test_alpha_0_is_plain_fine_tuning_bit_for_bit(net, loss):
    task = make(net)
    plain, other = fit(net, task, RECIPE, loss=loss), adv(net, task, alpha=0.0, loss=loss)
    assert equal(plain.state, other.state)
    assert not equal(plain.state, adv(net, task, alpha=1.0, loss=loss).state)
    without = [{name: value for name, value in row.items() if name != "attack_loss"} for row in other.history]
    assert without == plain.history


def test_the_first_step_by_hand(net):
    """One batch, one epoch: h takes an Adam step on its gain, then the classifier one on loss + alpha * log h."""
    net.drop.p = 0.0
    task, recipe = make(net, size=8), Recipe(epochs=1, batch_size=9, optimiser="sgd", patience=None)
    defense = Adv(alpha=2.0, warm_up=0, hidden=(5,))
    ((_, fitted),) = defense.fit_many(net, [task], recipe)

    seed = int(torch.randint(2**62, (), generator=task.rng.clone_state()))
    rng = torch.Generator().manual_seed(seed + 1)
    attack = {name: value.requires_grad_() for name, value in defense.surrogate(3, rng, torch.float64).items()}
    tree.apply_mask(net, task.mask)
    reference = task.validation  # 9 examples are one whole batch, in an order that a mean does not see

    def h(logits, labels):
        x = torch.cat([logits.softmax(1), one_hot(labels, 3)], 1)
        x = torch.relu(x @ attack["0.weight"].T + attack["0.bias"])
        return torch.sigmoid(x @ attack["1.weight"].T + attack["1.bias"])[:, 0]

    net.eval()
    inside, outside = (h(net(side.inputs).detach(), side.labels) for side in (task.train, reference))
    gain = (inside.log().mean() + (1 - outside).log().mean()) / 2
    assert fitted.history[0]["attack_loss"] == pytest.approx(-gain.item(), rel=1e-9)
    torch.autograd.backward(-gain)
    torch.optim.Adam(attack.values(), 1e-3).step()

    steps = torch.optim.SGD(net.parameters(), 1e-3, 0.9, weight_decay=5e-4)
    logits = net.train()(task.train.inputs)
    objective = cross_entropy(logits, task.train.labels) + 2 * h(logits, task.train.labels).log().mean()
    assert fitted.history[0]["train_loss"] == pytest.approx(objective.item(), rel=1e-9)
    objective.backward()
    steps.step()
    tree.apply_mask(net, task.mask)
    for name, value in net.state_dict().items():
        assert torch.allclose(value, fitted.state[name], rtol=1e-9, atol=1e-12), name


def test_the_warm_up_trains_the_surrogate_before_the_classifier_moves():
    net, task, _ = digits(0)
    recipe = Recipe(epochs=1, batch_size=32, learning_rate=1e-9, patience=None)  # the classifier stays
    first = [next(Adv(warm_up=epochs).fit_many(net, [task], recipe))[1].history[0] for epochs in (0, 30)]
    assert first[1]["attack_loss"] < first[0]["attack_loss"] - 0.05
    assert first[0]["validation_loss"] == pytest.approx(first[1]["validation_loss"], abs=1e-4)


def test_membership_sees_posteriors_and_labels_alone(rng):
    attack = Adv(hidden=(6, 4)).surrogate(3, rng, torch.float64)
    assert [tuple(v.shape) for v in attack.values()] == [(6, 6), (6,), (4, 6), (4,), (1, 4), (1,)]
    logits = torch.randn(5, 3, generator=rng, dtype=torch.float64)
    labels = torch.tensor([0, 1, 2, 0, 1])
    assert torch.allclose(membership(attack, logits, labels), membership(attack, logits + 7, labels))
    assert not torch.allclose(membership(attack, logits, labels), membership(attack, logits, labels.flip(0)))


def test_stacked_equals_sequential(net):
    tasks = [make(net, 0), make(net, 1, size=17), make(net, 2)]
    one = dict(Adv(2.0, attack_steps=2).fit_many(net, tasks, RECIPE, execution="sequential"))
    several = dict(Adv(2.0, attack_steps=2).fit_many(net, tasks, RECIPE, execution="stacked"))
    assert sorted(one) == sorted(several) == [0, 1, 2]
    for index, fitted in one.items():
        for name, value in fitted.state.items():
            assert torch.allclose(value.double(), several[index].state[name].double(), rtol=1e-9, atol=1e-9), name
        for row, other in zip(fitted.history, several[index].history, strict=True):
            assert row == pytest.approx(other, rel=1e-9)


@needs_cuda
@pytest.mark.parametrize("execution", ["sequential", "stacked", "auto"])
def test_every_way_on_a_gpu_equals_the_others(net, execution):
    tasks = [make(net, seed).to("cuda") for seed in range(3)]
    one = dict(Adv(2.0).fit_many(net, tasks, RECIPE, execution="eager"))
    other = dict(Adv(2.0).fit_many(net, tasks, RECIPE, execution=execution))
    for index, fitted in one.items():
        for name, value in fitted.state.items():
            assert value.is_cuda and torch.allclose(value.double(), other[index].state[name].double(), atol=1e-9), name


@pytest.mark.system
def test_ray_equals_sequential(net):
    pytest.importorskip("ray")
    tasks = [make(net, seed) for seed in range(2)]
    one = dict(Adv().fit_many(net, tasks, RECIPE))
    spread = dict(Adv().fit_many(net, tasks, RECIPE, execution="ray"))
    assert all(equal(fitted.state, spread[index].state) for index, fitted in one.items())


def test_masked_weights_are_exactly_zero_and_a_task_repeats_itself(net):
    task, chance = make(net), torch.get_rng_state()
    own, start = task.rng.get_state(), tree.clone(task.state)
    first, second = adv(net, task, alpha=8.0), adv(net, task, alpha=8.0)
    assert equal(first.state, second.state) and first.history == second.history
    assert (first.state["conv.weight"][~task.mask["conv.weight"]] == 0).all()
    assert torch.equal(torch.get_rng_state(), chance) and torch.equal(task.rng.get_state(), own)
    assert equal(task.state, start)


def test_labels_of_data_that_is_not_used_change_nothing(net):
    pool = batch(3, 60)
    poisoned = Batch(pool.inputs, torch.cat([pool.labels[:35], (pool.labels[35:] + 1) % 3]))
    results = []
    for data in (pool, poisoned):
        train, validation = data.take(torch.arange(25)), data.take(torch.arange(25, 35))
        results.append(adv(net, Task(tree.state_of(net), train, validation, torch.Generator().manual_seed(0))).state)
    assert equal(*results)


def test_early_stopping_looks_at_the_plain_validation_loss(net):
    task = make(net)
    fitted = adv(net, task, Recipe(epochs=30, batch_size=8, learning_rate=0.05, patience=2))
    losses = [row["validation_loss"] for row in fitted.history]
    assert fitted.stopped and len(losses) == fitted.best_epoch + 2 and min(losses) == losses[fitted.best_epoch - 1]
    said = cross_entropy(predict(net, fitted.state, task.validation.inputs).log(), task.validation.labels)
    assert float(said) == pytest.approx(min(losses))


def digits(seed):
    """A network that memorised digits of which a third have wrong labels: there is much to protect."""
    data, rng = load_digits(), torch.Generator().manual_seed(seed)
    inputs, labels = torch.tensor(data.data / 16, dtype=torch.float32), torch.tensor(data.target)
    rows = torch.randperm(len(inputs), generator=rng)[:700]
    wrong = torch.rand(700, generator=rng) < 0.3
    labels = torch.where(wrong, torch.randint(0, 10, (700,), generator=rng), labels[rows])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    pool = Batch(inputs[rows], labels)
    train, validation, test = (pool.take(part) for part in torch.arange(700).split([300, 100, 300]))
    memorise = Recipe(epochs=60, batch_size=32, learning_rate=3e-3, weight_decay=0.0, patience=None)
    task = Task(net.state_dict(), train, validation, rng)
    return net, Task(fit(net, task, memorise).state, train, validation, rng), test


def test_the_attacks_gain_falls_as_alpha_rises_and_accuracy_pays_for_it():
    recipe = Recipe(epochs=20, batch_size=32, patience=None)
    net, task, test = digits(0)

    def measure(alpha):
        fitted = adv(net, task, recipe, alpha=alpha)
        sides = [(predict(net, fitted.state, side.inputs), side.labels) for side in (task.train, test)]
        inside, outside = (p.gather(1, labels[:, None])[:, 0] for p, labels in sides)
        accuracy = float((sides[1][0].argmax(1) == test.labels).double().mean())
        auc = roc_auc_score([1] * len(inside) + [0] * len(outside), torch.cat([inside, outside]))
        return fitted.history[-1]["attack_loss"], auc, accuracy

    plain, defended = measure(0.0), measure(4.0)
    assert plain[0] + 0.05 < defended[0] < math.log(2) + 0.05  # the surrogate's loss: log 2 is blind
    assert defended[1] < plain[1] - 0.02  # and an attack that it never met: the confidence in the label
    assert defended[2] < plain[2]


def test_refusals_name_the_field(net):
    with pytest.raises(WrongInput, match="alpha: -1"):
        Adv(alpha=-1.0)
    with pytest.raises(WrongInput, match="warm_up: -1"):
        Adv(warm_up=-1)
    with pytest.raises(WrongInput, match="attack_steps: 0"):
        Adv(attack_steps=0)
    task = make(net)
    empty = Task(task.state, task.train, task.validation.take(torch.arange(0)), task.rng)
    with pytest.raises(WrongInput, match="data: adv needs a validation split"):
        adv(net, empty)
    with pytest.raises(WrongInput, match="execution"):
        adv(net, task, execution="parallel")


def test_it_is_known_and_combines():
    entry = catalogue.find("defense", "adv")
    assert entry.info["acts_on"] == "fine-tuning" and entry(alpha=4.0) == Adv(4.0)
    assert entry.defaults["alpha"] == 1.0 and "Nasr" in entry.summary
