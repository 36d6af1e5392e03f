"""DGP's Algorithm 1 by hand, its two ways to be given, and the release of starved entries."""

import pytest
import torch

from secateur.catalogue import find
from secateur.config import choice
from secateur.defenses.dgp import DualGradientPruning
from secateur.defenses.error_feedback import RESIDUAL, ErrorFeedback
from secateur.errors import WrongInput


def test_algorithm_1_by_hand():
    values = torch.arange(1.0, 21.0)  # the largest is 20; 5 % of 20 is one, 75 % are fifteen
    values[::2] *= -1
    sent, _ = DualGradientPruning()({"w": values, "b": torch.arange(10.0)}, {}, None)
    assert sent["w"].nonzero().flatten().tolist() == [15, 16, 17, 18]
    assert sent["w"][15:19].tolist() == [16, -17, 18, -19]
    assert sent["b"].tolist() == [0] * 7 + [7, 8, 0]  # k1 rounds up: a short bias loses its largest


def test_with_k1_of_zero_it_is_top_k(rng):
    from secateur.defenses.top_k import TopK

    grads = {"w": torch.randn(37, 11, generator=rng)}
    assert torch.equal(DualGradientPruning(k1=0, k2=0.8).compress(grads)["w"], TopK(0.2).compress(grads)["w"])


@pytest.mark.parametrize(("total", "k1", "k2"), [(0.48, 0.03, 0.45), (0.8, 0.05, 0.75), (0.96, 0.06, 0.9)])
def test_sum_and_ratio_say_the_same_as_k1_and_k2(total, k1, k2, rng):
    grads = {"w": torch.randn(1000, generator=rng), "b": torch.randn(10, generator=rng)}
    by_ratio, by_shares = DualGradientPruning(total=total, p=1 / 15), DualGradientPruning(k1=k1, k2=k2)
    assert by_ratio.shares == pytest.approx((k1, k2))
    for name in grads:
        assert torch.equal(by_ratio.compress(grads)[name], by_shares.compress(grads)[name])


def test_what_is_not_given_is_the_papers():
    assert DualGradientPruning().shares == (0.05, 0.75)
    assert DualGradientPruning(k2=0.9).shares == (0.05, 0.9)
    assert DualGradientPruning(total=0.8).shares == pytest.approx((0.05, 0.75))
    assert DualGradientPruning(p=1 / 3).shares == pytest.approx((0.2, 0.6))
    assert choice("defense", "dgp:total=.96:p=.0666").make().shares[0] == pytest.approx(0.06, rel=1e-2)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"k1": 0.05, "total": 0.8}, "set twice"),
        ({"k2": 0.75, "p": 0.1}, "set twice"),
        ({"k1": 0.25, "k2": 0.75}, "a sum below 1"),
        ({"k1": -0.1, "k2": 0.75}, "must be at least 0"),
        ({"k1": 0.1, "k2": -0.75}, "must be at least 0"),
        ({"total": 1.0}, "total: 1.0 is not allowed"),
        ({"p": -1.0}, "p: -1.0 is not allowed"),
        ({"release": 0}, "must be a whole number, at least 1"),
    ],
)
def test_wrong_shares_are_refused_with_one_sentence(given, sentence):
    with pytest.raises(WrongInput, match=sentence):
        DualGradientPruning(**given)


def rounds(upload, grads, number):
    state, sent = upload.init(grads), []
    for _ in range(number):
        out, state = upload(grads, state, None)
        sent.append(out["w"])
    return torch.stack(sent), state


def test_error_feedback_starves_the_largest_entry_and_release_sends_it_once():
    grads = {"w": torch.tensor([8.0, 1, 1, 1, 1, 1, 1, 1, 1, 1])}
    starving, state = rounds(ErrorFeedback(DualGradientPruning(k1=0.1, k2=0.5)), grads, 9)
    assert (starving[:, 0] == 0).all() and state[RESIDUAL + "w"][0] == 72  # it only ever grows
    released, state = rounds(ErrorFeedback(DualGradientPruning(k1=0.1, k2=0.5, release=2)), grads, 9)
    assert released[:, 0].tolist() == [0, 0, 24, 0, 0, 24, 0, 0, 24]  # held back twice, then sent with what waited
    assert state[RESIDUAL + "w"][0] == 0
    assert (released[2] != 0).sum() == 5 and (released[0] != 0).sum() == 4  # beside the exact number of the others


def test_the_count_begins_anew_when_an_entry_falls_out_of_the_top():
    upload = DualGradientPruning(k1=0.25, k2=0.25, release=2)
    first, second = {"w": torch.tensor([9.0, 1, 2, 3])}, {"w": torch.tensor([1.0, 9, 2, 3])}
    state = upload.init(first)
    for grads, expected in ((first, [1, 0, 0, 0]), (second, [0, 1, 0, 0]), (first, [1, 0, 0, 0])):
        _, state = upload(grads, state, None)
        assert state["w"].tolist() == expected
    _, state = upload(first, state, None)
    sent, state = upload(first, state, None)
    assert sent["w"].tolist() == [9, 0, 2, 3] and state["w"].tolist() == [0, 0, 0, 0]


def test_lists_show_the_defaults_in_force():
    """Finding 12: JSON said k1: None for .05."""
    shown = find("defense", "dgp").describe()["defaults"]
    assert shown.keys() == find("defense", "dgp").defaults.keys()
    assert (shown["k1"], shown["k2"]) == DualGradientPruning().shares == tuple(DualGradientPruning().in_force.values())
