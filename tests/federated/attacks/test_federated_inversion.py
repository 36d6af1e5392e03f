"""Attackers inside a federation: whom they attack and when, with how many rounds, and what they are shown."""

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import secateur
from alone import pictures
from secateur import tree
from secateur.attacks.inversion.gradient_matching import aim_at
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.config import defense, inversion
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput
from secateur.federated.attacks.inversion import InversionObserver
from secateur.federated.attacks.knowledge import check_attacks, knowledge_of
from secateur.federated.attacks.observer import prefix_of
from secateur.federated.attacks.schedule import AttackSchedule, check_orders
from secateur.federated.checkpoint import FederationLog
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.sampling import Sampler, sampler_of
from secateur.federated.spec import FederationSpec
from secateur.interfaces import Gradient, Weights
from secateur.training.optimisers import read_steps
from tiny_rules import LOCAL, ROWS, Half, Moving, Noisy, Stale, Withhold, bn_net, federation, plain_net, run, shares

ONE = LocalTraining(1, None, 4, 0.1)


def attacked(
    attack="ig:iterations=2", orders=None, net=None, labels="inferred", execution="auto", at_once=None, **terms
):
    """A federation with an attacker, run to its end; and what was told."""
    given = {"rounds": 4, "per_round": 3, "local": ONE, "shares": shares(), "evaluate_every": 4} | terms
    orders, agreed, net = orders or AttackSchedule(every=4), FederationSpec(**given), net or plain_net()
    known = knowledge_of(net, bright(), agreed, torch.device("cpu"))
    told = {"model": "m", "dataset": "d", "seed": 0, "extra": {"clients": len(agreed.shares)}}
    kept, log = orders.plan_memory(agreed.rounds, sampler_of(agreed, 0).clients), FederationLog()
    choices = [inversion(each) for each in ([attack] if isinstance(attack, str) else attack)]
    check_attacks(choices, known, bright(), agreed)
    check_orders(orders, agreed, 0)
    attacker = InversionObserver(choices, known, told, log, orders, kept, tells_labels=labels == "oracle", images=False)
    attacker.at_once = at_once or attacker.at_once
    return federation(net, execution=execution, observers=[attacker], data=bright(), **given), attacker, log


def bright():
    """Pictures in [0, 1], as what is recovered must be."""
    data = pictures(ROWS, 8)
    return replace(data, inputs=data.inputs.sigmoid())


def psnrs(log, pooled=False):
    rows = [row for row in log.rows if row.metric == "psnr"]
    return {(r.extra["round"], r.extra["client"]): r.value for r in rows if (r.extra["client"] is None) == pooled}


# Whom and when ---------------------------------------------------------------------------------------------------
def test_the_default_is_the_first_that_answers():
    fed, _, log = attacked(orders=AttackSchedule(every=2))
    run(fed)
    assert set(psnrs(log)) == {(n, fed.sampler.clients(n)[0]) for n in (2, 4)} and not psnrs(log, pooled=True)
    away, _, log = attacked(orders=AttackSchedule(every=1), faults=Faults(drop_out=0.4))
    run(away)
    lost = {n: [c for c in away.sampler.clients(n) if away._faults(n, away.sampler(n)).get(c)] for n in range(1, 5)}
    wanted = {(n, next(c for c in away.sampler.clients(n) if c not in lost[n])) for n in lost if len(lost[n]) < 3}
    assert any(lost.values()) and set(psnrs(log)) == wanted


@pytest.mark.parametrize("view", ["update", "sum"])
def test_where_nobody_answers_it_is_told_that_nobody_was_attacked(view):
    fed, _, log = attacked(orders=AttackSchedule(every=2), view=view, faults=Faults(drop_out=1.0))
    run(fed)
    told = [(row.metric, row.value, row.extra["round"], row.note) for row in log.rows if row.attack is not None]
    said = "not attacked: no update of the round arrived"
    assert told == [("attacked_clients", 0, 2, said), ("attacked_clients", 0, 4, said)]


