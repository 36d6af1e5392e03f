"""How exposed clients are: batch mates, who is asked, shadow clients, and the correlation with their data."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from secateur import tree
from secateur.attacks.membership.scoring_batches import (
    RULES,
    answer_parts,
    fix_statistics,
    is_static,
    scorer,
    shuffle_inputs,
)
from secateur.config import Federate, dump, read
from secateur.config.methods import choice
from secateur.data.embedded import digits
from secateur.errors import WrongInput
from secateur.federated.spec import Adam
from secateur.federated.submodels import membership_attacks
from secateur.federated.submodels.membership_attacks import (
    Asking,
    MembershipEvaluation,
    Target,
    halves,
    pool_of,
    turn_of,
)
from secateur.metrics.estimates import exposure_correlation
from secateur.models.create import create
from secateur.seeding import derive
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit

YEOM, LIRA, RMIA = (choice("attack", name) for name in ("yeom", "lira", "rmia"))
TURN = turn_of(Adam())
LABELS = {"model": "mapp-cnn-8", "dataset": "digits", "defense": "none", "seed": 0, "extra": {"submodels": "none"}}


@pytest.fixture(scope="module")
def data():
    """Digits whose labels can only be learnt by heart: what is not a member is a surprise."""
    whole = digits()
    labels = torch.randint(10, (len(whole.labels),), generator=derive(0, "labels"))
    return replace(whole, labels=labels, train_size=len(labels) // 2)


@pytest.fixture(scope="module")
def target(data):
    """A client that knows its 400 rows nearly by heart, from the model that it received for its last turns."""
    net, rows = create("mapp-cnn-8", data.input_shape, data.classes, derive(0, "net")), torch.arange(400)
    start, states = tree.state_of(net), []
    for epochs in (10, 5, 5):
        nobody = data.batch.take(torch.arange(0))
        recipe = Recipe(epochs=epochs, batch_size=32, weight_decay=0.0, patience=None)
        task = Task(states[-1] if states else start, data.batch.take(rows), nobody, derive(0, "train"))
        states.append(fit(net, task, recipe).state)
    return Target(0, net, states, rows, states[0])


def expose(target, data, attacks, labels, asking=None, turn=TURN):
    """The rows of a target."""
    device = torch.device("cpu")
    return MembershipEvaluation(target, data, asking or Asking(), turn, device, target.labels(labels)).rows(attacks)


def found(rows, metric="advantage", **wanted):
    """The one row that fits."""
    fitting = [
        row
        for row in rows
        if row.metric == metric and all(row.to_json().get(name) == value for name, value in wanted.items())
    ]
    assert len(fitting) == 1, fitting
    return fitting[0]


@pytest.fixture(scope="module")
def rows(target, data):
    asking = Asking(updates=3, shadows=4, size=32)
    return expose(target, data, [YEOM, LIRA, RMIA], LABELS, asking=asking, turn=replace(TURN, epochs=6, batch_size=32))


def test_a_client_that_learnt_by_heart_is_exposed_to_every_attack(rows):
    for attack in ("yeom", "lira", "rmia"):
        advantage = found(rows, attack=attack, batches="mixed", updates=1)
        assert advantage.low > 0.05 and advantage.low <= advantage.value <= advantage.high
        accuracy = found(rows, "attack_accuracy", attack=attack, batches="mixed", updates=1)
        assert advantage.value == pytest.approx(2 * (accuracy.value - 0.5))  # mapp_fl Eq. 4


def test_rows_say_whom_and_how_they_attacked(rows, target):
    row = found(rows, attack="yeom", batches="mixed", updates=1)
    said = {"scope": "client", "client": 0, "data_size": 400, "known": 4, "submodels": "none"}
    assert said.items() <= row.extra.items()
    assert row.extra["parameters"] == sum(value.numel() for value in target.net.parameters())
    assert found(rows, "test_accuracy").value < 0.3  # random labels: only members are known


def test_the_stateful_attacker_and_the_other_batch_rules_are_rows_of_their_own(rows):
    kept = {(row.extra["batches"], row.extra["updates"]) for row in rows if row.attack == "yeom"}
    assert kept == {("mixed", 1), ("mixed", 3), ("apart", 1), ("fixed", 1)}


def test_shuffling_the_candidates_leaves_the_advantage_in_its_interval(target, data):
    asking = Asking(size=32, compare=False)
    target = replace(target, sent=target.sent[-1:])
    first = found(expose(target, data, [YEOM], LABELS, asking=asking), attack="yeom")
    for mates in range(1, 4):
        again = found(expose(target, data, [YEOM], LABELS, asking=replace(asking, mates=mates)), attack="yeom")
        assert first.low <= again.value <= first.high


def test_four_known_members_say_little_and_the_range_over_them_shows_it(rows):
    spread = found(rows, "advantage_over_knowledge", attack="yeom")
    one = found(rows, attack="yeom", batches="mixed", updates=1)
    assert spread.low <= one.value <= spread.high and spread.high - spread.low > 0.2


def test_a_client_that_is_too_small_is_said_and_left_out(target, data):
    small = replace(target, rows=torch.arange(3))
    row = found(expose(small, data, [YEOM], LABELS), attack="yeom")
    assert row.value is None and row.note.startswith("excluded: 3 members and")
    few = replace(target, rows=torch.arange(99))
    row = found(expose(few, data, [YEOM], LABELS, asking=Asking(printed=True)), attack="yeom")
    assert row.value is None and "must know some of each (1 % of the members, at most 3)" in row.note


@pytest.mark.parametrize("spare", [1, 2])
def test_a_population_of_one_row_is_said_and_left_out(target, data, spare, monkeypatch):
    """One row has no batch statistics: the run ended with advice about the clients' batches."""

    def deal(asked, rng):
        whole = pool_of(asked, rng)
        return whole._replace(rows=whole.rows[: len(whole.is_member) + spare])

    monkeypatch.setattr(membership_attacks, "pool_of", deal)
    small, asking = replace(target, rows=torch.arange(60)), Asking(shadows=4, size=32, compare=False)
    rows = expose(small, data, [LIRA, RMIA], LABELS, asking=asking, turn=replace(TURN, epochs=1, batch_size=32))
    assert found(rows, attack="lira").value is not None
    rmia = found(rows, attack="rmia")
    assert (rmia.value is None) == (spare == 1)
    assert spare > 1 or rmia.note.startswith("excluded: its population has 1 of at least 2 rows")


