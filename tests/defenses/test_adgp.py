"""ADGP (Section 6.4) by hand, and what a user that lies does to the others."""

import pytest
import torch

from secateur.defenses.adgp import AlignedDualGradientPruning as Adgp
from secateur.defenses.error_feedback import RESIDUAL, ErrorFeedback
from secateur.errors import WrongInput

# k1 of 10 entries is one, k is two, 2k is four
ADGP = Adgp(k1=0.1, k=0.2)
CHOSEN = {"w": torch.tensor([10.0, 9, 8, 7, 6, 5, 4, 3, 2, 1])}
OTHER = {"w": torch.tensor([1.0, 0, -20, 3, 40, 50, 60, 70, 80, 90])}


def test_the_chosen_user_broadcasts_its_top_2k_with_its_top_k1_among_them():
    assert ADGP.positions(CHOSEN)["w"].tolist() == [True] * 4 + [False] * 6


def test_the_chosen_user_drops_its_own_top_and_sends_the_k_largest_inside():
    sent, _ = ADGP(CHOSEN, {}, None)
    assert sent["w"].tolist() == [0, 9, 8, 0, 0, 0, 0, 0, 0, 0]
    assert torch.equal(ADGP.compress(CHOSEN)["w"], sent["w"])


def test_another_user_sends_its_own_k_largest_inside_even_where_they_are_small():
    sent, _ = ADGP(OTHER, {}, None, inside=ADGP.positions(CHOSEN))
    assert sent["w"].tolist() == [0, 0, -20, 3, 0, 0, 0, 0, 0, 0]


def test_its_own_top_is_dropped_inside_too():
    mine = {"w": torch.tensor([1.0, 2, 3, 99, 0, 0, 0, 0, 0, 0])}
    sent, _ = ADGP(mine, {}, None, inside=ADGP.positions(CHOSEN))
    assert sent["w"].tolist() == [0, 2, 3, 0, 0, 0, 0, 0, 0, 0]


def test_all_uploads_lie_inside_so_the_download_is_i_only_and_the_rest_waits(rng):
    users = [{"w": torch.randn(30, 20, generator=rng), "b": torch.randn(20, generator=rng)} for _ in range(4)]
    upload = ErrorFeedback(Adgp())
    states = [upload.init(user) for user in users]
    inside = upload.inner.positions(upload.accumulate(users[2], states[2]))
    assert int(inside["w"].sum()) == 240 and int(inside["b"].sum()) == 8
    for user, state in zip(users, states, strict=True):
        sent, after = upload(user, state, None, inside=inside)
        for name, value in user.items():
            assert not sent[name][~inside[name]].any()
            assert int((sent[name] != 0).sum()) == value.numel() // 5
            assert torch.equal(sent[name] + after[RESIDUAL + name], value)


def test_a_liar_who_broadcasts_nothing_stops_everyone_and_nothing_is_lost():
    upload = ErrorFeedback(ADGP)
    nothing = {"w": torch.zeros(10, dtype=torch.bool)}
    sent, state = upload(OTHER, upload.init(OTHER), None, inside=nothing)
    assert not sent["w"].any() and torch.equal(state[RESIDUAL + "w"], OTHER["w"])
    sent, _ = upload(OTHER, state, None, inside=ADGP.positions(CHOSEN))  # an honest round sends what had waited
    assert sent["w"].tolist() == [0, 0, -40, 6, 0, 0, 0, 0, 0, 0]


def test_a_liar_with_one_corner_decides_what_is_learnt():
    corner = {"w": torch.tensor([True] + [False] * 9)}
    sent, _ = ADGP(OTHER, {}, None, inside=corner)
    assert sent["w"].tolist() == [1] + [0] * 9  # one entry where two could be sent


def test_a_liar_who_broadcasts_everything_makes_the_download_dense_but_never_the_upload():
    everything = {"w": torch.ones(10, dtype=torch.bool)}
    sent, _ = ADGP(OTHER, {}, None, inside=everything)
    assert sent["w"].tolist() == [0] * 7 + [70, 80, 0]


@pytest.mark.parametrize(
    "inside", [{}, {"w": torch.ones(9, dtype=torch.bool)}, {"w": torch.ones(10)}], ids=["name", "shape", "dtype"]
)
def test_a_broadcast_of_another_form_is_refused(inside):
    with pytest.raises(WrongInput, match=r"positions of w as bool of the shape \(10,\)"):
        ADGP(OTHER, {}, None, inside=inside)


def test_of_no_tensors_there_are_no_positions():
    assert ADGP.positions({}) == {}
    assert ADGP({}, {}, None, inside={}) == ({}, {})


@pytest.mark.parametrize(("k1", "k"), [(0.2, 0.2), (-0.1, 0.2), (0.05, 0.6)])
def test_wrong_shares_are_refused(k1, k):
    with pytest.raises(WrongInput, match="0 <= k1 < k"):
        Adgp(k1, k)
