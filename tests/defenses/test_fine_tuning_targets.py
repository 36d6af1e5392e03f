"""Our own defenses of fine-tuning: mixed distillation and the relaxed loss, by hand and in training."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from secateur import tree
from secateur.defenses.mixed_distillation import MixedDistillation
from secateur.defenses.relaxed_loss import RelaxedLoss, relax
from secateur.errors import WrongInput
from secateur.interfaces import Batch
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

RECIPE = Recipe(epochs=3, batch_size=8, learning_rate=0.05, patience=None)


def build_task(seed=0, labels=None):
    """Return a linear model and its task: 24 rows of 6 numbers, half of the weights masked."""
    rng = torch.Generator().manual_seed(seed)
    net = nn.Linear(6, 3).double()
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=rng, dtype=torch.float64))
    rows = torch.randn(32, 6, generator=rng, dtype=torch.float64)
    answers = torch.randint(3, (32,), generator=rng) if labels is None else labels
    mask = {"weight": torch.arange(18).view(3, 6) % 2 == 0}
    sides = Batch(rows[:24], answers[:24]), Batch(rows[24:], answers[24:])
    return net, Task(tree.state_of(net), *sides, torch.Generator().manual_seed(seed), mask)


def run(defense, net, task, **options):
    ((_, fitted),) = defense.fit_many(net, [task], RECIPE, **options)
    return fitted


def test_a_mixture_lies_between_two_examples_and_never_takes_more_than_its_share(rng):
    inputs = torch.randn(50, 3, generator=rng, dtype=torch.float64)
    mixed = MixedDistillation(strength=0.25).mix(inputs, torch.Generator().manual_seed(1))
    others = inputs[torch.randperm(50, generator=torch.Generator().manual_seed(1))]
    apart = (others - inputs).abs() > 1e-9
    shares = ((mixed - inputs) / (others - inputs))[apart]
    assert float(shares.min()) >= 0 and float(shares.max()) < 0.25 and float(shares.max()) > 0.1


def test_the_divergence_by_hand_and_labels_do_not_count():
    wanted, logits = torch.tensor([[0.8, 0.2]]).log(), torch.tensor([[0.5, 0.5]]).log()
    expected = 0.8 * math.log(0.8 / 0.5) + 0.2 * math.log(0.2 / 0.5)
    defense = MixedDistillation(temperature=1.0)
    for label in (0, 1):
        assert float(defense.compare(logits, torch.tensor([label]), wanted)) == pytest.approx(expected, rel=1e-6)


def test_distillation_learns_the_unpruned_answers_from_any_labels():
    net, task = build_task()
    other = build_task(labels=torch.zeros(32, dtype=torch.long))[1]
    one, two = (run(MixedDistillation(), net, some).state for some in (task, other))
    torch.testing.assert_close(one, two, rtol=0, atol=0)
    teacher, before = (
        nn.functional.linear(task.train.inputs, w, task.state["bias"])
        for w in (task.state["weight"], task.state["weight"] * task.mask["weight"])
    )
    after = nn.functional.linear(task.train.inputs, one["weight"], one["bias"])
    assert (after.softmax(1) - teacher.softmax(1)).abs().mean() < (before.softmax(1) - teacher.softmax(1)).abs().mean()
    assert not one["weight"][~task.mask["weight"]].any()


def test_whole_numbers_cannot_be_mixed():
    net, task = build_task()
    whole = replace(task, train=Batch(task.train.inputs.long(), task.train.labels))
    with pytest.raises(WrongInput, match="mixes inputs"):
        run(MixedDistillation(), net, whole)


def test_the_relaxed_loss_by_hand():
    # posteriors (.8, .2) right, (.4, .6) wrong, both of label 0
    logits, labels = torch.tensor([[0.8, 0.2], [0.4, 0.6]]).log().double(), torch.tensor([0, 0])
    mean = -(math.log(0.8) + math.log(0.4)) / 2
    assert float(relax(logits, labels, torch.tensor(0.1))) == pytest.approx(mean)
    flattened = -(0.4 * math.log(0.4) + 0.6 * math.log(0.6))
    assert float(relax(logits, labels, torch.tensor(5.0))) == pytest.approx((math.log(0.8) + flattened) / 2)


def test_below_the_target_a_wrong_example_is_flattened_and_a_right_one_rises():
    logits = torch.tensor([[0.1, 0.6, 0.3], [0.8, 0.1, 0.1]]).log().double().requires_grad_()
    (gradient,) = torch.autograd.grad(relax(logits, torch.tensor([0, 0]), torch.tensor(9.0)), logits)
    posteriors = logits.detach().exp()
    # of the wrong one: p - (p_y, (1 - p_y) / 2, (1 - p_y) / 2), halved by the mean of two examples
    torch.testing.assert_close(gradient[0], (posteriors[0] - torch.tensor([0.1, 0.45, 0.45]).double()) / 2)
    torch.testing.assert_close(gradient[1], -(posteriors[1] - torch.tensor([1.0, 0, 0]).double()) / 2)


def test_a_target_of_zero_is_plain_fine_tuning_and_a_larger_one_keeps_the_loss_up():
    net, task = build_task()
    plain = fit(net, task, RECIPE)
    torch.testing.assert_close(run(RelaxedLoss(strength=0), net, task).state, plain.state, rtol=1e-9, atol=1e-12)
    easy = replace(task, train=Batch(task.train.inputs, net(task.train.inputs).argmax(1)))
    losses = {}
    for strength in (0.0, 1.0):
        state = run(RelaxedLoss(strength), net, easy).state
        losses[strength] = float(cross_entropy(nn.functional.linear(easy.train.inputs, **state), easy.train.labels))
    assert losses[1.0] > losses[0.0] + 0.1


@pytest.mark.parametrize("defense", [MixedDistillation(), RelaxedLoss()])
def test_stacked_models_keep_their_own_targets(defense):
    net, first = build_task(0)
    second = replace(build_task(1)[1], train=build_task(2)[1].train)
    alone = [run(defense, net, task, execution="sequential").state for task in (first, second)]
    together = dict(defense.fit_many(net, [first, second], RECIPE, execution="stacked"))
    for index, state in enumerate(alone):
        torch.testing.assert_close(together[index].state, state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [MixedDistillation, RelaxedLoss])
def test_a_negative_strength_is_refused(make):
    with pytest.raises(WrongInput, match="strength"):
        make(strength=-1.0)
