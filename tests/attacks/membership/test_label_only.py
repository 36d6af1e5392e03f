import pytest
import torch
from tables import in_out_digits, memorise, noisy_digits, rng

from secateur.attacks.membership.label_only import disturbance, label_only, rotate, shift_pixels, shifts
from secateur.data.embedded import breast_cancer
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Shadow
from secateur.metrics.membership import auc, evaluate, roc


def test_a_distance_has_4d_shifts():
    for d in range(6):
        found = shifts(d)
        assert len(set(found)) == len(found) == 4 * d
        assert all(abs(down) + abs(right) == d for down, right in found)


def test_shifts_move_whole_pixels_and_repeat_the_border():
    image = torch.arange(9.0).view(1, 1, 3, 3)
    assert shift_pixels(image, 1, 0)[0, 0].tolist() == [[0, 1, 2], [0, 1, 2], [3, 4, 5]]
    assert shift_pixels(image, 0, -2)[0, 0].tolist() == [[2, 2, 2], [5, 5, 5], [8, 8, 8]]
    assert torch.equal(shift_pixels(image, 0, 0), image)


def test_rotations_turn_about_the_centre():
    image = torch.arange(12.0).view(1, 1, 3, 4)
    assert torch.allclose(rotate(image, 0), image, atol=1e-5)
    assert torch.allclose(rotate(image, 180), image.flip(-1, -2), atol=1e-4)
    square = torch.arange(9.0).view(1, 1, 3, 3)
    quarter = rotate(square, 90)
    assert torch.allclose(quarter, square.rot90(1, (-2, -1)), atol=1e-4) or torch.allclose(
        quarter, square.rot90(-1, (-2, -1)), atol=1e-4
    )
    assert torch.allclose(rotate(quarter, -90), square, atol=1e-4)
    wide = torch.zeros(1, 1, 9, 21)
    wide[0, 0, 4, 14] = 1  # four pixels right of the centre: a quarter turn puts it four pixels above or below
    turned = rotate(wide, 90)[0, 0]
    assert turned.sum() == pytest.approx(1, abs=1e-4) and max(turned[0, 10], turned[8, 10]) == pytest.approx(
        1, abs=1e-4
    )


def test_an_image_is_asked_2r_plus_1_rotations_and_4d_plus_1_translations_itself_once():
    images = torch.randn(2, 3, 8, 8, generator=rng())
    assert len(list(label_only(rotations=3, translations=0).views(images))) == 2 * 3 + 1
    assert len(list(label_only(rotations=0, translations=2).views(images))) == 4 * 2 + 1
    views = list(label_only().views(images))
    assert len(views) == 9 + 4 and views[0] is images
    assert all(view.shape == images.shape for view in views)


def test_bits_flip_and_other_columns_move_the_same_for_every_row():
    table = torch.tensor([[0.0, 1.0, 5.0, 0.1], [1.0, 1.0, 7.0, 0.9], [0.0, 1.0, 6.0, 0.4]])
    found = disturbance(table, 2000, rate=0.25, noise=0.5, rng=rng())
    flipped = table[0] * found.scale + found.shift
    assert set(flipped[:, 0].tolist()) == {0.0, 1.0} and (flipped[:, 0] == 1).double().mean() == pytest.approx(
        0.25, abs=0.03
    )
    assert (flipped[:, 1] == 1).all()  # a constant column has nothing to flip to
    assert float((flipped[:, 2] - 5).std()) == pytest.approx(0.5 * (2 / 3) ** 0.5, rel=0.05)
    assert torch.equal((table[1] * found.scale + found.shift)[:, 3] - 0.9 + 0.1, flipped[:, 3]) or torch.allclose(
        (table[1] * found.scale + found.shift)[:, 3] - 0.8, flipped[:, 3], atol=1e-6
    )


def threshold_box(wall):
    """Answers 1 where the pixels' mean reaches `wall`, with a one-hot row."""
    return BlackBox(lambda x: torch.eye(2)[(x.flatten(1).mean(1) >= wall).long()], labels_only=True)