def test_rounds_and_clients_are_chosen():
    fed, _, log = attacked(orders=AttackSchedule(at=(1, 3), who="all"))
    run(fed)
    assert set(psnrs(log)) == {(n, c) for n in (1, 3) for c in fed.sampler.clients(n)}
    assert set(psnrs(log, pooled=True)) == {(1, None), (3, None)}
    pooled = [row for row in log.rows if row.metric == "psnr" and row.extra["client"] is None]
    single = psnrs(log)
    assert [row.extra["attacked"] for row in pooled] == [3, 3]
    assert pooled[0].value == pytest.approx(sum(v for (n, _), v in single.items() if n == 1) / 3)


def test_named_clients_and_those_that_took_no_part():
    fed, _, log = attacked(orders=AttackSchedule(every=1, who=(0, 1)))
    run(fed)
    there = {(n, c) for n in range(1, 5) for c in fed.sampler.clients(n) if c in (0, 1)}
    assert set(psnrs(log)) == there and len(there) < 8
    told = [row for row in log.rows if row.metric == "attacked_clients"]
    assert {(row.extra["round"], row.value) for row in told} == {
        (n, len([c for m, c in there if m == n])) for n in range(1, 5) if len([c for m, c in there if m == n]) < 2
    }
    assert all("took no part" in row.note for row in told)


@pytest.mark.parametrize("labels", ["inferred", "oracle"])
def test_clients_of_several_rounds_are_one_call_and_what_each_would_be_alone(labels, monkeypatch):
    from secateur.attacks.inversion.ig import IG

    calls, whole = [], IG.reconstruct

    def counting(self, targets, knowledge, chance, watch):
        calls.append(len(targets))
        yield from whole(self, targets, knowledge, chance, watch)

    monkeypatch.setattr(IG, "reconstruct", counting)
    terms = {"labels": labels, "orders": AttackSchedule(every=1, who=2), "rounds": 5}
    fed, _, many = attacked(("ig:iterations=2", "sgi:iterations=2"), at_once=6, **terms)
    run(fed)
    assert calls == [6, 6, 4, 4]  # of three rounds, and of the two that are left when all are over
    fed, _, alone = attacked(("ig:iterations=2", "sgi:iterations=2"), at_once=1, **terms)
    run(fed)
    one, other = (sorted(log.rows, key=lambda row: str([row.attack, row.metric, row.extra])) for log in (alone, many))
    assert [(r.attack, r.metric, r.extra) for r in one] == [(r.attack, r.metric, r.extra) for r in other]
    for mine, theirs in zip(one, other, strict=True):
        assert mine.timing or mine.value == theirs.value or mine.value == pytest.approx(theirs.value, rel=1e-6)


def test_rounds_of_several_sizes_are_a_call_each(monkeypatch):
    from secateur.attacks.inversion.ig import IG

    calls, whole = {}, IG.reconstruct

    def counting(self, targets, knowledge, chance, watch):
        calls[knowledge.batch_size] = len(targets)
        yield from whole(self, targets, knowledge, chance, watch)

    monkeypatch.setattr(IG, "reconstruct", counting)
    terms = {"view": "sum", "faults": Faults(drop_out=0.3), "rounds": 6}
    fed, attacker, log = attacked(orders=AttackSchedule(every=1), at_once=100, **terms)
    rounds = fed.rounds()
    for _ in range(6):
        next(rounds)
    sizes = Counter(len(aimed.truths[0].labels) for aimed in attacker.waiting)
    assert next(rounds, None) is None and not attacker.waits
    assert len(sizes) > 1 and calls == sizes and len(psnrs(log, pooled=True)) == 6


