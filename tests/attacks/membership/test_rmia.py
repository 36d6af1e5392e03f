import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tables import in_out_digits, rng, rows, table

from secateur.attacks.membership.rmia import dominance, ratio, rmia, temper
from secateur.errors import WrongInput
from secateur.interfaces import BlackBox, Candidates, InOut, Shadow
from secateur.metrics.membership import auc, evaluate, roc


def test_temperature_two_is_softmax_of_halved_logits_in_float64():
    logits, labels = torch.randn(5, 4, generator=rng(), dtype=torch.float64) * 3, torch.tensor([0, 1, 2, 3, 0])
    expected = (logits / 2).softmax(1).gather(1, labels[:, None])[:, 0]
    assert temper(logits.softmax(1), labels, 2.0).tolist() == pytest.approx(expected.tolist(), rel=1e-12)
    # by hand: sqrt(.81) / (sqrt(.81) + sqrt(.09) + sqrt(.1))
    p = torch.tensor([[0.81, 0.09, 0.10]])
    found = temper(p, torch.tensor([0]), 2.0)
    assert found.dtype == torch.float64
    assert float(found) == pytest.approx(0.9 / (0.9 + 0.3 + 0.1**0.5), rel=1e-6)


def test_ratios_by_hand_online_and_offline():
    others = torch.tensor([[0.9, 0.8], [0.5, 0.6], [0.1, 0.2], [0.3, 0.4]], dtype=torch.float64)
    inside = torch.tensor([[True, False], [True, False], [False, True], [False, True]])
    own = torch.tensor([0.6, 0.5], dtype=torch.float64)
    # in and out averages: .7 and .2 for the first, .3 and .7 for the second
    assert ratio(own, others, inside, "online", 0.3).tolist() == pytest.approx([0.6 / 0.45, 0.5 / 0.5])
    expected = [0.6 / ((1.3 * 0.2 + 0.7) / 2), 0.5 / ((1.3 * 0.7 + 0.7) / 2)]
    assert ratio(own, others, inside, "offline", 0.3).tolist() == pytest.approx(expected)
    # a = 1: P(x) is P_out itself
    assert ratio(own, others, inside, "offline", 1.0).tolist() == pytest.approx([0.6 / 0.2, 0.5 / 0.7])


def test_a_ratio_needs_a_model_on_the_sides_it_uses():
    others, own = torch.tensor([[0.5, 0.5]], dtype=torch.float64), torch.tensor([0.5, 0.5], dtype=torch.float64)
    inside = torch.tensor([[True, False]])
    assert ratio(own, others, inside, "offline", 0.3).isnan().tolist() == [True, False]
    assert ratio(own, others, inside, "online", 0.3).isnan().tolist() == [True, True]


def test_random_membership_by_hand_with_an_example_that_no_model_trained_on():
    # example 0: in .8, .6; out .2: gap .5. example 1: in .9; out .5, .7: gap .3. example 2: out .1, .2, .3: no in model
    others = torch.tensor([[0.8, 0.9, 0.1], [0.6, 0.5, 0.2], [0.2, 0.7, 0.3]], dtype=torch.float64)
    inside = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    own = torch.tensor([0.9, 0.9, 0.9], dtype=torch.float64)
    priors = [(0.7 + 0.2) / 2, (0.9 + 0.6) / 2, (0.2 + 0.4 + 0.2) / 2]
    assert ratio(own, others, inside, "online", 0.3).tolist() == pytest.approx([0.9 / prior for prior in priors])
    priors = [((1.3 * out) + 0.7) / 2 for out in (0.7, 0.9, 0.6)]  # turned: the third has no out model
    assert ratio(own, others, ~inside, "offline", 0.3).tolist() == pytest.approx([0.9 / prior for prior in priors])


def test_dominance_by_hand_ties_lose():
    population = torch.tensor([0.25, 0.5, 1.0, 2.0])
    found = dominance(torch.tensor([0.5, 1.0, 2.0, 4.1, 0.1]), population, 2.0)
    assert found.tolist() == [0.0, 0.25, 0.5, 1.0, 0.0]
    assert found.dtype == torch.float64


@given(
    ratios=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    population=st.lists(st.integers(0, 12), min_size=1, max_size=30),
    gamma=st.sampled_from([1.0, 2.0, 4.0]),
)
@settings(max_examples=200, deadline=None)
def test_sorting_equals_comparing_every_pair_ties_included(ratios, population, gamma):
    x, z = (torch.tensor(v, dtype=torch.float64) / 4 for v in (ratios, population))
    plain = (x[:, None] > gamma * z[None]).double().mean(1)
    assert torch.equal(dominance(x, z, gamma), plain)


def four_models():
    membership = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 1, 0]]).T.bool()
    boxes = [table(0.9, 0.3, 0.9), table(0.9, 0.2, 0.4), table(0.3, 0.8, 0.8), table(0.2, 0.9, 0.3)]
    return InOut(boxes, rows(0, 1, 2), membership)