def test_an_attack_that_was_excluded_was_not_met(target, data):
    server = replace(target, client=None, sent=target.sent[-1:], received=None)
    rows = expose(server, data, [YEOM, LIRA], LABELS, asking=Asking(compare=False, size=32, federations=8))
    assert "did not meet lira" in found(rows, "auc", attack="yeom").note


def test_the_server_has_no_shadow_clients_but_is_attacked(target, data):
    server = replace(target, client=None, sent=target.sent[-1:], received=None)
    rows = expose(server, data, [YEOM, LIRA], LABELS, asking=Asking(compare=False, size=32))
    assert found(rows, attack="yeom").extra["scope"] == "server"
    assert "server" in found(rows, attack="lira").note


def test_the_papers_minimum_holds_for_clients_alone(target, data):
    asking = Asking(printed=True, compare=False, size=32, shuffles=1)
    server = replace(target, client=None, sent=target.sent[-1:], received=None)
    client = replace(target, sent=target.sent[-1:])
    knows = [found(expose(one, data, [YEOM], LABELS, asking=asking), attack="yeom") for one in (client, server)]
    assert [row.extra["known"] for row in knows] == [3, 4]  # of 400


# Batch mates -----------------------------------------------------------------------------------------------------
def test_a_loss_depends_on_its_batch_mates_unless_statistics_are_fixed(target, data):
    inputs, answer = data.inputs[:40], scorer(target.net, target.sent[-1], "cpu", 32)
    alone = answer(inputs[:5])
    assert is_static(target.net) and (answer(inputs)[:5] - alone).abs().max() > 1e-3
    net, state = fix_statistics(target.net, target.sent[-1], data.inputs[900:1100], 32)
    fixed = scorer(net, state, "cpu", 32)
    assert not is_static(net)
    torch.testing.assert_close(fixed(inputs)[:5], fixed(inputs[:5]), rtol=1e-5, atol=1e-6)