@pytest.mark.parametrize("attack", ["rob", "ig:iterations=1:adaptive=reapply"])
def test_what_knows_something_of_its_round_is_a_call_of_its_own(attack, monkeypatch):
    """A model that was tampered with, a base pruning's mask before a compression."""
    terms = {} if attack == "rob" else {"upload": upload_of(defense("dgp")), "base": Half(every=2)}
    fed, attacker, log = attacked(attack, AttackSchedule(every=1, who=2), at_once=100, **terms)
    kind, calls = type(inversion(attack).make()), []
    whole = kind.reconstruct

    def counting(self, targets, *given):
        calls.append(len(targets))
        yield from whole(self, targets, *given)

    monkeypatch.setattr(kind, "reconstruct", counting)
    attacker.compress = None if attack == "rob" else fed.terms.upload.compress
    run(fed)
    assert calls == [2, 2, 2, 2] and len(psnrs(log)) == 8


def test_who_waits_is_attacked_before_a_state_is_taken():
    fed, attacker, log = attacked(orders=AttackSchedule(every=1), at_once=100)
    rounds = fed.rounds()
    next(rounds), next(rounds)
    assert len(attacker.waiting) == 2 and not psnrs(log) and fed.puts_off and not fed.was_observed(2)
    fed.state()
    assert not attacker.waiting and not fed.puts_off and fed.was_observed(2)
    assert {number for number, _ in psnrs(log)} == {1, 2}
    assert len([*rounds]) == 2 and {number for number, _ in psnrs(log)} == {1, 2, 3, 4}


def test_who_waits_is_forgotten_where_an_earlier_state_is_loaded():
    fed, attacker, log = attacked(orders=AttackSchedule(every=1), at_once=100)
    begun = fed.state()
    next(fed.rounds())
    assert attacker.waits
    fed.load(*begun)
    run(fed)
    assert [row.extra["round"] for row in log.rows if row.metric == "psnr"] == [1, 2, 3, 4]


def test_many_clients_are_one_call_and_what_each_would_be_alone(monkeypatch):
    calls = []
    from secateur.attacks.inversion.ig import IG

    whole = IG.reconstruct

    def counting(self, targets, knowledge, chance, watch):
        calls.append(len(targets))
        yield from whole(self, targets, knowledge, chance, watch)

    monkeypatch.setattr(IG, "reconstruct", counting)
    fed, _, log = attacked("ig:iterations=4", AttackSchedule(at=(2,), who="all"))
    run(fed)
    assert calls == [3]
    for place, client in enumerate(fed.sampler.clients(2)):  # alone: the draws of those before it are taken first

        def skipping(self, targets, knowledge, chance, watch, place=place):
            for _ in range(place):
                torch.randint(2**62, (), generator=chance[0])
            yield from whole(self, targets, knowledge, chance, watch)

        monkeypatch.setattr(IG, "reconstruct", skipping)
        alone, _, other = attacked("ig:iterations=4", AttackSchedule(at=(2,), who=(client,)))
        run(alone)
        assert psnrs(other)[2, client] == pytest.approx(psnrs(log)[2, client], abs=1e-9)


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_stacked_clients_are_attacked_alike(execution):
    fed, _, log = attacked(
        "ig:iterations=4", AttackSchedule(at=(2, 4), who=2, history=2), fixed_batches=True, execution=execution
    )
    run(fed)
    plain, _, other = attacked("ig:iterations=4", AttackSchedule(at=(2, 4), who=2, history=2), fixed_batches=True)
    run(plain)
    assert psnrs(log) == pytest.approx(psnrs(other), abs=1e-6)


@pytest.mark.parametrize(
    "orders, said",
    [
        (AttackSchedule(at=(9,)), "4 rounds"),
        (AttackSchedule(who=4), "3 take part"),
        (AttackSchedule(who=(7,)), "0, 4"),
        (AttackSchedule(at=(1,), who=(1,)), "they do in"),
    ],
)
def test_orders_that_cannot_be_kept(orders, said):
    terms = FederationSpec(shares(), rounds=4, per_round=3, local=ONE)
    assert 1 not in sampler_of(terms, 0).clients(1)
    with pytest.raises(WrongInput, match=said):
        check_orders(orders, terms, 0)


