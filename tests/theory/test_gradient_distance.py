"""The distance of an update, gamma_1 and what dgp's appendix says of it, by hand."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dgp_theorems import gamma_1, lower_bound, printed_lower_bound, share_of_top_sent, top_bounds
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import ErrorFeedback
from secateur.defenses.selection import mask_between
from secateur.defenses.top_k import TopK
from secateur.theory.gradient_distance import cosine_distance, distance, norm, relative_distance

HEAVY = st.floats(0, 6)  # the power that entries are raised to: from even to a few that hold everything


def entries(seed: int, size: int, heavy: float) -> torch.Tensor:
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return drawn.sign() * drawn.abs() ** heavy


def test_distances_over_all_tensors_together_by_hand():
    a = {"w": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([4.0])}
    b = {"w": torch.tensor([[3.0, 0.0]]), "b": torch.tensor([0.0])}
    assert (norm(a), distance(a, b), relative_distance(a, b)) == (5, 4, 0.8)
    assert cosine_distance(a, b) == pytest.approx(1 - 3 / 5)


def test_a_gradient_of_zeros_has_lost_nothing_or_everything():
    zero, one = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    assert relative_distance(zero, zero) == 0 and relative_distance(zero, one) == math.inf
    assert cosine_distance(zero, one) == 1
    assert gamma_1(zero, zero) == (0.0, 0.0, {"w": 0.0})


def test_gamma_1_by_tensor_and_of_the_whole_by_hand():
    whole = {"w": torch.tensor([3.0, 4.0]), "b": torch.tensor([5.0, 0.0])}
    sent = {"w": torch.tensor([3.0, 0.0]), "b": torch.tensor([5.0, 0.0])}
    found = gamma_1(whole, sent)
    assert found.tensors == {"w": 16 / 25, "b": 0.0}
    assert found.largest == 16 / 25 and found.whole == pytest.approx(16 / 50)


def test_gamma_1_is_of_gradient_and_residual_and_without_one_it_is_the_relative_distance_squared():
    upload, grads = ErrorFeedback(DualGradientPruning(k1=0.25, k2=0.25)), {"w": torch.tensor([4.0, 3.0, 2.0, 1.0])}
    state = upload.init(grads)
    for want in (17 / 30, None):
        accumulated = upload.accumulate(grads, state)
        sent, state = upload(grads, state, None)
        found = gamma_1(accumulated, sent).whole
        if want:
            assert found == pytest.approx(want) == pytest.approx(relative_distance(grads, sent) ** 2)
    # X = (8, 3, 2, 2): the 8 is held back again, and of the equal ones the last is the smallest
    assert sent["w"].tolist() == [0, 3, 2, 0] and found == pytest.approx(68 / 81)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 300), HEAVY, st.sampled_from([(0.05, 0.75), (0.2, 0.6), (0.03, 0.45)]))
def test_gamma_1_of_dgp_lies_above_both_lower_bounds(seed, size, heavy, shares):
    grads = {"w": entries(seed, size, heavy)}
    found = gamma_1(grads, DualGradientPruning(*shares).compress(grads)).whole
    assert found >= lower_bound(size, *shares) - 1e-12 > printed_lower_bound(*shares)


def test_the_lower_bound_is_reached_and_the_printed_one_is_hundreds_of_times_below():
    tensor = torch.zeros(100, dtype=torch.float64)
    tensor[:25] = 7.0
    assert gamma_1({"w": tensor}, DualGradientPruning().compress({"w": tensor})).whole == pytest.approx(0.2)
    assert lower_bound(100, 0.05, 0.75) == 0.2
    assert printed_lower_bound(0.05, 0.75) == pytest.approx((1 - math.sqrt(0.9625)) ** 2)
    assert printed_lower_bound(0.05, 0.75) < 0.2 / 500


def test_assumption_1_is_no_property_of_dgp_for_a_sparse_gradient_is_lost_whole():
    sparse = {"w": torch.zeros(100)}
    sparse["w"][3] = 1.0
    assert gamma_1(sparse, DualGradientPruning().compress(sparse)).whole == 1
    assert gamma_1(sparse, TopK().compress(sparse)).whole == 0


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 300), HEAVY, st.floats(0.01, 1))
def test_equations_21_and_22_hold_and_22_could_be_tighter(seed, size, heavy, wanted):
    tensor = entries(seed, size, heavy)
    kept = torch.where(mask_between(tensor, 0, 1 - wanted), tensor, 0)
    share = int(mask_between(tensor, 0, 1 - wanted).sum()) / size
    bounds, whole = top_bounds(share), float(tensor.norm()) * (1 + 1e-12)
    assert float((tensor - kept).norm()) <= bounds.lost_at_most * whole + 1e-12
    assert float(kept.norm()) * (1 + 1e-9) >= bounds.kept_tight * float(tensor.norm())
    assert bounds.kept_tight >= bounds.kept_at_least


def test_equation_22_by_hand():
    kept = torch.tensor([2.0, 2.0, 0.0, 0.0])  # of (2, 2, 2, 2): half of the entries
    assert float(kept.norm()) / 4 == pytest.approx(top_bounds(0.5).kept_tight)
    assert top_bounds(0.5).kept_at_least == pytest.approx(1 - math.sqrt(0.5))


def test_dgp_sends_none_of_the_largest_until_a_residual_lies_above_them():
    upload = ErrorFeedback(DualGradientPruning(k1=0.25, k2=0.25))
    once, then = {"w": torch.tensor([9.0, 1.0, 2.0, 3.0])}, {"w": torch.tensor([0.0, 4.0, 1.0, 2.0])}
    sent, state = upload(once, upload.init(once), None)
    assert share_of_top_sent(once, sent, 0.25) == 0
    sent, state = upload(then, state, None)  # X = (9, 5, 1, 2): the 9 is in the way, and the 4 goes out
    assert sent["w"].tolist() == [0, 5, 0, 2] and share_of_top_sent(then, sent, 0.25) == 1


def test_the_sum_of_the_other_logits_gradients_is_the_true_ones():
    """Section 4.1: |dl/dr_y| = sum over the others of |dl/dr_j|."""
    logits = torch.randn(7, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([0, 3, 9, 9, 2, 5, 7])
    torch.nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    rows = torch.arange(7)
    true = logits.grad[rows, labels].abs()
    assert torch.allclose(true, logits.grad.abs().sum(1) - true, rtol=1e-12, atol=0)
    assert (logits.grad.abs().argmax(1) == labels).all()  # so the largest rows name the label


def test_the_mean_loss_of_a_batch_has_no_such_identity_once_labels_differ():
    bias = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(bias.expand(2, 3), torch.tensor([0, 1])).backward()
    assert bias.grad.tolist() == pytest.approx([-1 / 6, -1 / 6, 1 / 3])  # the largest belongs to no label
