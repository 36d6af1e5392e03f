import math

import pytest
import torch
from scipy.stats import norm
from tables import in_out_digits, memorise, noisy_digits, rng, rows, table

from secateur.attacks.membership.lira import deviation, lira, margin, offline, online
from secateur.errors import WrongInput
from secateur.interfaces import Batch, BlackBox, Candidates, InOut, Shadow
from secateur.metrics.membership import auc, evaluate, roc

IN, OUT = True, False


def values(*models):
    """(M, 1, N) margins, one query."""
    return torch.tensor(models, dtype=torch.float64)[:, None]


def logit(p):
    return math.log(p) - math.log(1 - p)


def test_the_margin_is_the_log_odds_of_the_true_label_in_float64():
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.6, 0.3]])
    found = margin(p, torch.tensor([0, 2]))
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([math.log(0.7 / 0.3), math.log(0.3 / 0.7)], rel=1e-6)


def test_a_margin_keeps_what_one_minus_p_would_lose_and_is_finite_at_the_corners():
    p = torch.tensor([[1.0, 1e-20, 1e-30], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    found = margin(p, torch.tensor([0, 0, 0]))
    assert float(found[0]) == pytest.approx(20 * math.log(10))
    assert found.isfinite().all() and found[1] == -found[2]


def test_deviation_by_hand_per_example_and_pooled():
    # example 0: 1, 3, 5 (mean 3, squares 8); example 1: 0, 2 from the first two models (mean 1, squares 2)
    given = values([1, 0], [3, 2], [5, 9])
    chosen = torch.tensor([[True, True], [True, True], [True, False]])
    assert deviation(given, chosen)[0].tolist() == pytest.approx([math.sqrt(8 / 2), math.sqrt(2 / 1)])
    assert float(deviation(given, chosen, common=True)) == pytest.approx(math.sqrt((8 + 2) / (2 + 1)))


def test_an_example_with_no_or_one_model_adds_nothing_to_the_pooled_deviation():
    given = values([1, 100, 7], [3, 200, 7])
    chosen = torch.tensor([[True, True, False], [True, False, False]])
    assert float(deviation(given, chosen, common=True)) == pytest.approx(math.sqrt(2))
    assert deviation(given, chosen)[0].tolist() == pytest.approx([math.sqrt(2)] * 3)  # pooled where it has none
    assert deviation(given, torch.zeros_like(chosen), common=True).isnan().all()


def test_random_membership_by_hand_with_an_example_that_no_model_trained_on():
    # example 0: in 4, 6; out 0. example 1: in 5; out 1, 3. example 2: out 2, 4, 6: no in model. Gaps 5 and 3.
    others = values([4, 5, 2], [6, 1, 4], [0, 3, 6])
    inside = torch.tensor([[True, True, False], [True, False, False], [False, False, False]])
    fixed = {IN: torch.tensor([[2.0]]).double(), OUT: torch.tensor([[1.0]]).double()}
    own = torch.tensor([[3.0, 3.0, 3.0]], dtype=torch.float64)
    means = [(5, 0), (5, 2), (4 + (5 + 3) / 2, 4)]
    expected = [norm.logpdf(3, inner, 2) - norm.logpdf(3, outer, 1) for inner, outer in means]
    assert online(own, others, inside, fixed).tolist() == pytest.approx(expected, rel=1e-9)
    turned = [norm.logpdf(3, outer, 2) - norm.logpdf(3, inner, 1) for inner, outer in means]  # and no out model
    assert online(own, others, ~inside, fixed).tolist() == pytest.approx(turned, rel=1e-9)
    expected = [-norm(inner, 1).logsf(3) for inner, _ in means]
    assert offline(own, others, ~inside, fixed).tolist() == pytest.approx(expected, rel=1e-9)


def test_a_side_of_single_models_deviates_as_the_other_side():
    others, inside = values([4.0], [1.0], [3.0], [5.0]), torch.tensor([[True], [False], [False], [False]])
    own = torch.tensor([[3.0]], dtype=torch.float64)
    expected = norm.logpdf(3, 4, 2) - norm.logpdf(3, 3, 2)
    assert float(online(own, others, inside)) == pytest.approx(expected, rel=1e-9)


def test_online_is_the_difference_of_two_log_densities():
    others = values([4.0], [6.0], [-1.0], [2.0])
    inside = torch.tensor([[True], [True], [False], [False]])
    own = torch.tensor([[3.0]], dtype=torch.float64)
    expected = norm.logpdf(3, 5, math.sqrt(2)) - norm.logpdf(3, 0.5, math.sqrt(4.5))
    assert float(online(own, others, inside)) == pytest.approx(expected, rel=1e-12)
    fixed = {IN: torch.tensor([[2.0]]), OUT: torch.tensor([[3.0]])}
    expected = norm.logpdf(3, 5, 2) - norm.logpdf(3, 0.5, 3)
    assert float(online(own, others, inside, fixed)) == pytest.approx(expected, rel=1e-6)


def test_offline_by_cdf_and_by_density_use_only_the_out_models():
    others = values([99.0], [-1.0], [2.0])
    inside = torch.tensor([[True], [False], [False]])
    own = torch.tensor([[3.0]], dtype=torch.float64)
    out = norm(0.5, math.sqrt(4.5))
    assert float(offline(own, others, inside)) == pytest.approx(-out.logsf(3), rel=1e-12)
    assert float(offline(own, others, inside, form="density")) == pytest.approx(-out.logpdf(3), rel=1e-12)


def test_offline_by_cdf_ranks_as_the_cdf_does_and_still_where_that_is_one():
    others, inside = values([-1.0] * 6, [1.0] * 6), torch.zeros(2, 6, dtype=torch.bool)
    own = torch.tensor([[-5.0, 0.0, 1.0, 20.0, 30.0, 90.0]], dtype=torch.float64)
    found = offline(own, others, inside)
    assert (found.diff() > 0).all()
    assert (1 - (-found).exp()).tolist() == pytest.approx(norm.cdf(own[0] / math.sqrt(2)).tolist())
    both = offline(own, others, inside, form="density")
    assert both[0] > both[1]  # a density also suspects what is unusually unsure


def test_two_queries_are_averaged():
    others = torch.tensor([[[0.0], [1.0]], [[2.0], [3.0]]], dtype=torch.float64)  # (M, Q, N)
    own, inside = torch.tensor([[2.0], [0.0]], dtype=torch.float64), torch.zeros(2, 1, dtype=torch.bool)
    expected = -(norm.logsf(2, 1, math.sqrt(2)) + norm.logsf(0, 2, math.sqrt(2))) / 2
    assert float(offline(own, others, inside)) == pytest.approx(expected, rel=1e-12)


def four_models():
    """Two examples, each in two of four models, which are surer of what they trained on."""
    membership = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]]).T.bool()
    boxes = [table(0.9, 0.3), table(0.95, 0.2), table(0.3, 0.8), table(0.2, 0.9)]
    return InOut(boxes, rows(0, 1), membership)


