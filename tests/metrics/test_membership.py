import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import balanced_accuracy_score, roc_auc_score, roc_curve

from secateur.interfaces import Guesses
from secateur.metrics.estimates import difference, paired_drop
from secateur.metrics.membership import auc, auc_change, evaluate, placements, roc, share, tpr_at_fpr, tpr_interval


def test_auc_by_hand_counts_a_tie_as_a_half():
    # pairs (member, non-member): 3>2, 3>1, 2=2, 2>1 -> (1 + 1 + .5 + 1) / 4
    curve = roc(torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([True, True, False, False]))
    assert float(auc(curve)) == 0.875
    assert float(tpr_at_fpr(curve, 0.0)) == 0.5
    assert float(tpr_at_fpr(curve, 0.5)) == 1.0


@given(
    scores=st.lists(st.integers(0, 6), min_size=4, max_size=60),
    seed=st.integers(0, 1000),
    fpr=st.sampled_from([0.001, 0.01, 0.1, 0.3]),
)
@settings(max_examples=100, deadline=None)
def test_equals_scikit_learn_with_many_ties(scores, seed, fpr):
    generator = torch.Generator().manual_seed(seed)
    member = torch.rand(len(scores), generator=generator) < 0.5
    member[0], member[1] = True, False
    values = torch.tensor(scores, dtype=torch.float64)
    curve = roc(values, member)
    assert float(auc(curve)) == pytest.approx(roc_auc_score(member.numpy(), values.numpy()), abs=1e-12)
    false, true, _ = roc_curve(member.numpy(), values.numpy(), drop_intermediate=False)
    assert float(tpr_at_fpr(curve, fpr)) == pytest.approx(true[false <= fpr + 1e-12].max(), abs=1e-12)


def test_every_measure_and_its_interval():
    generator = torch.Generator().manual_seed(0)
    member = torch.arange(400) < 200
    scores = torch.randn(400, generator=generator) + member
    guesses = Guesses(scores, scores > 0.5)
    result = evaluate(guesses, member)
    expected = balanced_accuracy_score(member.numpy(), guesses.members.numpy())
    assert result["balanced_accuracy"].value == pytest.approx(expected)
    assert result["attack_accuracy"].value == pytest.approx(expected)  # as many members as non-members
    assert result["advantage"].value == pytest.approx(2 * expected - 1)
    for name, estimate in result.items():
        assert estimate.low <= estimate.value <= estimate.high, name
    # Hanley and McNeil's standard error of an AUC of .77 from 200 + 200 is .023
    width = result["auc"].high - result["auc"].low
    assert 0.06 < width < 0.13
    assert result["tpr_at_fpr_0.1"].note is None
    assert "200 non-members" in result["tpr_at_fpr_0.001"].note


def test_intervals_cover_the_truth_about_as_often_as_they_say():
    # the true AUC of N(1,1) against N(0,1) is Phi(1 / sqrt 2) = .7602
    generator = torch.Generator().manual_seed(2)
    member = torch.arange(120) < 60
    inside = 0
    for _ in range(100):
        scores = torch.randn(120, generator=generator) + member
        estimate = evaluate(Guesses(scores, scores > 0.5), member)["auc"]
        inside += estimate.low <= 0.7602 <= estimate.high
    assert 86 <= inside <= 100


def test_the_interval_of_a_tpr_by_hand():
    # B(100, .1): P[B < 5] = .0237, P[B > 16] = .0206; so the threshold lies between the 5th and the 17th non-member.
    members = [99.5, 97.5, 94.5, 92.5, 88.5, 85.5, 50.5, 40.5, 30.5, 20.5]
    scores = torch.cat([torch.tensor(members), torch.arange(1.0, 101)]).double()
    curve = roc(scores, torch.arange(110) < 10)
    estimate = tpr_interval(curve, 10, 100, 0.1)
    # 4 members lie above 90, 2 above the 5th non-member, 6 at or above the 17th; Clopper and Pearson for 4 of 10
    low, high = 0.1215523, 0.7376219
    assert estimate.value == pytest.approx(0.4)
    assert estimate.low == pytest.approx(0.4 - math.hypot(0.4 - low, 0.2), abs=1e-6)
    assert estimate.high == pytest.approx(0.4 + math.hypot(high - 0.4, 0.2), abs=1e-6)


