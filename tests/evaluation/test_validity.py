import pytest
import torch

from secateur.evaluation.validity import (
    Accuracy,
    blind_auc,
    blind_baseline,
    check_rows,
    doubt_order,
    duplicates,
    failures,
    labels,
    member_accuracy,
    resemblance,
    validity_rows,
)
from secateur.interfaces import Batch
from secateur.seeding import derive


def batch(rows, seed, shift=0.0, classes=4):
    rng = derive(seed, "rows")
    return Batch(torch.randn(rows, 3, 12, 12, generator=rng) + shift, torch.arange(rows) % classes)


def test_rows_of_one_population_pass_every_check():
    checks = check_rows(batch(300, 0), batch(300, 1), 4, 0)
    assert [check.name for check in checks] == ["duplicates", "blind", "labels"]
    assert all(check.holds for check in checks)


def test_members_among_the_non_members_are_counted():
    inside = batch(100, 0)
    mixed = Batch(torch.cat([batch(90, 1).inputs, inside.inputs[:10]]), torch.zeros(100, dtype=torch.int64))
    check = duplicates(inside, mixed)
    assert not check.holds and check.sentence.startswith("10 of 100 non-members are members too")


def test_a_shifted_population_is_flagged():
    check = blind_baseline(batch(300, 0), batch(300, 1, shift=0.3), 0)
    assert not check.holds and "differ by themselves" in check.sentence


def test_the_labels_alone_are_enough_for_the_blind_baseline():
    inside, outside = batch(400, 0, classes=2), batch(400, 1, classes=2)
    skewed = Batch(outside.inputs, torch.zeros(400, dtype=torch.int64))
    assert blind_auc(inside, skewed, 0).low > 0.5


@pytest.mark.parametrize("seed", range(6))
def test_chance_is_left_alone(seed):
    assert blind_baseline(batch(200, 2 * seed + 10), batch(200, 2 * seed + 11), seed).holds


def test_labels_that_skip_classes_are_named():
    check = labels(Batch(torch.zeros(6, 2), torch.tensor([1, 2, 3, 1, 2, 3])), 4)
    assert not check.holds and "no member has the label 0" in check.sentence


@pytest.mark.parametrize(("accuracy", "classes", "holds"), [(0.23, 20, False), (0.99, 20, True), (0.6, 2, False)])
def test_a_model_that_does_not_know_its_members_is_doubted(accuracy, classes, holds):
    check = member_accuracy(accuracy, classes)
    assert check.holds is holds and ("normalisation" in check.sentence) is not holds


def test_shadows_must_be_as_accurate_as_the_victim():
    alike = resemblance(Accuracy(0.98, 0.36), [Accuracy(0.95, 0.30), Accuracy(0.97, 0.32)], [450, 460])
    assert alike.holds and "2 shadow models, each trained on 450 to 460 rows" in alike.sentence
    apart = resemblance(Accuracy(0.99, 0.25), [Accuracy(0.99, 0.04)], [200])
    assert not apart.holds and apart.sentence.startswith("the shadows do not resemble the victim")


def test_rows_of_checks_say_what_failed():
    common = {"model": "m", "dataset": "d", "seed": 0, "extra": {"original": None}}
    rows = validity_rows(common, [member_accuracy(0.2, 10), duplicates(batch(9, 0), batch(9, 1))])
    assert [row.value for row in rows] == [0.0, 1.0] and rows[0].extra["check"] == "members"
    assert failures(rows) == [rows[0].note]


def answers_of(right_inside, right_outside, rows=200, shift=0.0, seed=0):
    rng = torch.Generator().manual_seed(seed)
    is_member = torch.arange(2 * rows) < rows
    hits = torch.rand(2 * rows, generator=rng) < torch.where(is_member, right_inside, right_outside)
    return hits, torch.rand(2 * rows, generator=rng) + shift * ~is_member, is_member


@pytest.mark.parametrize(("inside", "outside", "shift"), [(0.84, 1.0, 0.0), (0.5, 0.9, 0.0), (1.0, 1.0, 0.5)])
def test_members_and_others_that_look_swapped_are_doubted(inside, outside, shift):
    (check,) = doubt_order(*answers_of(inside, outside, shift=shift))
    assert not check.holds and check.sentence.startswith("members and others look swapped")
    assert "the first train_size rows (or the file's member column)" in check.sentence


@pytest.mark.parametrize("right", [0.3, 0.9, 0.99, 1.0])
def test_a_model_as_good_on_others_is_not_doubted_by_chance(right):
    assert not any(doubt_order(*answers_of(right, right, seed=seed)) for seed in range(50))


def test_a_defense_that_leaves_members_less_confident_is_not_doubted():
    assert doubt_order(*answers_of(0.95, 0.9, shift=0.5)) == []
