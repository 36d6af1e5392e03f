import math

import pytest
import torch

from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox
from secateur.metrics.gaps import absolute, difference_of_means, difference_of_shares, gaps
from secateur.metrics.membership import Estimate


def scene():
    """f(x) = (x, 1 - x), so p_y and the sensitivity are known."""
    box = BlackBox(lambda x: torch.cat([x, 1 - x], 1))
    members = Batch(torch.tensor([[0.9], [0.7], [0.2], [0.4]], dtype=torch.float64), torch.tensor([0, 0, 1, 1]))
    nonmembers = Batch(torch.tensor([[0.6], [0.4], [0.5], [0.3]], dtype=torch.float64), torch.tensor([0, 0, 1, 2 - 1]))
    return box, members, nonmembers


def test_equation_3_by_hand(rng):
    found = gaps(*scene(), rng)["confidence_gap"]
    # p_y of members .9 .7 .8 .6, of non-members .6 .4 .5 .7
    assert found.overall.value == pytest.approx(3.0 / 4 - 2.2 / 4)
    assert found.classes[0].value == pytest.approx(0.8 - 0.5)
    assert found.classes[1].value == pytest.approx(0.7 - 0.6)
    # variances (n - 1): .05 / 3 and .05 / 3, each over 4
    spread = 1.959964 * math.sqrt(2 * (0.05 / 3) / 4)
    assert found.overall.low == pytest.approx(0.2 - spread) and found.overall.high == pytest.approx(0.2 + spread)


def test_equation_4_by_hand_with_either_sign():
    # f(x) = (x^2, 1 - x^2): the sensitivity at x is about 2 |x| mean |d|, the same for both classes
    box = BlackBox(lambda x: torch.cat([x**2, 1 - x**2], 1))
    low = Batch(torch.full((4000, 1), 0.2, dtype=torch.float64), torch.arange(4000) % 2)
    high = Batch(torch.full((4000, 1), 0.6, dtype=torch.float64), torch.arange(4000) % 2)
    mean = math.sqrt(2 / math.pi)
    for members, nonmembers, sign in ((low, high, -1), (high, low, 1)):
        found = gaps(box, members, nonmembers, torch.Generator().manual_seed(0))
        expected = sign * 2 * 0.4 * mean
        assert found["sensitivity_gap"].overall.value == pytest.approx(expected, rel=0.02)
        assert found["sensitivity_gap"].classes[1].value == pytest.approx(expected, rel=0.03)
        size = found["sensitivity_gap_size"].overall
        assert size.value == abs(found["sensitivity_gap"].overall.value)
        assert 0 < size.low < size.value < size.high


def test_generalisation_gap_by_hand(rng):
    found = gaps(*scene(), rng)["generalisation_gap"]
    # right: all four members; of the non-members .6 (0) and .3 (1); .5 is a tie that argmax gives to class 0
    assert found.overall.value == pytest.approx(1 - 0.5)
    assert found.classes[0].value == pytest.approx(1 - 0.5)
    assert found.overall.low < found.overall.value <= found.overall.high <= 1


def test_newcombes_interval_by_hand():
    # Newcombe (1998), method 10: 56/70 against 48/80 gives .2000 (.0524, .3339)
    members, nonmembers = torch.arange(70) < 56, torch.arange(80) < 48
    found = difference_of_shares(members, nonmembers)
    assert (found.value, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=1e-4)


def test_a_normal_interval_covers_the_truth_as_often_as_it_says():
    rng = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(300):
        found = difference_of_means(1 + torch.randn(60, generator=rng), 2 * torch.randn(90, generator=rng))
        covered += found.low <= 1 <= found.high
    assert 270 <= covered <= 297


def test_the_size_of_a_gap_that_may_be_zero_begins_at_zero():
    assert absolute(Estimate(-0.1, -0.3, 0.2)) == Estimate(0.1, 0.0, 0.3)
    assert absolute(Estimate(-0.2, -0.3, -0.1)) == Estimate(0.2, 0.1, 0.3)


def test_a_class_without_two_on_each_side_is_left_out_and_too_few_rows_are_refused(rng):
    box, members, nonmembers = scene()
    few = nonmembers.take(torch.tensor([0, 1, 2]))
    assert list(gaps(box, members, few, rng)["confidence_gap"].classes) == [0]
    with pytest.raises(WrongInput, match="two members"):
        gaps(box, members, nonmembers.take(torch.tensor([0])), rng)