# Several rounds ----------------------------------------------------------------------------------------------------
def test_fixed_batches_are_the_same_rows_in_every_round():
    sampler = Sampler(shares(), 3, replace(LOCAL, steps=2), seed=0, fixed=True)
    rows = {}
    for number in range(1, 30):
        drawn = sampler(number)
        assert drawn.clients == sampler.clients(number)
        for client, each in zip(drawn.clients, drawn.rows, strict=True):
            assert torch.equal(rows.setdefault(client, each), each)
    assert len(rows) == 5


def test_what_is_remembered():
    drawn = {1: [0, 1], 2: [1, 2], 3: [0, 2], 4: [0, 1]}.__getitem__
    assert AttackSchedule(at=(4,), history=2).plan_memory(4, drawn) == {3: {0}, 2: {1}}
    assert AttackSchedule(at=(4,), who=(1,), history=3).plan_memory(4, drawn) == {2: {1}, 1: {1}}
    assert AttackSchedule(at=(4,)).plan_memory(4, drawn) == {}


def test_several_rounds_reveal_more():
    """A linear model whose clients withhold 80 % of the weights, other ones each round: each shows some pixels."""
    rng = torch.Generator().manual_seed(1)
    inputs, labels = torch.rand(16, 1, 6, 6, generator=rng), torch.arange(16) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))
    found = {}
    for history, fixed in ((1, True), (2, True), (3, True), (3, False)):
        joins = "" if history != 2 else ":rounds=2"  # the attack's own setting, or that of all attacks
        made = secateur.federate(
            net,
            (inputs, labels),
            clients=4,
            rounds=3,
            local=LocalTraining(1, None, 1, 0.1),
            defense="random:rate=.8",
            attack=f"ig:iterations=150:tv=0:adaptive=mask{joins}",
            attack_clients="all",
            attack_history=1 if joins else history,
            fixed_batches=fixed,
            labels="oracle",
        )
        rows = [row for row in made.rows if row.metric == "psnr"]
        found[history, fixed] = rows[-1].value
        if history > 1:
            assert all(row.extra["same_rows"] == fixed and row.extra["history"] == history for row in rows)
            assert all(("joining them cannot help" in (row.note or "")) != fixed for row in rows)
    assert found[2, True] > found[1, True] + 2 and found[3, True] > found[2, True] + 1
    assert found[3, False] < found[1, True]  # rounds of other rows mislead it


def test_a_client_that_is_one_batch_needs_no_fixed_batches():
    fed, _, log = attacked(orders=AttackSchedule(at=(4,), who="all", history=2), local=LocalTraining(1, None, 8, 0.1))
    run(fed)
    rows = [row for row in log.rows if row.metric == "psnr" and row.extra["client"] is not None]
    assert all(row.extra["same_rows"] for row in rows) and {row.extra["history"] for row in rows} <= {1, 2}


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_a_resumed_attacker_remembers(method):
    def new():
        return attacked(
            orders=AttackSchedule(at=(4,), who="all", history=3), fixed_batches=True, method=method, per_round=4
        )

    (whole, _, log), (first, _, begun) = new(), new()
    run(whole)
    rounds = first.rounds()
    for _ in (1, 2, 3):
        next(rounds)
        second, attacker, told = new()
        tensors, data = first.state()
        second.load(tree.clone(tensors), copy.deepcopy(data))
        assert attacker.memory.past
        told.load(begun.to_plain())
        run(second)
        assert psnrs(told) == psnrs(log) and psnrs(log)


def test_an_attacker_who_knows_the_compression_applies_it_again():
    train = bright().batch.take(torch.arange(ROWS))
    more = {"clients": shares(), "per_round": 3, "rounds": 1, "local": ONE, "base_pruning": "random", "defense": "dgp"}
    for attack, wanted in (("ig:iterations=2:adaptive=reapply", True), ("ig:iterations=2", False)):
        made = secateur.federate(plain_net().float(), train, attack=attack, **more)
        rows = [row for row in made.rows if row.metric == "psnr"]
        assert ("the client's compression" in rows[0].extra["knows"]) == wanted
    assert "dgp was attacked plainly only" in rows[0].note