def test_every_batch_has_the_size_asked_for(target, data):
    sizes = []
    answer = scorer(target.net, target.sent[-1], "cpu", 32)
    hook = torch.nn.Linear.forward

    def counting(self, x):
        sizes.append(len(x))
        return hook(self, x)

    torch.nn.Linear.forward = counting
    try:
        assert len(answer(data.inputs[:70])) == 70
    finally:
        torch.nn.Linear.forward = hook
    assert sizes == [32, 32, 32]  # the last six rows with those before them


def test_mixed_parts_come_back_in_their_order(target, data):
    def plain(inputs):
        return inputs.flatten(1)[:, :10].softmax(1)

    parts = [data.inputs[:7], data.inputs[7:30]]
    for rule in RULES:
        back = answer_parts(plain, parts, rule, derive(0, "mix"))
        assert all(torch.equal(one, plain(part)) for one, part in zip(back, parts, strict=True))
    assert torch.equal(shuffle_inputs(plain, derive(0, "mix"))(parts[1]), plain(parts[1]))
    with pytest.raises(WrongInput, match="mixed"):
        answer_parts(plain, parts, "mixd", derive(0, "mix"))


# Shadows and correlation -----------------------------------------------------------------------------------------
@given(st.integers(1, 20), st.integers(1, 5))
def test_every_row_is_in_half_of_the_shadow_clients(rows, pairs):
    design = halves(2 * rows, 2 * pairs, derive(0, "halves"))
    assert (design.sum(0) == pairs).all() and (design.sum(1) == rows).all()


def test_an_odd_number_of_shadow_clients_is_refused():
    with pytest.raises(WrongInput, match="even"):
        halves(10, 3, derive(0, "halves"))


def test_small_clients_do_not_count_in_the_correlation():
    clients = [(10_000, 0.01), (1000, 0.02), (500, 0.025), (5000, 0.015), (100, -0.9)]
    result = exposure_correlation(clients)
    assert result.r.value < -0.9 and result.excluded == 1 and result.clients == 4
    assert result.r.low <= result.r.value <= result.r.high and result.p < 0.05
    assert exposure_correlation(clients[2:]) is None


def test_stacked_batches_answer_as_they_do_one_by_one(target, data):
    inputs = data.inputs[:107].double()
    net = create("mapp-cnn-8", data.input_shape, data.classes, derive(0, "net")).double()
    state = {name: value.double() for name, value in target.sent[-1].items()}
    plain, stacked = (scorer(net, state, "cpu", 32, stacked=way)(inputs) for way in (False, True))
    torch.testing.assert_close(stacked, plain, rtol=1e-9, atol=1e-12)
    few = [scorer(net, state, "cpu", 32, stacked=way)(inputs[:9]) for way in (False, True)]
    torch.testing.assert_close(few[0], few[1], rtol=1e-9, atol=1e-12)


# The run file ----------------------------------------------------------------------------------------------------
def test_with_sub_models_an_attack_asks_who_was_in():
    def exposure(**fields):
        return list(map(str, read(Federate, None, {"submodels": "mapp-fl"} | fields).exposure))

    assert exposure() == ["yeom"] and exposure(attack="none") == []
    assert exposure(attack="yeom:threshold=tuned,lira,rmia") == ["yeom:threshold=tuned", "lira", "rmia"]
    own = dump(read(Federate, None, {"submodels": "mapp-fl", "attack": "lira"}))
    assert list(map(str, read(Federate, None, own).exposure)) == ["lira"]  # a run's own file says the same again


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"attack": "yoem"}, "yeom"),
        ({"shadow_clients": 3}, "even"),
        ({"membership": "yeom"}, "submodels"),
        ({"advise": True, "attack": "none"}, "advise"),
        ({"scoring": "alone"}, "mixed"),
    ],
)
def test_what_cannot_be_asked_is_refused(fields, word):
    with pytest.raises(WrongInput, match=word):
        read(Federate, None, {"submodels": "mapp-fl"} | fields)


def test_exposure_means_nothing_without_sub_models():
    with pytest.raises(WrongInput, match="submodels"):
        read(Federate, None, {"exposure": "yeom"})