def test_the_share_of_true_answers_by_hand():
    # a 1 x 1 picture keeps its value when turned or shifted; so a 2-column table, where noise decides
    shadow = Shadow(
        threshold_box(0.0),
        members=Batch(torch.tensor([[3.0, 3.0], [4.0, 4.1]]), torch.tensor([1, 1])),
        nonmembers=Batch(torch.tensor([[-1.0, -1.2], [0.1, 0.1]]), torch.tensor([1, 1])),
    )
    fitted = label_only(flips=50, noise=0.5, rule="share").fit([shadow], rng())
    batch = Batch(torch.tensor([[0.2, 0.0], [9.0, 9.0], [-9.0, -9.0]]), torch.tensor([1, 1, 1]))
    found = fitted.score(threshold_box(0.0), Candidates(batch))
    moved = batch.inputs[0] * fitted.disturbance.scale + fitted.disturbance.shift
    expected = (1 + int((moved.mean(1) >= 0).sum())) / 51
    assert 0.2 < expected < 0.9
    assert found.scores.tolist() == pytest.approx([expected, 1.0, 0.0])
    assert found.members.tolist()[1:] == [True, False]


@pytest.fixture(scope="module")
def experiment():
    models, target, truth = in_out_digits(models=4)
    return models, target, truth


def one_hot(box):
    return BlackBox(lambda x: torch.nn.functional.one_hot(box.predict(x).argmax(1), 10).float(), labels_only=True)


@pytest.mark.parametrize("rule", ["share", "logistic"])
def test_labels_alone_tell_members_of_networks_that_memorised(experiment, rule):
    models, target, truth = experiment
    hidden = InOut([one_hot(box) for box in models.boxes], models.pool, models.membership)
    found = label_only(rule=rule).fit(hidden, rng()).score(one_hot(target), Candidates(models.pool))
    measures = evaluate(found, truth)
    gap = (target.predict(models.pool.inputs).argmax(1) == models.pool.labels).double()
    assert measures["auc"].value > 0.65
    if rule == "logistic":  # it weighs the undisturbed answer most, where labels are noise
        assert measures["auc"].value > float(auc(roc(gap, truth)))
    assert measures["balanced_accuracy"].value > 0.55
    seen = label_only(rule=rule).fit(models, rng()).score(target, Candidates(models.pool))
    assert torch.equal(seen.scores, found.scores)  # probabilities add nothing
    order = torch.randperm(truth.numel(), generator=rng(9))
    turned = label_only(rule=rule).fit(models, rng()).score(target, Candidates(models.pool.take(order)))
    assert torch.equal(turned.scores, found.scores[order])


def test_tables_too():
    data = breast_cancer()
    wrong = torch.rand(569, generator=rng(7)) < 0.3
    everyone = Batch(data.inputs, torch.where(wrong, 1 - data.labels, data.labels))
    parts = [everyone.take(part) for part in torch.randperm(569, generator=rng(8))[:560].chunk(4)]
    box, shadow = (memorise(parts[i], i, 2, steps=300) for i in (0, 2))
    candidates = Batch(*(torch.cat(pair) for pair in zip(parts[0], parts[1], strict=True)))
    found = label_only(noise=0.2).fit([Shadow(shadow, parts[2], parts[3])], rng()).score(box, Candidates(candidates))
    assert float(auc(roc(found.scores, torch.arange(280) < 140))) > 0.6


def test_wrong_input_is_said_clearly():
    with pytest.raises(WrongInput, match="at least one shadow"):
        label_only().fit([], rng())
    empty = noisy_digits(4).take(torch.arange(0))
    box = BlackBox(lambda x: torch.eye(10)[: len(x)])
    with pytest.raises(WrongInput, match="no non-members"):
        label_only().fit([Shadow(box, noisy_digits(4), empty)], rng())
    with pytest.raises(WrongInput, match=r"'mlp' is not known; allowed: logistic, share$"):
        label_only(rule="mlp")
    for name in ("rotations", "translations", "flips", "noise"):
        with pytest.raises(WrongInput, match=r"must be .*at least 0"):
            label_only(**{name: -1})
    with pytest.raises(WrongInput, match=r"must be in \[0, 1\]"):
        label_only(rate=2.0)
    with pytest.raises(WrongInput, match="fit it"):
        label_only().score(box, Candidates(noisy_digits(4)))
