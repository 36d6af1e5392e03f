"""Who is in a client's data: scores by hand, what is remembered, and that a client that overfits is told apart."""

from dataclasses import replace

import pytest
import torch
from torch.special import log_ndtr

from alone import pictures
from secateur import tree
from secateur.config import defense
from secateur.data.partition import iid
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.federated.attacks.membership import (
    MembershipObserver,
    Observed,
    check_membership,
    dominate_population,
    rebuild_model,
    scores,
)
from secateur.federated.attacks.observer import Every
from secateur.federated.attacks.schedule import AttackSchedule
from secateur.federated.checkpoint import FederationLog
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.result_rows import RecordedFederation, record_rounds
from secateur.federated.sampling import sampler_of
from secateur.federated.spec import FederationSpec
from tiny_rules import Half, Withhold, bn_net, federation, plain_net, run

ROWS = 60
PARTS = iid(ROWS, 5, torch.Generator().manual_seed(0))
MANY = {"auc", "advantage", "balanced_accuracy", "attack_accuracy", "tpr_at_fpr_0.1", "tpr_at_fpr_0.01"}


def data():
    made = pictures(ROWS, 40)
    return replace(
        made, labels=torch.randint(3, (100,), generator=torch.Generator().manual_seed(1))
    )  # no rule to learn


def asked(attacks=("yeom", "lira"), orders=None, net=None, seed=0, execution="auto", **terms):
    given = {
        "rounds": 4,
        "per_round": 4,
        "shares": PARTS,
        "local": LocalTraining(30, None, 12, 0.3),
        "evaluate_every": 4,
    } | terms
    agreed, orders, net = FederationSpec(**given), orders or AttackSchedule(every=4, who="all"), net or plain_net()
    kept = orders.plan_memory(agreed.rounds, sampler_of(agreed, seed).clients)
    labels, log = {"model": "m", "dataset": "d", "seed": seed, "extra": {}}, FederationLog()
    check_membership(attacks, data(), agreed)
    asker = MembershipObserver(attacks, net, data(), agreed, labels, log, orders, kept, torch.device("cpu"))
    return federation(net, seed, execution, [asker], data=data(), **given), asker, log


def found(log, metric="auc"):
    rows = [row for row in log.rows if row.metric == metric]
    return {(row.attack, row.extra["round"], row.extra["client"]): row.value for row in rows}


def test_scores_by_hand():
    rounds = [
        Observed(torch.tensor([1.0, 5.0]), torch.tensor([[0.0, 1.0], [2.0, 3.0]])),
        Observed(torch.tensor([2.0, 2.0]), torch.tensor([[1.0, 1.0], [2.0, 1.0], [3.0, 4.0]])),
    ]
    # squares: round 1 (2, 2), round 2 (2, 6); freedom 1 + 2; pooled over both candidates: sqrt((4 + 8) / 2 / 3)
    scale = (6 / 3) ** 0.5
    first = (torch.tensor([1.0, 5.0]) - torch.tensor([1.0, 2.0])) / (scale * 1.5**0.5)
    second = (torch.tensor([2.0, 2.0]) - torch.tensor([2.0, 2.0])) / (scale * (4 / 3) ** 0.5)
    wanted = (-log_ndtr(-first) - log_ndtr(-second)) / 2
    torch.testing.assert_close(scores(rounds), wanted)
    assert scores([Observed(torch.ones(2), torch.ones(1, 2))]) is None and scores([]) is None


def test_rmia_by_hand():
    """a = .3: with others at p = .5 the prior is (1.3 * .5 + .7) / 2 = .675. Ratios of p = .9 .5 | .8 .4 .1 over it,
    in the second round of p = .5 each: the first is above all of the population, the second above two."""
    p = torch.tensor([0.9, 0.5, 0.8, 0.4, 0.1], dtype=torch.float64)
    even = torch.full((2, 5), 0.0, dtype=torch.float64)
    rounds = [Observed(p.logit(), even), Observed(even[0], even)]
    assert dominate_population(rounds, 2).tolist() == pytest.approx([1, 2 / 3])
    assert dominate_population([Observed(p.logit(), even[:0])], 2) is None