def test_online_by_hand_from_in_out_models():
    fitted = lira().fit(four_models(), rng())
    ins = [[logit(0.9), logit(0.95)], [logit(0.8), logit(0.9)]]
    outs = [[logit(0.3), logit(0.2)], [logit(0.3), logit(0.2)]]
    halves = [(a - b) ** 2 / 2 for a, b in ins], [(a - b) ** 2 / 2 for a, b in outs]  # squares of a pair
    sigma_in, sigma_out = (math.sqrt(sum(squares) / 2) for squares in halves)
    target = table(0.85, 0.4)
    expected = [
        norm.logpdf(logit(p), sum(i) / 2, sigma_in) - norm.logpdf(logit(p), sum(o) / 2, sigma_out)
        for p, i, o in zip((0.85, 0.4), ins, outs, strict=True)
    ]
    found = fitted.score(target, Candidates(rows(0, 1), ids=torch.tensor([0, 1])))
    assert found.scores.dtype == torch.float64
    assert found.scores.tolist() == pytest.approx(expected, rel=1e-9)
    assert found.note is None
    turned = fitted.score(target, Candidates(rows(1, 0), ids=torch.tensor([1, 0])))
    assert turned.scores.tolist() == found.scores.flip(0).tolist()


def test_the_threshold_separates_the_attackers_own_models():
    found = lira().fit(four_models(), rng()).score(table(0.9, 0.2), Candidates(rows(0, 1), ids=torch.tensor([0, 1])))
    assert found.members.tolist() == [True, False]