# An active server ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"method": "fedsgd"},
        {"base": Half(every=100)},
        {"base": Moving(every=2)},
        {"base": Stale(every=2)},
        {"net": bn_net()},
        {"withholding": Withhold(), "base": Half(every=100)},
        {"custom_turn": Noisy()},
        {"upload": upload_of(defense("dgp+error-feedback"))},
    ],
)
def test_rob_sends_its_victims_another_model(terms):
    orders = AttackSchedule(every=2, who=2)
    fed, _, log = attacked("rob:bins=16", orders, **terms)
    rows = run(fed)
    lost = [row for row in rows if row.metric == "lost_clients"]
    assert [(row.round, row.value) for row in lost] == [(2, 2), (4, 2)] and "not averaged" in lost[0].note
    assert set(psnrs(log)) == {(n, c) for n in (2, 4) for c in fed.sampler.clients(n)[:2]}
    assert all(row.extra["active"] for row in log.rows if row.metric == "psnr")


def test_rob_reads_the_pictures_of_a_plain_client():
    fed, _, log = attacked("rob:bins=64", AttackSchedule(every=4, who=1), method="fedsgd")
    run(fed)
    rows = {row.metric: row.value for row in log.rows if row.extra.get("client") is not None}
    assert rows["psnr_max"] > 60 and rows["returned"] == 1


def test_a_victim_is_lost_and_its_state_stays():
    """The federation goes on as if the client had never answered."""
    fed, _, _ = attacked("rob:bins=16", AttackSchedule(at=(1,), who=1), withholding=Withhold(), rounds=1)
    first = fed.sampler.clients(1)[0]
    run(fed)
    silent = federation(withholding=Withhold(), rounds=1, local=ONE, data=bright())
    silent._faults = lambda number, drawn: {first: "dropped"}
    run(silent)
    assert set(fed.states) == set(silent.states) == set(fed.sampler.clients(1)[1:])
    assert all(torch.equal(value, silent.server.weights[name]) for name, value in fed.server.weights.items())


def test_a_victim_that_drops_out_answers_nothing():
    faults = Faults(drop_out=0.5)
    fed, _, log = attacked("rob:bins=16", AttackSchedule(every=1, who="all"), faults=faults)
    run(fed)
    silent = {(n, c) for n in range(1, 5) for c, f in fed._faults(n, fed.sampler(n)).items() if f == "dropped"}
    assert silent and not silent & set(psnrs(log)) and len(psnrs(log)) == 12 - len(silent)


def test_active_and_passive_run_apart():
    with pytest.raises(WrongInput, match="apart"):
        attacked(["rob:bins=16", "ig:iterations=2"])
    with pytest.raises(WrongInput, match="view: sum"):
        attacked("rob:bins=16", view="sum")


def test_where_a_changed_network_holds_the_old_one():
    own = {"0.weight": torch.ones(2, 3), "10.weight": torch.ones(3)}
    assert prefix_of(own, own) == ""
    assert prefix_of(own, {"imprint.0.weight": torch.ones(9)} | {f"net.{n}": v for n, v in own.items()}) == "net."
    with pytest.raises(WrongInput, match="does not hold"):
        prefix_of(own, {"net.0.weight": torch.ones(2, 3)})