def test_online_by_hand_from_in_out_models():
    fitted = rmia(temperature=1.0).fit(four_models(), rng())
    found = fitted.score(table(0.95, 0.1, 0.5), Candidates(rows(0, 1, 2), ids=torch.tensor([0, 1, 2])))
    # P(x): (.9 + .25)/2, (.85 + .25)/2, (.85 + .35)/2; ratios 1.652, .182, .833; the population is the pool itself
    assert fitted.rows.sort().values.tolist() == [0, 1, 2]
    assert found.scores.tolist() == pytest.approx([1 / 3, 0.0, 1 / 3])  # 1.652/2 < .833, and .833/2 > .182
    assert found.members.tolist() == [True, False, False]
    assert found.note is None


def test_a_gamma_that_nobody_reaches_is_said():
    fitted = rmia(temperature=1.0, gamma=100.0).fit(four_models(), rng())
    found = fitted.score(table(0.95, 0.1, 0.5), Candidates(rows(0, 1, 2), ids=torch.tensor([0, 1, 2])))
    assert found.scores.tolist() == [0.0, 0.0, 0.0] and found.members.tolist() == [True, False, False]
    assert found.note == "gamma 100 ranks all examples alike; give one nearer to 1"


def test_a_given_population_is_judged_by_out_models_only():
    fitted = rmia(temperature=1.0, gamma=1.0).fit(four_models(), rng())
    candidates = Candidates(rows(0), ids=torch.tensor([0]), population=rows(1, 2))
    found = fitted.score(table(0.6, 0.5, 0.8), candidates)
    # x: .6 / .575 = 1.043; P_out over all four: .55 and .6, so z: .5 / .7075 = .707 and .8 / .74 = 1.081
    assert found.scores.tolist() == [0.5]


def shadow(box, members, nonmembers):
    return Shadow(box, rows(*members), rows(*nonmembers))


def three_shadows():
    return [
        shadow(table(0.9, 0.9, 0.3, 0.4, 0.2, 0.5), (0, 1), (2, 3)),
        shadow(table(0.2, 0.4, 0.8, 0.9, 0.3, 0.7), (2, 3), (0, 1)),
        shadow(table(0.2, 0.2, 0.5, 0.2, 0.9, 0.9), (4,), (0, 2)),
    ]


def test_disjoint_shadows_run_offline_by_hand_and_say_so():
    fitted = rmia(temperature=1.0, gamma=1.0).fit(three_shadows(), rng())
    found = fitted.score(table(0.5, 0.3, 0.6, 0.1, 0.7, 0.7), Candidates(rows(5)))
    # x: P_out = .7, so .7 / .805 = .870; z: P_out .2 .3 .4 .3 .25, so .5/.48 .3/.545 .6/.61 .1/.545 .7/.5125
    assert found.scores.tolist() == [pytest.approx(2 / 5)]
    assert found.note == "rmia ran offline: none of the attacker's models trained on the candidates"
    # rehearsed: the second's row 2, judged by the first and third (P_out = .4), has the lowest ratio of a member
    assert fitted.thresholds["offline"] == pytest.approx(0.8 / ((1.3 * 0.4 + 0.7) / 2))
    assert found.members.tolist() == [False]


def test_the_population_is_capped_and_drawn_from_the_generator():
    first, again, other = (rmia(population=2).fit(four_models(), rng(seed)).rows for seed in (0, 0, 3))
    assert len(first) == 2 and torch.equal(first, again) and not torch.equal(first, other)


def test_wrong_input_is_said_clearly():
    with pytest.raises(WrongInput, match="at least 2 shadow models; 1 given"):
        rmia().fit(three_shadows()[:1], rng())
    pair = InOut([table(0.1, 0.2)] * 2, rows(0, 1), torch.tensor([[True, False], [False, True]]))
    with pytest.raises(WrongInput, match="at least 4 in-out models"):
        rmia().fit(pair, rng())
    with pytest.raises(WrongInput, match="did you mean 'online'"):
        rmia(mode="onlin")
    for wrong in ({"gamma": 0}, {"temperature": -1}, {"population": 0}, {"a": 1.5}):
        with pytest.raises(WrongInput):
            rmia(**wrong)
    with pytest.raises(WrongInput, match="fit it"):
        rmia().score(table(0.5), Candidates(rows(0)))
    with pytest.raises(WrongInput, match="labels only"):
        rmia().fit(four_models(), rng()).score(BlackBox(table(0.5).predict, labels_only=True), Candidates(rows(0)))


def test_online_beats_chance_clearly_on_networks_that_memorised():
    models, target, truth = in_out_digits(models=8)
    candidates = Candidates(models.pool, ids=torch.arange(models.pool.size))
    found = rmia().fit(models, rng()).score(target, candidates)
    measures = evaluate(found, truth)
    assert measures["auc"].value > 0.75
    assert measures["balanced_accuracy"].value > 0.65
    offline = rmia(mode="offline").fit(models, rng()).score(target, candidates)
    assert float(auc(roc(offline.scores, truth))) > 0.65
    again = rmia().fit(models, rng()).score(target, candidates)
    assert torch.equal(again.scores, found.scores) and torch.equal(again.members, found.members)