def test_too_few_non_members_cannot_place_a_threshold():
    # 300 others: with a chance of .99^300 = .049 none of them lies beyond the true threshold, so nothing is certain
    member = torch.arange(600) < 300
    estimate = tpr_interval(roc(member.double(), member), 300, 300, 0.01)
    assert (estimate.value, estimate.low, estimate.high) == (1.0, 0.0, 1.0)
    assert tpr_interval(roc(member.double(), member), 300, 300, 0.1).low == pytest.approx(0.025 ** (1 / 300))


def test_ties_widen_the_interval_of_a_tpr():
    member = torch.arange(2000) < 1000
    coarse = torch.arange(2000) % 4  # a guess with four values: a quarter of all ties at the top
    estimate = tpr_interval(roc(coarse.double(), member), 1000, 1000, 0.1)
    assert (estimate.value, estimate.low) == (0.0, 0.0) and estimate.high > 0.25


@pytest.mark.parametrize("shift", [0.0, 1.0])
@pytest.mark.parametrize(("members", "others"), [(1000, 1000), (200, 1000)])
def test_intervals_of_a_tpr_cover_the_truth(members, others, shift):
    rng, draws = torch.Generator().manual_seed(5), 400
    member, missed, alarms = torch.arange(members + others) < members, 0, 0
    truth = float(norm.sf(norm.isf(0.01) - shift))
    for _ in range(draws):
        scores = torch.randn(members + others, generator=rng, dtype=torch.float64) + shift * member
        estimate = tpr_interval(roc(scores, member), members, others, 0.01)
        alarms += estimate.low > truth
        missed += not estimate.low <= truth <= estimate.high
    assert missed <= 0.05 * draws and alarms <= 0.025 * draws


def test_the_interval_of_an_auc_by_hand():
    # members 4, 3, 1; non-members 3, 2, 0: placements 1, 5/6, 1/3 of members and 1/2, 2/3, 1 of non-members
    scores, member = torch.tensor([4.0, 3.0, 1.0, 3.0, 2.0, 0.0]), torch.tensor([True] * 3 + [False] * 3)
    inside, outside = placements(scores, member)
    assert inside.tolist() == pytest.approx([1, 5 / 6, 1 / 3]) and outside.tolist() == pytest.approx([1 / 2, 2 / 3, 1])
    # their means are the AUC, 13/18; their variances 13/108 and 7/108, each over 3 rows, add up to (20/108) / 3
    estimate = evaluate(Guesses(scores, None), member)["auc"]
    radius = 1.959964 * math.sqrt(20 / 108 / 3)
    assert estimate.value == pytest.approx(13 / 18)
    assert estimate.low == pytest.approx(13 / 18 - radius) and estimate.high == 1.0  # 1.21 is no AUC


def test_the_interval_of_an_auc_is_that_of_resampled_rows():
    rng, member = torch.Generator().manual_seed(4), torch.arange(600) < 200
    scores = (torch.randn(600, generator=rng) + member).round(decimals=1)  # with ties
    draws = []
    for _ in range(1000):
        rows = torch.cat([torch.randint(200, (200,), generator=rng), 200 + torch.randint(400, (400,), generator=rng)])
        draws.append(float(auc(roc(scores[rows].double(), member))))
    low, high = torch.tensor(draws).quantile(torch.tensor([0.025, 0.975])).tolist()
    estimate = evaluate(Guesses(scores, None), member)["auc"]
    assert (estimate.low, estimate.high) == pytest.approx((low, high), abs=0.006)