def test_in_out_models_without_ids_are_all_out_and_it_says_so():
    outs = lira().fit(four_models(), rng())
    found = outs.score(table(0.9, 0.9), Candidates(rows(0)))
    assert found.note is not None and "offline" in found.note
    means = [logit(0.9), logit(0.95), logit(0.3), logit(0.2)]
    scale = float(outs.fixed[OUT])
    assert float(found.scores) == pytest.approx(-norm.logsf(logit(0.9), sum(means) / 4, scale))


def shadow(box, members, nonmembers):
    return Shadow(box, rows(*members), rows(*nonmembers))


def test_disjoint_shadows_run_offline_and_say_so():
    # row 5 is the victim's: all three are out for it
    shadows = [
        shadow(table(0.9, 0.95, 0.3, 0.4, 0.2, 0.5), (0, 1), (2, 3)),
        shadow(table(0.2, 0.4, 0.8, 0.9, 0.3, 0.6), (2, 3), (0, 1)),
        shadow(table(0.3, 0.3, 0.2, 0.3, 0.9, 0.4), (4,), (0, 2)),
    ]
    fitted = lira().fit(shadows, rng())
    found = fitted.score(table(0, 0, 0, 0, 0, 0.99), Candidates(rows(5), ids=torch.tensor([4000])))
    mean = (logit(0.5) + logit(0.6) + logit(0.4)) / 3
    assert float(found.scores) == pytest.approx(-norm.logsf(logit(0.99), mean, float(fitted.fixed[OUT])))
    assert found.note == "lira ran offline: none of the attacker's models trained on the candidates"
    assert lira(mode="offline").fit(shadows, rng()).score(shadows[0].box, Candidates(rows(5))).note is None


def test_rehearsal_knows_shared_rows_by_their_content():
    # each row's out models are those that did not train on it, in whatever order the shadows hold it
    shadows = [
        shadow(table(0.9, 0.9, 0.2, 0.3), (1, 0), (2, 3)),
        shadow(table(0.2, 0.9, 0.9, 0.3), (2, 1), (3, 0)),
        shadow(table(0.1, 0.3, 0.9, 0.9), (3, 2), (0, 1)),
    ]
    fitted = lira().fit(shadows, rng())
    known = fitted.references.models
    by_row = {int(x): tuple(inside.tolist()) for x, inside in zip(known.pool.inputs, known.membership.T, strict=True)}
    assert by_row == {0: (1, 0, 0), 1: (1, 1, 0), 2: (0, 1, 1), 3: (0, 0, 1)}


def test_the_variance_is_fixed_below_64_models():
    def models(number):
        inside = torch.arange(number)[:, None] % 2 == torch.arange(4) % 2
        boxes = [table(*torch.rand(4, generator=rng(i)).tolist()) for i in range(number)]
        return InOut(boxes, rows(0, 1, 2, 3), inside)

    assert lira().fit(models(62), rng()).fixed is not None
    assert lira().fit(models(64), rng()).fixed is None
    assert lira(variance="per-example").fit(models(6), rng()).fixed is None
    assert lira(variance="fixed").fit(models(64), rng()).fixed is not None


def test_too_few_models_are_refused_with_the_number_needed():
    with pytest.raises(WrongInput, match="at least 2 shadow models; 1 given"):
        lira().fit([shadow(table(0.1, 0.2), (0,), (1,))], rng())
    with pytest.raises(WrongInput, match="at least 2 shadow models; 0 given"):
        lira().fit([], rng())
    with pytest.raises(WrongInput, match="at least 3 shadow models"):
        lira(variance="per-example").fit([shadow(table(0.1, 0.2), (0,), (1,))] * 2, rng())
    pair = InOut([table(0.1, 0.2)] * 2, rows(0, 1), torch.tensor([[True, False], [False, True]]))
    with pytest.raises(WrongInput, match="at least 4 in-out models"):
        lira().fit(pair, rng())
    with pytest.raises(WrongInput, match="at least 6 in-out models"):
        lira(variance="per-example").fit(four_models(), rng())