def test_rmia_tells_members_apart_by_a_population_that_is_no_candidate():
    fed, asker, log = asked(("rmia",), orders=AttackSchedule(every=4, who="all", history=2))
    run(fed)
    rows = [row for row in log.rows if row.metric == "auc"]
    assert len(rows) == 4 and sum(row.value for row in rows) / 4 > 0.8
    assert {row.extra["population"] for row in rows} == {20} and {row.extra["history"] for row in rows} <= {1, 2}
    assert all(observed.target.shape == (3 + 9 + 9 + 20,) for past in asker.past.values() for observed in past)


def test_an_example_has_its_own_deviation_where_there_are_many():
    rng = torch.Generator().manual_seed(0)
    others = torch.randn(65, 2, generator=rng) * torch.tensor([1.0, 10.0])
    own = others.mean(0) + 5
    z = 5 / (others.std(0) * (1 + 1 / 65) ** 0.5)
    torch.testing.assert_close(scores([Observed(own, others)]), -log_ndtr(-z))


def test_clients_that_overfit_are_told_apart():
    fed, _, log = asked(orders=AttackSchedule(every=4, who="all", history=3))
    run(fed)
    assert {name for name in MANY if found(log, name)} == MANY
    for attack in ("yeom", "lira"):
        values = [value for (name, *_), value in found(log).items() if name == attack]
        assert len(values) == 4 and sum(values) / 4 > 0.8
    lira = [row for row in log.rows if row.attack == "lira" and row.metric == "auc"]
    assert {row.extra["history"] for row in lira} <= {2, 3} and all(row.low < row.value < row.high for row in lira)
    assert all(row.extra["known"] == 3 and row.extra["rows"] == 12 for row in log.rows)


def test_labels_of_others_are_not_told_apart_by_a_client_that_learns_nothing():
    fed, _, log = asked(local=LocalTraining(1, None, 12, 1e-6), orders=AttackSchedule(every=4, who="all"))
    run(fed)
    values = [value for (name, *_), value in found(log).items() if name == "yeom"]
    assert abs(sum(values) / len(values) - 0.5) < 0.2


@pytest.mark.parametrize(
    "terms",
    [{"net": bn_net()}, {"base": Half(every=100), "withholding": Withhold()}, {"method": "fedsgd"}, {"view": "sum"}],
)
def test_every_kind_of_update(terms):
    terms = {"local": LocalTraining(1, None, 12, 0.3)} | terms
    fed, _, log = asked(("yeom",), **terms)
    run(fed)
    clients = 1 if terms.get("view") == "sum" else 4
    assert len(found(log)) == clients and all(0 <= value <= 1 for value in found(log).values())


def test_what_was_withheld_is_taken_as_it_was_sent():
    looks = []

    class Looking(Every):
        def __call__(self, look):
            looks.append(look)

    fed = federation(observers=[Looking(1, None)], base=Half(every=100), withholding=Withhold(), rounds=1)
    run(fed)
    look = looks[0]
    model = rebuild_model(look, look.seen[0], 0.1)
    kept = look.seen[0].view.update.values
    for name, mask in look.mask.items():
        withheld = mask & (kept[name] == 0)
        assert withheld.any() and torch.equal(model[name][withheld], look.sent[name][withheld])
        assert torch.equal(model[name][~withheld], kept[name][~withheld])
    dgp = federation(
        observers=[Looking(1, None)], upload=upload_of(defense("dgp")), rounds=1, local=LocalTraining(1, None, 4, 0.1)
    )
    run(dgp)
    look = looks[1]
    model, gradient = rebuild_model(look, look.seen[0], 0.1), look.seen[0].view.update.values
    assert all(torch.equal(model[name], look.sent[name] - 0.1 * value) for name, value in gradient.items())


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_resumed_attacker_goes_on(after):
    def new():
        return asked(orders=AttackSchedule(at=(2, 4), who=2, history=3), local=LocalTraining(2, None, 6, 0.3))

    (whole, _, log), (first, _, begun), (second, _, told) = new(), new(), new()
    run(whole)
    rounds = first.rounds()
    for _ in range(after):
        next(rounds)
    tensors, kept = first.state()
    second.load(tree.clone(tensors), kept)
    told.load(begun.to_plain())
    run(second)
    assert [row.to_json() for row in told.rows] == [row.to_json() for row in log.rows] and log.rows