def test_measures_of_decisions_by_hand():
    # 8 of 10 members accepted, Wilson (.4902, .9433); 10 of 20 non-members rejected, Wilson (.2993, .7007)
    member, decided = torch.arange(30) < 10, torch.arange(30) < 20
    decided[8:10] = False
    result = evaluate(Guesses(decided.double(), decided), member)
    assert result["advantage"].value == pytest.approx(0.3)
    assert result["advantage"].low == pytest.approx(0.3 - math.hypot(0.8 - 0.4902, 0.5 - 0.2993), abs=1e-4)
    assert result["attack_accuracy"].value == pytest.approx((8 + 10) / 30)
    up = math.hypot((0.9433 - 0.8) / 3, (0.7007 - 0.5) * 2 / 3)
    assert result["attack_accuracy"].high == pytest.approx(0.6 + up, abs=1e-4)


def test_wilson_interval_by_hand():
    # 8 of 10: the published Wilson interval is (0.4902, 0.9433)
    estimate = share(torch.tensor([1] * 8 + [0] * 2))
    assert (estimate.value, round(estimate.low, 4), round(estimate.high, 4)) == (0.8, 0.4902, 0.9433)


def test_the_paired_drop_by_hand():
    # Ten rows: two hits are lost and none is won. With half a row in each cell b = 2.5, c = .5 and n = 12, so that
    # (b - c) / n = .16667 and 1.959964 * sqrt(b + c - (b - c)^2 / n) / n = .26672.
    before, after = torch.arange(10) < 8, torch.arange(10) < 6
    drop = paired_drop(before, after)
    assert drop[:3] == pytest.approx((0.2, 0.16667 - 0.26672, 0.16667 + 0.26672), abs=1e-4)
    back = paired_drop(after, before)
    assert back[:3] == pytest.approx((-0.2, -drop.high, -drop.low))
    # One hit lost and one won: no drop, though the models disagree on two rows.
    swapped = paired_drop(torch.tensor([True, False, True]), torch.tensor([False, True, True]))
    assert swapped.value == 0 and swapped.low == -swapped.high < 0


def test_pairing_narrows_the_drop_of_models_that_agree():
    generator = torch.Generator().manual_seed(0)
    before = torch.rand(1000, generator=generator) < 0.8
    after = before & (torch.rand(1000, generator=generator) < 0.97)
    paired, apart = paired_drop(before, after), difference(share(before), share(after))
    assert paired.value == pytest.approx(apart.value)
    assert paired.low > 0 and paired.high - paired.low < (apart.high - apart.low) / 2


def scored(seed, rows=400):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, generator=generator), torch.arange(rows) < rows // 2


def test_equal_scores_change_nothing_and_their_interval_is_empty():
    scores, member = scored(0)
    for after in (scores, scores.double().exp()):  # the same ranking
        assert auc_change(scores, after, member)[:3] == (0.0, 0.0, 0.0)


def test_a_known_change_of_the_auc():
    scores, member = scored(1)
    tied, perfect = torch.zeros(400), member.float()
    assert auc_change(tied, perfect, member)[:3] == (0.5, 0.5, 0.5)
    assert auc_change(perfect, tied, member)[:3] == (-0.5, -0.5, -0.5)
    shifted = scores + member
    change = auc_change(scores, shifted, member)
    both = [float(auc(roc(side, member))) for side in (scores, shifted)]
    assert change.value == pytest.approx(both[1] - both[0], abs=1e-12)
    # From chance to the AUC of N(1, 1) against N(0, 1), Phi(1 / sqrt 2) = .7602: a change of .26.
    assert change.low < 0.2602 < change.high


def test_pairing_narrows_the_change_of_the_auc():
    noise, member = scored(2)
    before, after = noise + member, noise + 1.1 * member
    change = auc_change(before, after, member)
    sides = [evaluate(Guesses(side, None), member)["auc"] for side in (before, after)]
    apart = difference(sides[1], sides[0])
    assert 0 < change.low < change.value < change.high < apart.high and apart.low < 0
