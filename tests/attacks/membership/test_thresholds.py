import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from secateur.attacks.membership.thresholds import (
    best_threshold,
    class_thresholds,
    conf,
    negative_modified_entropy,
)
from secateur.errors import WrongInput
from secateur.inference import true_probability
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Shadow


def balanced(threshold, members, nonmembers):
    return ((members >= threshold).double().mean() + (nonmembers < threshold).double().mean()) / 2


@given(
    members=st.lists(st.integers(0, 9), min_size=1, max_size=30),
    nonmembers=st.lists(st.integers(0, 9), min_size=1, max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_the_fast_search_equals_trying_every_value(members, nonmembers):
    inside, outside = (torch.tensor(x, dtype=torch.float64) for x in (members, nonmembers))
    found = best_threshold(inside, outside)
    best = max(float(balanced(t, inside, outside)) for t in torch.cat([inside, outside]))
    assert float(balanced(found, inside, outside)) == pytest.approx(best)


def test_confidence_and_modified_entropy_by_hand():
    p, y = torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([0])
    assert float(true_probability(p, y)) == pytest.approx(0.7)
    # Mentr = -(1 - .7) log .7 - .2 log .8 - .1 log .9
    expected = -(0.3 * math.log(0.7)) - 0.2 * math.log(0.8) - 0.1 * math.log(0.9)
    assert float(negative_modified_entropy(p, y)) == pytest.approx(-expected, rel=1e-6)


def test_modified_entropy_is_finite_at_the_corners():
    p, y = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    sure, wrong = negative_modified_entropy(p, y)
    assert float(sure) == 0
    # a confident error: log(1e-30) twice
    assert float(wrong) == pytest.approx(2 * math.log(1e-30), rel=1e-6)


def test_a_class_of_members_only_takes_the_global_threshold():
    values = torch.tensor([0.9, 0.8, 0.3, 0.7])
    labels = torch.tensor([0, 0, 0, 1])
    member = torch.tensor([True, True, False, True])
    thresholds, missing = class_thresholds(values, labels, member, 2)
    assert thresholds.tolist() == pytest.approx([0.8, 0.7])
    assert missing == [1]


def table(rows):
    return BlackBox(lambda inputs: torch.tensor(rows)[inputs.long().flatten()])


def test_an_attack_decides_by_the_class_and_ranks_by_the_feature():
    box = table([[0.9, 0.1], [0.6, 0.4], [0.45, 0.55], [0.7, 0.3]])
    shadow = Shadow(
        box,
        members=Batch(torch.tensor([[0], [2]]), torch.tensor([0, 1])),
        nonmembers=Batch(torch.tensor([[1], [3]]), torch.tensor([0, 1])),
    )
    fitted = conf().fit([shadow], torch.Generator())
    assert fitted.thresholds.tolist() == pytest.approx([0.9, 0.55])
    guesses = fitted.score(box, Candidates(Batch(torch.tensor([[3], [2]]), torch.tensor([0, 1]))))
    assert guesses.members.tolist() == [False, True]
    assert guesses.scores.tolist() == pytest.approx([0.7, 0.55])


def test_in_out_models_serve_as_shadows_too():
    box = table([[0.9, 0.1], [0.2, 0.8]])
    pool = Batch(torch.tensor([[0], [1]]), torch.tensor([0, 0]))
    fitted = conf().fit(InOut([box], pool, torch.tensor([[True, False]])), torch.Generator())
    assert fitted.thresholds[0] == pytest.approx(0.9)


def test_the_result_says_which_classes_took_the_global_threshold():
    box = table([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7]])
    zero = torch.zeros(1, dtype=torch.int64)
    members = Batch(torch.tensor([[0], [2]]), torch.tensor([0, 1]))
    fitted = conf().fit([Shadow(box, members, Batch(torch.tensor([[1]]), zero))], torch.Generator())
    note = fitted.score(box, Candidates(members)).note
    assert "global threshold" in note and "[1]" in note
    with pytest.raises(WrongInput, match="no class has both"):
        conf().fit(
            [Shadow(box, Batch(torch.tensor([[0]]), zero), Batch(torch.tensor([[1]]), zero + 1))], torch.Generator()
        )
    with pytest.raises(WrongInput, match="have no non-members"):
        conf().fit([Shadow(box, members, Batch(torch.zeros(0, 1), zero[:0]))], torch.Generator())


def test_without_shadows_an_attack_ranks_and_does_not_decide():
    box, batch = table([[0.9, 0.1], [0.4, 0.6]]), Batch(torch.arange(2.0)[:, None], torch.zeros(2).long())
    guesses = conf().fit([], torch.Generator()).score(box, Candidates(batch))
    assert guesses.members is None and guesses.scores.tolist() == pytest.approx([0.9, 0.4])