def test_stacked_clients_are_asked_alike():
    stories = []
    for execution in ("sequential", "stacked"):
        fed, _, log = asked(local=LocalTraining(3, None, 6, 0.3), execution=execution)
        run(fed)
        stories.append(found(log))
    assert stories[0] == pytest.approx(stories[1], abs=1e-9)


def test_a_client_with_few_rows_is_told_and_left_out():
    parts = [PARTS[0][:2], *PARTS[1:]]
    fed, _, log = asked(orders=AttackSchedule(every=1, who=(0,)), shares=parts, local=LocalTraining(1, None, 4, 0.1))
    run(fed)
    rows = [row for row in log.rows if row.metric == "auc"]
    assert rows and all(row.value is None and "too few" in row.note for row in rows)


@pytest.mark.parametrize(
    "terms, attacks, said",
    [
        ({"per_round": 2}, ("lira",), "at least 3"),
        ({"per_round": 1}, ("rmia",), "at least 2"),
        ({"view": "sum"}, ("yeom", "lira"), "use yeom"),
        ({"shares": [rows[:3] for rows in PARTS]}, ("yeom",), "too few"),
    ],
)
def test_what_cannot_be_asked_is_refused(terms, attacks, said):
    with pytest.raises(WrongInput, match=said):
        asked(attacks, **terms)


def test_a_model_that_overflows_is_told_as_nothing_and_ends_no_run():
    fed, _, log = asked(rounds=1, local=LocalTraining(1, None, 12, 1e200), orders=AttackSchedule(every=1, who="all"))
    run(fed)
    assert len(log.rows) == 8 and all(row.metric == "auc" and row.value is None for row in log.rows)
    assert {row.note for row in log.rows} == {"the client's model answers with NaN or infinity"}


def test_lira_leaves_out_others_that_overflow():
    fed, asker, log = asked(("lira",), rounds=1, orders=AttackSchedule(every=1, who="all"))
    answered, gone = asker._probabilities, []

    def some(look, seen, batch):
        gone[:] = gone or [seen.client]
        return None if [seen.client] == gone else answered(look, seen, batch)

    asker._probabilities = some
    run(fed)
    assert {client for (_, _, client), value in found(log).items() if value is None} == set(gone)
    assert {len(past[0].others) for past in asker.past.values()} == {2}


def test_where_nobody_answers_it_is_told_that_nobody_was_asked_about():
    fed, _, log = asked(orders=AttackSchedule(every=2), faults=Faults(drop_out=1.0))
    for _ in fed.rounds():
        pass
    told = {(row.attack, row.metric, row.value, row.extra["round"], row.note) for row in log.rows}
    said = "not attacked: no update of the round arrived"
    rounds = [number for number in range(1, fed.terms.rounds + 1) if number % 2 == 0]
    assert told == {(attack, "attacked_clients", 0, number, said) for attack in ("yeom", "lira") for number in rounds}


def test_the_display_says_what_leaked_so_far():
    fed, asker, log = asked(rounds=2, evaluate_every=1, orders=AttackSchedule(2, who="all"))
    shown = []
    recorded = [RecordedFederation(fed, asker.labels, FederationLog(), [asker])]
    tell = record_rounds(recorded, lambda steps, said=None: shown.append(said), "snip, dgp, seed 0")
    for done in fed.rounds():
        tell(done)
    assert shown[0].startswith("snip, dgp, seed 0: round 1, ") and "AUC" not in shown[0]
    assert shown[1].endswith(f"best AUC {max(found(log).values()):.2f}")
