"""What each attack of samia_ppb looks at, by hand."""

import math

import pytest
import torch

from secateur.attacks.membership.neural import Nn, NnCls, Top3Nn
from secateur.attacks.membership.samia import Samia
from secateur.attacks.membership.thresholds import (
    Correctness,
    negative_cross_entropy,
    negative_entropy,
    top1_conf,
    xent,
)
from secateur.catalogue import find
from secateur.config import choice
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, Shadow

P = torch.tensor([[0.7, 0.2, 0.1], [0.25, 0.25, 0.5]])
Y = torch.tensor([0, 1])


def table(rows, **options):
    return BlackBox(lambda inputs: torch.tensor(rows)[inputs.long().flatten()], **options)


def test_cross_entropy_by_hand():
    assert negative_cross_entropy(P, Y).tolist() == pytest.approx([math.log(0.7), math.log(0.25)], rel=1e-6)
    assert float(negative_cross_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))) == pytest.approx(
        math.log(1e-30)
    )


def test_entropy_by_hand_and_without_the_label():
    first = 0.7 * math.log(0.7) + 0.2 * math.log(0.2) + 0.1 * math.log(0.1)
    second = 2 * 0.25 * math.log(0.25) + 0.5 * math.log(0.5)
    assert negative_entropy(P, Y).tolist() == pytest.approx([first, second], rel=1e-6)
    assert torch.equal(negative_entropy(P, Y), negative_entropy(P, 2 - Y))
    assert float(negative_entropy(torch.tensor([[0.0, 1.0]]), torch.tensor([0]))) == 0  # 0 log 0 = 0


def test_the_features_of_the_networks_by_hand():
    box, rng = table(P.tolist()), torch.Generator()
    batch = Batch(torch.tensor([[0], [1]]), Y)
    assert torch.equal(Nn().features(box, batch, rng), P)
    assert torch.equal(Top3Nn().features(box, batch, rng), torch.tensor([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]))
    assert torch.equal(
        NnCls().features(box, batch, rng), torch.tensor([[0.7, 0.2, 0.1, 1, 0, 0], [0.25, 0.25, 0.5, 0, 1, 0]])
    )
    two = table([[0.1, 0.9]])
    assert Top3Nn().features(two, Batch(torch.tensor([[0]]), Y[:1]), rng).tolist() == [
        [pytest.approx(0.9), pytest.approx(0.1)]
    ]


def test_samia_sees_probabilities_then_sensitivities_then_the_label():
    # f = (1/2 + x/4, 1/2 - x/4): every direction d moves both by |d| / 4
    box = BlackBox(lambda x: 0.5 + torch.cat([x, -x], 1) / 4)
    inputs = torch.tensor([[0.0], [0.4]], dtype=torch.float64)
    seen = Samia().features(box, Batch(inputs, Y), torch.Generator().manual_seed(0))
    assert seen[:, :2].flatten().tolist() == pytest.approx([0.5, 0.5, 0.6, 0.4])
    moved = seen[:, 2:4]
    assert torch.allclose(moved, moved[0, 0].expand(2, 2)) and 0.05 < moved[0, 0] < 0.5  # the same directions for all
    assert seen[:, 4:].tolist() == [[1, 0], [0, 1]]


def test_top1_conf_has_one_threshold_for_all_classes_and_the_form_of_the_code():
    box = table([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.2, 0.8]])
    shadow = Shadow(
        box,
        members=Batch(torch.tensor([[0], [3]]), torch.tensor([0, 0])),
        nonmembers=Batch(torch.tensor([[1], [2]]), torch.tensor([0, 1])),
    )
    paper, code = (top1_conf(form).fit([shadow], torch.Generator()) for form in ("paper", "code"))
    assert paper.thresholds.tolist() == pytest.approx([0.8, 0.8])  # max p: members .9 .8, others .6 .7
    assert code.thresholds.tolist() == pytest.approx([0.9, 0.9])  # p_y: members .9 .2, others .6 .7
    guesses = paper.score(box, Candidates(Batch(torch.tensor([[3], [2]]), torch.tensor([0, 1]))))
    assert guesses.members.tolist() == [True, False]
    with pytest.raises(WrongInput, match="paper"):
        top1_conf("papre")


def test_cross_entropy_decides_as_confidence_does():
    rng = torch.Generator().manual_seed(0)
    rows = torch.rand(200, 3, generator=rng).softmax(1)
    labels = torch.randint(3, (200,), generator=rng)
    batch = Batch(torch.arange(200)[:, None], labels)
    half = torch.arange(200) < 100
    shadow = Shadow(table(rows.tolist()), batch.take(half), batch.take(~half))
    first, second = (
        attack.fit([shadow], rng).score(shadow.box, Candidates(batch)) for attack in (xent(), find("attack", "conf")())
    )
    assert torch.equal(first.members, second.members)
    assert torch.equal(first.scores.argsort(), second.scores.argsort())


def test_correctness_needs_neither_shadows_nor_probabilities():
    box = table([[1, 0], [0, 1]], labels_only=True)
    candidates = Candidates(Batch(torch.tensor([[0], [1], [1]]), torch.tensor([0, 0, 1])))
    guesses = Correctness().fit([], torch.Generator()).score(box, candidates)
    assert guesses.scores.tolist() == [1, 0, 1]
    assert guesses.members.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("samia:epochs=0", "epochs"),
        ("nn:batch_size=1", "batch_size"),
        ("nn-cls:learning_rate=0", "learning_rate"),
        ("samia:dropout=1.0", "dropout"),
        ("top3-nn:epochs=many", "epochs"),
        ("nn:depth=3", "depth"),
    ],
)
def test_a_wrong_hyper_parameter_is_refused_before_anything_runs(text, field):
    with pytest.raises(WrongInput, match=field):
        choice("attack", text)
