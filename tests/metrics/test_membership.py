import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, roc_auc_score, roc_curve

from secateur.interfaces import Guesses
from secateur.metrics.membership import auc, evaluate, roc, share, tpr_at_fpr


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
    result = evaluate(guesses, member, torch.Generator().manual_seed(1))
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
        estimate = evaluate(Guesses(scores, scores > 0.5), member, generator, resamples=200)["auc"]
        inside += estimate.low <= 0.7602 <= estimate.high
    assert 86 <= inside <= 100


def test_intervals_are_the_same_for_the_same_seed():
    member = torch.arange(50) < 25
    guesses = Guesses(torch.arange(50.0) % 7, torch.arange(50) % 2 == 0)
    first, second = (evaluate(guesses, member, torch.Generator().manual_seed(3)) for _ in range(2))
    assert first == second


def test_wilson_interval_by_hand():
    # 8 of 10: the published Wilson interval is (0.4902, 0.9433)
    estimate = share(torch.tensor([1] * 8 + [0] * 2))
    assert (estimate.value, round(estimate.low, 4), round(estimate.high, 4)) == (0.8, 0.4902, 0.9433)
