import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import memorise, noisy_digits, rng, rows, table

from secateur.attacks.membership.blindmi import (
    WIDTHS,
    blindmi,
    compare,
    features,
    kernel,
    mmd2,
    shuffle_columns,
    sobel,
)
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates


def plain_mmd2(x, y):
    """The definition, pair by pair."""

    def k(a, b):
        square = sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
        return sum(math.exp(-square / (2 * w)) for w in WIDTHS)

    def mean(first, second):
        return sum(k(a, b) for a in first for b in second) / (len(first) * len(second))

    return max(mean(x, x) + mean(y, y) - 2 * mean(x, y), 1e-4)


def plain_compare(points, generated, size):
    """The algorithm as published, batch by batch and example by example."""
    decided = []
    for start in range(0, len(points), size):
        batch = points[start : start + size]
        inside, outside = set(range(len(batch))), list(generated)
        moved = True
        while moved:
            moved = False
            for i in sorted(inside):
                rest = [batch[j] for j in sorted(inside - {i})]
                if not rest:
                    continue
                now = plain_mmd2([batch[j] for j in sorted(inside)], outside)
                if plain_mmd2(rest, [*outside, batch[i]]) > now + 1e-12:
                    inside, moved = inside - {i}, True
                    outside.append(batch[i])
        decided += [i in inside for i in range(len(batch))]
    return decided


def test_there_are_19_kernels_from_1e_minus_6_to_1e6():
    assert len(WIDTHS) == 19 and min(WIDTHS) == 1e-6 and max(WIDTHS) == 1e6


def test_features_are_the_true_labels_probability_and_the_two_largest():
    p = torch.tensor([[0.1, 0.6, 0.3], [0.5, 0.2, 0.3]])
    assert features(p, torch.tensor([2, 0])).tolist() == [
        pytest.approx([0.3, 0.6, 0.3]),
        pytest.approx([0.5, 0.5, 0.3]),
    ]


def test_mmd_by_hand():
    points = torch.tensor([[0.0], [1.0], [3.0]], dtype=torch.float64)
    k = kernel(points)
    assert k[0, 0] == 19 and k[0, 1] == k[1, 0]
    assert float(k[0, 1]) == pytest.approx(sum(math.exp(-0.5 / w) for w in WIDTHS), rel=1e-12)
    inside, outside = torch.tensor([[1.0, 1.0, 0.0]]).double(), torch.tensor([[0.0, 0.0, 1.0]]).double()
    # mean over the four pairs inside, the one outside, and twice the two across
    expected = (19 + 19 + 2 * k[0, 1]) / 4 + 19 - (k[0, 2] + k[1, 2])
    assert float(mmd2(k[None], inside, outside)) == pytest.approx(float(expected), rel=1e-12)
    assert float(expected) == pytest.approx(plain_mmd2([[0.0], [1.0]], [[3.0]]), rel=1e-12)
    assert float(mmd2(k[None], inside, inside)) == 1e-4  # equal sets: the clamp


def test_one_batch_by_hand():
    # generated non-members near 0; one candidate there, two far away: moving the first alone raises the distance
    points = torch.tensor([[0.9], [0.0], [1.0]], dtype=torch.float64)
    generated = torch.tensor([[0.0], [0.05]], dtype=torch.float64)
    assert compare(points, generated, 20).tolist() == [True, False, True]


def test_the_last_member_of_a_batch_stays():
    points = torch.zeros(1, 3, dtype=torch.float64)
    assert compare(points, points, 20).tolist() == [True]


@given(
    number=st.integers(1, 17),
    size=st.integers(2, 6),
    grid=st.sampled_from([3, 1000]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=40, deadline=None)
def test_all_batches_together_equal_one_after_the_other(number, size, grid, seed):
    draw = torch.randint(grid, (number + 4, 3), generator=rng(seed)).double() / grid
    points, generated = draw[:number], draw[number:]
    assert compare(points, generated, size).tolist() == plain_compare(points.tolist(), generated.tolist(), size)


def test_sobel_by_hand():
    ramp = torch.arange(4.0).expand(1, 2, 4, 4)  # rises by 1 a column: slope 8 inside, half at the repeated border
    assert sobel(ramp)[0, 1].tolist() == [[2.0, 4.0, 4.0, 2.0]] * 4  # the mean with a vertical slope of 0
    assert torch.equal(sobel(ramp.transpose(2, 3)), sobel(ramp).transpose(2, 3))
    assert sobel(torch.ones(1, 3, 5, 5)).abs().max() == 0


def test_generated_rows_have_the_columns_means():
    bits = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
    found = shuffle_columns(bits, 4000, rng())
    assert found.mean(0).tolist() == [0.0, 1.0, pytest.approx(0.75, abs=0.03)]
    assert shuffle_columns(torch.rand(5, 2, 3), 7, rng()).shape == (7, 2, 3)


def linear_box(seed):
    weights = torch.randn(5, 4, generator=rng(seed), dtype=torch.float64) * 2
    return BlackBox(lambda inputs: (inputs.double() @ weights).softmax(1))


def test_the_order_of_the_candidates_does_not_matter_nor_do_copies():
    inputs, labels = torch.randn(75, 5, generator=rng(4)), torch.randint(4, (75,), generator=rng(5))
    inputs[70:], labels[70:] = inputs[:5], labels[:5]
    box, fitted = linear_box(1), blindmi().fit([], rng())
    found = fitted.score(box, Candidates(Batch(inputs, labels)))
    assert torch.equal(found.scores, found.members.double())  # the score is the decision
    assert torch.equal(found.members[70:], found.members[:5])
    assert 0 < found.members.sum() < 75
    for seed in range(3):
        order = torch.randperm(75, generator=rng(seed))
        turned = fitted.score(box, Candidates(Batch(inputs[order], labels[order])))
        assert torch.equal(turned.members, found.members[order])
    assert torch.equal(fitted.score(box, Candidates(Batch(inputs, labels))).scores, found.scores)


def test_it_finds_the_members_of_a_network_that_memorised_and_needs_no_shadows():
    data = noisy_digits(800, noise=0.5)
    members, others = data.take(torch.arange(400)), data.take(torch.arange(400, 800))
    box = memorise(members, 0, 10, steps=200)
    candidates = Candidates(
        Batch(torch.cat([members.inputs, others.inputs]), torch.cat([members.labels, others.labels]))
    )
    found = blindmi().fit([], rng()).score(box, candidates).members
    assert (found[:400].double().mean() + (~found[400:]).double().mean()) / 2 > 0.7


def test_wrong_input_is_said_clearly():
    with pytest.raises(WrongInput, match="batch: 1 is not allowed; must be a whole number, at least 2"):
        blindmi(batch=1)
    with pytest.raises(WrongInput, match="labels only"):
        blindmi().fit([], rng()).score(BlackBox(table(0.5).predict, labels_only=True), Candidates(rows(0)))