def test_other_wrong_input_is_said_clearly():
    for name, value in (("mode", "onlin"), ("offline", "pdf"), ("variance", "global")):
        with pytest.raises(WrongInput, match="is not known"):
            lira(**{name: value})
    with pytest.raises(WrongInput, match="must be 1, or 2"):
        lira(queries=3)
    with pytest.raises(WrongInput, match="needs images"):
        lira(queries=2).fit(four_models(), rng())
    with pytest.raises(WrongInput, match="fit it"):
        lira().score(table(0.5), Candidates(rows(0)))
    with pytest.raises(WrongInput, match="mode online needs in-out"):
        lira(mode="online").fit(four_models(), rng()).score(table(0.5), Candidates(rows(0)))
    with pytest.raises(WrongInput, match="0 to 1"):
        lira().fit(four_models(), rng()).score(table(0.5), Candidates(rows(0), ids=torch.tensor([2])))
    with pytest.raises(WrongInput, match="shape"):
        lira().fit(InOut(four_models().boxes, rows(0, 1, 2), four_models().membership), rng())
    with pytest.raises(WrongInput, match="labels only"):
        lira().fit(four_models(), rng()).score(BlackBox(table(0.5).predict, labels_only=True), Candidates(rows(0)))
    same = [shadow(table(0.9, 0.2), (0,), (1,)), shadow(table(0.8, 0.2), (0,), (1,))]
    with pytest.raises(WrongInput, match="tried on one another"):
        lira().fit(same, rng())


@pytest.fixture(scope="module")
def experiment():
    return in_out_digits()


def test_online_beats_offline_beats_chance_on_networks_that_memorised(experiment):
    models, target, truth = experiment
    candidates = Candidates(models.pool, ids=torch.arange(models.pool.size))
    found = {mode: lira(mode=mode).fit(models, rng()).score(target, candidates) for mode in ("online", "offline")}
    areas = {mode: float(auc(roc(guesses.scores, truth))) for mode, guesses in found.items()}
    confidence = target.predict(models.pool.inputs).gather(1, models.pool.labels[:, None])[:, 0]
    assert areas["online"] > 0.8
    assert areas["online"] > areas["offline"] > float(auc(roc(confidence, truth))) > 0.5
    measures = evaluate(found["online"], truth)
    assert measures["balanced_accuracy"].value > 0.7  # the rehearsed threshold serves the target too
    assert measures["tpr_at_fpr_0.01"].value > 0.1
    again = lira(mode="online").fit(models, rng(5)).score(target, candidates)
    assert torch.equal(again.scores, found["online"].scores)


def test_the_mirror_is_a_second_query(experiment):
    models, target, truth = experiment
    few = InOut(models.boxes[:8], models.pool, models.membership[:8])
    usable = ((few.membership.sum(0) > 1) & (few.membership.sum(0) < 7)).nonzero()[:, 0]
    few = InOut(few.boxes, few.pool.take(usable), few.membership[:, usable])
    found = lira(queries=2).fit(few, rng()).score(target, Candidates(few.pool, ids=torch.arange(len(usable))))
    assert float(auc(roc(found.scores, truth[usable]))) > 0.7


def test_disjoint_shadows_beat_chance_offline(experiment):
    models, target, truth = experiment
    half = noisy_digits(1200)  # other rows than the first 400
    half = half.take(torch.arange(400, 1200))
    shadows = []
    for seed in range(5):
        order = torch.randperm(800, generator=rng(seed))
        members, nonmembers = half.take(order[:200]), half.take(order[400:600])
        shadows.append(Shadow(memorise(members, seed, 10), members, nonmembers))
    found = lira().fit(shadows, rng()).score(target, Candidates(models.pool))
    assert "offline" in found.note
    measures = evaluate(found, truth)
    assert measures["auc"].value > 0.7
    assert measures["balanced_accuracy"].value > 0.6
    turned = Candidates(Batch(models.pool.inputs.flip(0), models.pool.labels.flip(0)))
    backwards = lira().fit(shadows, rng()).score(target, turned)
    assert torch.allclose(backwards.scores.flip(0), found.scores, atol=1e-4)