# Clients that do not descend plainly ------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
@pytest.mark.parametrize(
    "local",
    [
        LocalTraining(1, None, 4, 0.1, weight_decay=0.3),
        LocalTraining(2, None, 3, 0.1, momentum=0.9, weight_decay=0.01),
        LocalTraining(None, 1, 5, 0.1, momentum=0.9),
        LocalTraining(None, 2, 8, 0.1, weight_decay=0.1),
    ],
)
def test_momentum_decay_and_epochs_are_unrolled(local, method, monkeypatch):
    """The attacker's steps lead from the sent model to the update, at the truth and in its order."""
    if method == "fedsgd" and local.steps != 1:
        pytest.skip("fedsgd sends one gradient")
    sizes = [len(share) for share in shares()]
    uneven = (shares()[0][: sizes[0] - 2], *shares()[1:])
    fed, attacker, log = attacked(local=local, method=method, shares=uneven, orders=AttackSchedule(every=4, who="all"))
    seen, attack = [], attacker._attack
    monkeypatch.setattr(attacker, "_attack", lambda group: (seen.extend(group), attack(group)))
    run(fed)
    assert len(psnrs(log)) == 3 and len(seen) == (1 if local.steps else len({len(a.truths[0].labels) for a in seen}))
    for aimed in seen:
        known, (view,) = attacker._knowledge_of(aimed.known, aimed.truths), aimed.targets[0]
        aim = aim_at(inversion("ig").make(), [view], known, 0)
        if local.epochs == 2:
            assert len(aim.turn.batches) == 2 * -(-aimed.truths[0].size // 8)
            continue  # the order of the second epoch is not known
        update = weights_update(
            known.net, view.sent, aimed.truths[0], known.batchnorm, loss=known.loss, turn=read_steps(known)
        )
        assert isinstance(view.update, Weights)
        for name, value in view.update.values.items():
            torch.testing.assert_close(update.values[name], value, rtol=0, atol=1e-9)
    (row,) = [row for row in log.rows if row.metric == "psnr"][:1]
    assert "its optimiser (sgd:" in row.extra["knows"] and "of sgd:" in row.extra["update"]
    assert ("not the order" in row.extra["knows"]) == (local.epochs is not None)


def test_a_sum_of_whole_epochs_is_refused():
    with pytest.raises(WrongInput, match="mixes trainings of several lengths"):
        attacked(local=LocalTraining(None, 1, 4, 0.1), view="sum")


# The sum alone ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_the_sum_is_all_that_is_shown(method):
    seen = []
    fed = federation(observers=[(1, seen.append)], view="sum", local=ONE, method=method)
    before = []
    for _ in fed.rounds():
        before.append(tree.clone(fed.server.weights))
    assert [each.round for each in seen] == [1, 2, 3, 4] and all(each.client is None for each in seen)
    first = seen[0]
    assert first.truth.size == 3 * 4 and first.clients == tuple(fed.sampler.clients(1))
    assert isinstance(first.view.update, Gradient if method == "fedsgd" else Weights)
    if method == "fedavg":  # equal shares: the average is the server's next model
        assert all(torch.equal(first.view.update.values[name], value) for name, value in before[0].items())
    else:  # and the mean gradient that of all examples
        inputs = first.truth.inputs.double()
        whole = gradient_update(plain_net(), first.view.sent, first.truth._replace(inputs=inputs))
        for name, value in whole.values.items():
            torch.testing.assert_close(first.view.update.values[name], value, rtol=0, atol=1e-9)


def test_the_examples_of_a_sum_come_step_by_step():
    seen = []
    fed = federation(observers=[(4, seen.append)], view="sum", local=LocalTraining(2, None, 3, 0.1))
    run(fed)
    rows = fed.sampler(4).rows
    assert torch.equal(seen[0].rows, torch.cat([each[s] for s in range(2) for each in rows]))


def test_a_sum_is_attacked_as_one_batch_of_all():
    fed, _, log = attacked(view="sum", local=LocalTraining(2, None, 2, 0.1))
    run(fed)
    rows = [row for row in log.rows if row.metric == "psnr"]
    assert len(rows) == 1 and rows[0].extra["batch_size"] == 12 and rows[0].extra["client"] is None
    assert "sum of 3 clients" in rows[0].extra["knows"] and rows[0].extra["update"].startswith("the average of 3")
    with pytest.raises(WrongInput, match="no single client"):
        attacked(orders=AttackSchedule(every=4, who=2), view="sum")
    with pytest.raises(WrongInput, match="leave it at 1"):
        attacked(orders=AttackSchedule(every=4, history=2), view="sum")
