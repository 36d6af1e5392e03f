"""Yeom's threshold by hand, and who the attacker knows and is asked about."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur.attacks.membership.yeom import count_known, trial, yeom
from secateur.catalogue import find
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow
from secateur.seeding import derive

PROBABILITY = torch.tensor([0.9, 0.4, 0.6, 0.2, 0.5])  # of class 0, which is everybody's label


def box():
    """A model that answers input i with PROBABILITY[i]."""
    return BlackBox(lambda x: torch.stack([PROBABILITY[x[:, 0].long()], 1 - PROBABILITY[x[:, 0].long()]], 1).double())


def batch(*rows):
    return Batch(torch.tensor([[float(row)] for row in rows]), torch.zeros(len(rows), dtype=torch.int64))


def fitted(threshold):
    return yeom(threshold).fit([Shadow(box(), batch(0, 1), batch(3))], derive(0, "yeom"))


def test_the_threshold_is_the_mean_loss_of_known_members():
    attack = fitted("mean")  # -(ln .9 + ln .4) / 2 = .5108: exp(-.5108) = .6
    assert float(attack.thresholds[0]) == pytest.approx((math.log(0.9) + math.log(0.4)) / 2)
    guesses = attack.score(box(), Candidates(batch(0, 2, 4, 3)))
    assert guesses.members.tolist() == [True, True, False, False]
    assert guesses.scores.argsort(descending=True).tolist() == [0, 1, 2, 3]


def test_a_loss_that_is_the_threshold_itself_is_no_member():
    labels = torch.zeros(2, dtype=torch.int64)
    attack = yeom().learn(torch.tensor([-1.0, -3.0]), labels, torch.ones(2) > 0, 1)
    assert attack.decide(torch.tensor([-2.0, -1.9]), labels).members.tolist() == [False, True]


def test_the_tuned_threshold_separates_what_is_known():
    attack = fitted("tuned")  # members .9 and .4, other .2: from .4 on all are taken
    assert attack.score(box(), Candidates(batch(4, 3))).members.tolist() == [True, False]


def test_a_class_without_both_sides_takes_the_global_threshold_and_says_so():
    values, labels = torch.tensor([-1.0, -2.0, -0.1]), torch.tensor([0, 0, 1])
    attack = yeom("class").learn(values, labels, torch.tensor([True, False, True]), 2)
    assert "[1]" in attack.note and attack.thresholds.tolist() == [-1.0, -1.0]


def test_few_known_members_may_share_no_class_with_the_others():
    values, labels = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([0, 1, 2])
    attack = yeom("class").learn(values, labels, torch.tensor([True, True, False]), 4)
    assert attack.note.startswith("global threshold") and attack.thresholds.tolist() == [-2.0] * 4
    assert attack.decide(values, labels).members.tolist() == [True, True, False]


def test_an_unknown_threshold_is_refused():
    with pytest.raises(WrongInput, match="tuned"):
        find("attack", "yeom")(threshold="tunde")


@pytest.mark.parametrize(("size", "printed", "known"), [(50_000, False, 500), (399, False, 3), (400, False, 4)])
def test_what_the_attacker_knows(size, printed, known):
    assert count_known(size, printed) == known
    assert count_known(size, printed=True) == min(3, size // 100)


@given(st.integers(5, 400), st.integers(8, 400), st.booleans())
def test_as_many_members_as_others_and_nobody_twice(inside, outside, whole):
    found = trial(torch.arange(inside), inside + torch.arange(outside), derive(0, "trial"), whole=whole)
    assert len(found.members) == len(found.nonmembers) == min(inside - len(found.known) * (not whole), outside // 2)
    assert found.members.max() < inside <= min(found.nonmembers.min(), found.outsiders.min())
    assert set(found.known.tolist()) <= set(range(inside)) and len(found.known_outside) == len(found.known)
    for one, other in ((found.outsiders, found.nonmembers), *([] if whole else [(found.known, found.members)])):
        assert not set(one.tolist()) & set(other.tolist())


def test_ten_thousand_are_asked_at_most_and_a_client_can_be_too_small():
    found = trial(torch.arange(17_020), torch.arange(20_000, 30_000), derive(0, "trial"))
    assert (len(found.known), len(found.members), len(found.nonmembers), len(found.outsiders)) == (
        170,
        5000,
        5000,
        5000,
    )
    said = "client: 3 members and 10 non-members are too few: the attacker must know 3 of each "
    said += "(1 % of the members, at least 3) and be asked about others; mapp_fl leaves its smallest clients out too"
    with pytest.raises(WrongInput) as refused:
        trial(torch.arange(3), torch.arange(10, 20), derive(0, "trial"))
    assert str(refused.value) == said
