"""Reconstructions against truths, by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from secateur.evaluation.reconstruction import (
    Scoring,
    compare,
    join_outcomes,
    judge,
    recognise,
    share_by_target,
    summary_rows,
    target_rows,
)
from secateur.interfaces import Batch, Knowledge, Reconstruction
from secateur.metrics.lpips import Lpips
from secateur.metrics.membership import share_of

ONES = torch.ones(1, 1, 1)
KNOWN = Knowledge(torch.nn.Identity(), (1, 2, 2), 3, 0 * ONES, ONES, batch_size=2)
LABELS = {"model": "m", "dataset": "d", "seed": 0, "attack": "a", "adaptive": False, "extra": {"labels": "inferred"}}


def pictures(*values):
    return torch.tensor(values).view(-1, 1, 1, 1).expand(-1, 1, 2, 2).clone()


def made(values, labels, **more):
    return Reconstruction(Batch(pictures(*values), torch.tensor(labels, dtype=torch.int64)), 0.25, **more)


def summed(outcome):
    rows = summary_rows(LABELS, outcome, torch.Generator().manual_seed(0))
    assert all(row.extra["target"] is None for row in rows)
    return {row.metric: row for row in rows}


def test_pictures_are_put_in_the_order_of_their_truths():
    alike = compare(Batch(pictures(0.0, 1.0), torch.tensor([1, 2])), made([0.9, 0.2], [2, 0]), KNOWN)
    assert torch.allclose(alike.guess[:, 0, 0, 0], torch.tensor([0.2, 0.9], dtype=torch.float64))
    assert alike.labels == [0, 2]
    assert alike.returned.tolist() == [True, True]
    assert alike.right.tolist() == [True, False]  # one of two labels


def test_what_was_not_found_is_grey_and_counted():
    truth = Batch(pictures(0.0, 1.0), torch.tensor([1, 1]))
    alike = compare(truth, made([0.9], [1]), KNOWN)
    assert torch.allclose(alike.guess[:, 0, 0, 0], torch.tensor([0.5, 0.9], dtype=torch.float64))
    assert alike.returned.tolist() == [False, True] and alike.labels == [None, 1]
    assert alike.right.tolist() == [True, False]  # the label that occurs twice was found once
    nothing = compare(truth, None, KNOWN)
    assert nothing.returned.tolist() == [False, False] and bool((nothing.guess == 0.5).all())
    broken = compare(truth, made([float("nan"), 0.1], [1, 1]), KNOWN)
    assert broken.returned.tolist() == [True, False]


def test_where_every_trial_diverged_nothing_was_found_but_labels_may_be():
    truth = Batch(pictures(0.0, 1.0), torch.tensor([1, 2]))
    guess = replace(made([0.0, 1.0], [1, 0]), loss=float("inf"))
    alike = compare(truth, guess, KNOWN)
    assert alike.returned.tolist() == [False, False] and bool((alike.guess == 0.5).all())
    assert alike.labels == [None, None]
    assert alike.right.tolist() == [True, False]
    rows = summed(judge([truth], [guess], KNOWN, scoring=Scoring(None)))
    assert rows["returned"].value == 0 and rows["label_accuracy"].value == 0.5 and rows["recognisable"].value == 0


def test_more_pictures_than_there_were_are_not_a_merit():
    alike = compare(Batch(pictures(0.0, 1.0), torch.tensor([0, 1])), made([0.5, 0.1, 0.9], [0, 1, 2]), KNOWN)
    assert torch.allclose(alike.guess[:, 0, 0, 0], torch.tensor([0.1, 0.9], dtype=torch.float64))


def test_rows_of_targets_and_of_all_of_them():
    truths = [Batch(pictures(0.0, 1.0), torch.tensor([0, 1])), Batch(pictures(0.3, 0.7), torch.tensor([2, 2]))]
    first = judge(truths[:1], [made([0.1, 0.9], [0, 1], trial=3, note="so")], KNOWN, 2.0, Scoring(None))
    second = judge(truths[1:], [made([0.3], [0], diverged=2)], KNOWN, 3.0, Scoring(None))
    rows = target_rows(LABELS, [7], first)
    assert {(row.extra["target"], row.extra["trial"]) for row in rows} == {(7, 3)}
    mse = [row.value for row in rows if row.metric == "mse"]
    assert torch.allclose(torch.tensor(mse), torch.tensor([0.01, 0.01]))
    assert [row.extra["item"] for row in rows if row.metric == "mse"] == [0, 1]
    assert next(row for row in rows if row.metric == "attack_loss").note == "so"

    found = summed(join_outcomes([first, second]))
    assert abs(found["mse"].value - (0.01 + 0.01 + 0 + 0.04) / 4) < 1e-6 and found["mse"].low <= found["mse"].value
    assert abs(found["mse_max"].value - 0.04) < 1e-6 and found["mse_min"].value < 1e-12
    assert found["returned"].value == 0.75 and found["label_accuracy"].value == 0.5
    assert found["identified"].value == 0.75
    assert found["identified_chance"].value == 3 / 8  # its own pairing's three, and none of the crossed one's
    assert found["recognisable"].value == 0.75  # all that were found
    assert found["diverged"].value == 2 and found["seconds"].value == 5.0 and found["seconds"].timing
    assert found["lpips"].value is None and "absent" in found["lpips"].note
    assert found["attack_loss"].note == "so"


def test_a_picture_is_recognisable_when_it_is_its_own_and_clearer_than_grey():
    truths = [Batch(pictures(0.0, 1.0), torch.tensor([0, 1]))]
    for values, identified, clear in (([0.3, 0.7], 1.0, 0.0), ([0.24, 0.7], 1.0, 0.5), ([0.6, 0.1], 1.0, 0.5)):
        found = summed(judge(truths, [made(values, [0, 1])], KNOWN, 0.0, Scoring(None)))
        assert (found["identified"].value, found["recognisable"].value) == (identified, clear), values
    one = judge([Batch(pictures(0.0), torch.tensor([0]))], [made([0.1], [0])], KNOWN, 0.0, Scoring(None))
    assert summed(one)["recognisable"].value == 1.0 and "identified" not in summed(one)


def shapes(rng, number=6):
    """Smooth pictures (N, 1, 16, 16) that differ from each other."""
    rough = torch.rand(number, 1, 4, 4, generator=rng, dtype=torch.float64)
    return torch.nn.functional.interpolate(rough, size=(16, 16), mode="bilinear")


def test_a_viewer_looks_through_noise_and_so_does_the_second_judge(rng):
    """Finding 2: a denoiser brought pictures over the tool's own rule, and the badge was green."""
    truth, every = shapes(rng), torch.ones(6, dtype=torch.bool)
    noisy = (truth + 0.15 * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    judged = recognise(truth, noisy, every)
    assert judged["squares"].sum() < judged["denoised"].sum() == 6
    for nothing in (torch.rand(truth.shape, generator=rng).double(), torch.full_like(truth, 0.5)):
        judged = recognise(truth, nothing, every)
        assert not judged["squares"].any() and not judged["denoised"].any()
    assert not any(hits.any() for hits in recognise(truth, noisy, ~every).values())  # the attack returned nothing
    dark = 0.02 * truth  # nearly one colour: a picture of that colour shows nothing
    flat = dark.mean((2, 3), keepdim=True).expand_as(dark)
    assert not recognise(dark, flat, every)["denoised"].any()


def test_lpips_judges_against_other_truths_where_it_can(rng, monkeypatch):
    def distance(truth, guess, weights):
        return Lpips((truth - guess).abs().mean((1, 2, 3)), None)

    monkeypatch.setattr("secateur.evaluation.reconstruction.lpips", distance)
    truth, every = shapes(rng), torch.ones(6, dtype=torch.bool)
    assert recognise(truth, 0.9 * truth, every, {})["lpips"].all()
    between = (truth + truth.roll(1, 0)) / 2 + 1e-3 * (truth - truth.roll(1, 0))  # hardly nearer to the own truth
    assert not recognise(truth, between, every, {})["lpips"].any()
    assert "lpips" not in recognise(truth, truth, every) and "lpips" not in recognise(truth[:1], truth[:1], every[:1])


@pytest.mark.data
def test_lpips_with_its_published_weights_recognises_photographs_that_squares_do_not(rng, data_folder, lpips_weights):
    """Dimmed photographs are far off in squares, and anyone recognises them; blends, noise and grey are no one's."""
    rows = np.fromfile(data_folder / "cifar-10-batches-bin" / "test_batch.bin", np.uint8, 8 * 3073).reshape(8, 3073)
    truth = torch.from_numpy(rows[:, 1:]).view(8, 3, 32, 32).double() / 255
    every, noise = torch.ones(8, dtype=torch.bool), torch.randn(truth.shape, generator=rng, dtype=torch.float64)

    def count(guess):
        return {judge: int(hits.sum()) for judge, hits in recognise(truth, guess, every, lpips_weights).items()}

    assert count((truth + 0.05 * noise).clamp(0, 1))["lpips"] == 8
    dimmed = count(0.6 * truth)
    assert dimmed["lpips"] >= 5 and dimmed["lpips"] > dimmed["squares"] and dimmed["lpips"] > dimmed["denoised"]
    blend = (truth + truth.roll(1, 0)) / 2 + 1e-3 * (truth - truth.roll(1, 0))
    for nothing in (blend, torch.full_like(truth, 0.5), torch.rand(truth.shape, generator=rng).double(), 1 - truth):
        assert count(nothing)["lpips"] == 0


def test_the_rows_say_which_judge_recognised(rng):
    truth = shapes(rng)
    noisy = (truth + 0.15 * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    truths = [Batch(picture[None].float(), torch.tensor([0])) for picture in truth]
    guesses = [Reconstruction(Batch(picture[None].float(), torch.tensor([0])), 0.25) for picture in noisy]
    known = replace(KNOWN, input_shape=(1, 16, 16), batch_size=1)
    found = summed(judge(truths, guesses, known, scoring=Scoring(None)))
    assert found["recognisable"].value == found["recognisable_denoised"].value == 1
    assert found["recognisable_squares"].value < 1 and "recognised by" in found["recognisable"].note
    assert "denoised" in found["recognisable"].note and "lpips" not in found["recognisable"].note
    assert (found["updates"].value, found["pictures"].value) == (6, 6)


def test_matching_noise_to_truths_is_not_above_chance():
    rng = torch.Generator().manual_seed(0)

    def shares(targets, size, clear=0.0):
        truths, guesses = [], []
        for _ in range(targets):
            pixels = torch.rand(size, 1, 4, 4, generator=rng)
            noise = torch.rand(size, 1, 4, 4, generator=rng)
            truths.append(Batch(pixels, torch.zeros(size, dtype=torch.int64)))
            guesses.append(Reconstruction(Batch(clear * pixels + (1 - clear) * noise, truths[-1].labels), 0.25))
        known = replace(KNOWN, input_shape=(1, 4, 4), batch_size=size)
        found = summed(judge(truths, guesses, known, 0.0, Scoring(None)))
        return found["identified"], found["identified_chance"].value

    alone, chance = shares(1, 60)
    assert alone.value > 0.15 and chance == alone.value  # far more than one in 60, and nothing to hold it against
    noise, chance = shares(8, 16)
    assert noise.value > 2 / 128 and noise.low <= chance
    seen, chance = shares(8, 16, clear=0.8)
    assert seen.low > chance and seen.value > 0.9
    assert shares(9, 1)[1] == 1 / 9


def test_labels_that_were_told_are_no_finding():
    truths = [Batch(pictures(0.0, 1.0), torch.tensor([0, 1]))]
    outcome = judge(truths, [made([0.1, 0.9], [0, 1])], KNOWN, 0.0, Scoring(None))
    rows = summary_rows(LABELS | {"extra": {"labels": "oracle"}}, outcome, torch.Generator().manual_seed(0))
    assert next(row for row in rows if row.metric == "label_accuracy").value is None


def test_without_a_truth_there_are_pictures_and_the_attacks_loss():
    outcome = judge([None], [made([0.1, 0.9], [0, 1])], KNOWN, 0.0, Scoring(None))
    assert len(outcome.matches[0].guess) == 2
    assert set(summed(outcome)) == {
        "diverged",
        "failed",
        "seconds",
        *(f"attack_loss{x}" for x in ("", "_median", "_min", "_max")),
    }


def test_notes_of_many_targets_are_told_once_and_not_without_end():
    truths = [Batch(pictures(0.0, 1.0), torch.tensor([0, 1]))] * 20

    def note(of):
        guesses = [made([0.1, 0.9], [0, 1], note=of(i)) for i in range(20)]
        return summed(judge(truths, guesses, KNOWN, scoring=Scoring(None)))["attack_loss"].note

    assert note(lambda i: "labels: bias; every trial diverged" if i == 3 else "labels: bias") == (
        "labels: bias; every trial diverged"
    )
    long = note(lambda i: f"first layer: condition {i}; in float64")
    assert long.startswith("first layer: condition 0; in float64; first layer: condition 1;")
    assert long.endswith("condition 6; 13 more in the rows of the targets")


def test_targets_are_resampled_not_pictures():
    """Two updates of three pictures each, all found of one and none of the other: two facts, not six."""
    truths = [Batch(pictures(0.4, 0.45, 0.6), torch.tensor([0, 1, 2]))] * 2
    known = replace(KNOWN, batch_size=3)
    guesses = [made([0.4, 0.45, 0.6], [0, 1, 2]), made([], [])]
    rows = summed(judge(truths, guesses, known, scoring=Scoring(None)))
    two = share_of(0.5, 2)
    assert (rows["returned"].low, rows["returned"].high) == (two.low, two.high)
    assert "over the 2 targets, each with all its pictures" in rows["mse"].note
    values = [float(value) for value in judge(truths, guesses, known, scoring=Scoring(None)).scores.values["mse"]]
    first, second = sum(values[:3]) / 3, sum(values[3:]) / 3
    half = abs(first - second) / 2  # Student's: 12.7062 times it, where six independent pictures would make it small
    assert rows["mse"].high - rows["mse"].value == pytest.approx(12.7062 * half, rel=1e-5)


def test_a_share_is_worth_at_most_its_pictures_and_at_least_differs_by_targets():
    alternating = torch.tensor([True, False] * 4)
    assert share_by_target(alternating, [2] * 4) == share_of(0.5, 4)  # no target differs: as many as there are targets
    assert share_by_target(alternating, [1] * 8) == share_of(0.5, 8)
    assert share_by_target(torch.ones(9, dtype=torch.bool), [9]) == share_of(1.0, 1)
    unequal = share_by_target(torch.tensor([True, True, True, False]), [3, 1])
    assert unequal == share_of(0.75, 0.75 * 0.25 * 16 / (0.75**2 + 0.75**2))
