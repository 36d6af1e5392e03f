"""Rounds: who takes part, what is sent, what is lost, and what it costs."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from secateur import tree
from secateur.config import defense
from secateur.defenses import selection
from secateur.defenses.error_feedback import upload_of
from secateur.defenses.uploads import protection_of
from secateur.defenses.withholding import SAVED, WITHHELD
from secateur.errors import WrongInput
from secateur.federated.averaging import AVERAGINGS
from secateur.federated.base_pruning.prunefl import PruneFL
from secateur.federated.client_training import LocalTraining
from secateur.federated.client_turn import ClientUpdate
from secateur.federated.faults import Faults
from secateur.federated.sampling import Sampler
from secateur.federated.spec import FederationSpec
from secateur.interfaces import Gradient, Weights
from secateur.wire import encode, encode_mask
from tiny_rules import LOCAL, Half, Moving, Noisy, Stale, Withhold, bn_net, federation, plain_net, run, shares

aten = torch.ops.aten


def watched(every=1, **terms):
    seen = []
    fed = federation(observers=[(every, seen.append)], **terms)
    return fed, seen, run(fed)


def test_clients_are_drawn_without_replacement_and_rows_without_repeating_early():
    sampler = Sampler(shares(), 3, replace(LOCAL, steps=2), seed=0)
    drawn = [sampler(number) for number in range(1, 101)]
    assert all(len(set(each.clients)) == 3 for each in drawn)
    assert {client for each in drawn for client in each.clients} == set(range(5))
    for each in drawn:
        for client, rows in zip(each.clients, each.rows, strict=True):
            assert sorted(rows.flatten().tolist()) == sorted(shares()[client].tolist())  # 8 rows, 2 steps of 4
    again = Sampler(shares(), 3, replace(LOCAL, steps=2), seed=0)(77)  # whatever was asked for before
    assert again.clients == drawn[76].clients and torch.equal(again.rows[0], drawn[76].rows[0])


def test_a_client_with_few_rows_begins_again():
    rows = Sampler([torch.tensor([5, 6, 7])], 1, LocalTraining(2, None, 4, 0.1), seed=0)(1).rows[0]
    assert rows.shape == (2, 4) and sorted(rows.flatten()[:3].tolist()) == [5, 6, 7]
    epochs = Sampler([torch.tensor([5, 6, 7])], 1, LocalTraining(None, 2, 2, 0.1), seed=0)(1).rows[0]
    assert [len(batch) for batch in epochs] == [2, 1, 2, 1]


def test_fedsgd_is_fedavg_of_one_step():
    local = LocalTraining(1, None, 4, 0.1)
    average, gradients = federation(local=local), federation(local=local, method="fedsgd")
    run(average), run(gradients)
    for name, value in average.model().items():
        torch.testing.assert_close(gradients.model()[name], value, rtol=0, atol=1e-12)


def test_server_momentum_by_hand():
    plain, moving = (federation(rounds=2, server_momentum=m, server_rate=0.5) for m in (0.0, 0.9))
    start = tree.clone(plain.server.weights)
    for each in (plain, moving):
        next(each.rounds())
    first = tree.clone(plain.server.weights)
    assert all(torch.equal(first[name], value) for name, value in moving.server.weights.items())
    next(plain.rounds()), next(moving.rounds())
    for name, value in moving.server.weights.items():  # the same step, and .9 of the one before
        wanted = plain.server.weights[name] + 0.9 * (first[name] - start[name])
        torch.testing.assert_close(value, wanted, rtol=0, atol=1e-12)


def test_server_momentum_gathers_nothing_where_the_mask_drops():
    fed = federation(base=Stale(every=100), server_momentum=0.9)
    run(fed)
    for name, keep in fed.server.mask.items():
        assert fed.server.weights[name][~keep].any() and fed.server.moments[name][keep].any()  # stale values stay
        assert not fed.server.moments[name][~keep].any()


@pytest.mark.parametrize("broadcast", ["masked", "dense"])
def test_what_is_broadcast(broadcast):
    fed, seen, _ = watched(base=Half(every=100), broadcast=broadcast)
    weight = "0.weight"
    for each in seen:
        dropped = each.view.sent[weight][~fed.server.mask[weight]]
        assert bool((dropped == 0).all()) == (broadcast == "masked")
        assert (each.view.update.values[weight][~fed.server.mask[weight]] == 0).all()
    assert len(seen) == 4 * 3 and {each.round for each in seen} == {1, 2, 3, 4}
    assert (fed.model()[weight][~fed.server.mask[weight]] == 0).all()


def test_an_observer_sees_chosen_rounds_only_and_the_truth_beside():
    fed, seen, _ = watched(every=2)
    assert {each.round for each in seen} == {2, 4}
    drawn = fed.sampler(2)
    first = seen[0]
    assert first.client == drawn.clients[0]
    assert torch.equal(first.truth.inputs, fed.train.inputs[drawn.rows[0].flatten()])
    assert isinstance(first.view.update, Weights)


def test_the_sent_model_is_never_changed():
    fed = federation()
    fed.server.broadcast()
    before = tree.clone(fed.server.model.params)
    list(fed._updates(1, fed.sampler(1), {}))
    assert all(torch.equal(value, before[name]) for name, value in fed.server.model.params.items())


@pytest.mark.parametrize("pseudo", [True, False])
def test_withheld_weights_stay_at_home(pseudo):
    fed, seen, _ = watched(base=Half(every=100), withholding=Withhold(pseudo), per_round=5)
    assert (len(fed.states) == 5) == pseudo
    last = [each for each in seen if each.round == 4]
    for each in last:
        for name in fed.server.mask if pseudo else ():
            where, kept = (fed.states[each.client][part + name] for part in (WITHHELD, SAVED))
            assert where.any() and (kept[where] != 0).all() and (kept[~where] == 0).all()
            assert (each.view.update.values[name][where] == 0).all()
            assert (where <= fed.server.mask[name]).all()
    if pseudo:  # next time they are put back
        start = fed.turns.start(fed.states[0])
        where = fed.states[0][WITHHELD + "0.weight"]
        assert torch.equal(start["0.weight"][where], fed.states[0][SAVED + "0.weight"][where])
        assert torch.equal(start["0.weight"][~where], fed.server.model.params["0.weight"][~where])


@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_a_rule_is_given_the_mean_gradient_of_the_steps(execution):
    begun = tree.state_of(plain_net())

    class Right(Withhold):
        def withheld(self, weights, gradient, mask, rng=None, noise=None):
            path = LOCAL.steps * LOCAL.learning_rate
            wrong = {n: (begun[n] - weights[n]) / path - g for n, g in gradient.items() if g.ndim > 1}
            return {n: value.abs() < 1e-9 for n, value in wrong.items()}

    fed = federation(execution=execution, rounds=1, withholding=Right(), evaluate_every=1)
    assert {row.metric: row.value for row in run(fed)}["withheld_of_all"] == 1


def test_how_much_is_withheld_is_told():
    _, _, rows = watched(base=Half(every=100), withholding=Withhold(), per_round=5)
    told = {row.metric: row.value for row in rows if row.round == 4 and row.client is None}
    assert 0 < told["withheld_of_all"] == pytest.approx(told["withheld_of_kept"] * told["density"])


def test_only_sampled_clients_have_states():
    fed = federation(withholding=Withhold(), rounds=1, per_round=2)
    run(fed)
    assert set(fed.states) == set(fed.sampler(1).clients)


def test_squares_are_summed_by_hand():
    fed = federation(base=Stale(every=100), rounds=1, per_round=2)
    drawn = fed.sampler(1)
    run(fed)
    fresh = federation(base=Stale(every=100), rounds=1, per_round=2)
    fresh.server.broadcast()
    wanted = torch.zeros_like(fed.server.squares["0.weight"])
    for client, _, update in fresh._updates(1, drawn, {}):
        wanted += len(shares()[client]) * update.summed["0.weight"] ** 2
    torch.testing.assert_close(fed.server.squares["0.weight"], wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", ["pseudo-largest", "priprune:sharing=.01:alpha=.6"])
@pytest.mark.parametrize("squares", ["all", "shared"])
def test_what_the_squares_tell_of_withheld_weights(rule, squares):
    base = PruneFL(every=2, iterations=2, squares=squares)
    fed = federation(base=base, rounds=1, per_round=2, **protection_of(defense(rule)))
    fed.server.broadcast()
    told = fed.terms.leak_note
    assert (told is None) == (squares == "shared") and federation(base=base).terms.leak_note is None
    for _, _, update in fed._updates(1, fed.sampler(1), {}):
        assert any(where.any() for where in update.withheld.values())
        for name, where in update.withheld.items():
            leaving = update.summed[name].square()
            assert bool(leaving[where].any()) == (squares == "all" and bool(where.any()))
            assert leaving[~where].any()


def test_stale_values_are_kept_and_resumed():
    fed = federation(base=Stale(every=2), rounds=2)
    weight, start = "0.weight", plain_net().state_dict()["0.weight"]
    dropped = ~fed.server.mask[weight].clone()
    next(fed.rounds())
    assert torch.equal(fed.server.weights[weight][dropped], start[dropped])
    next(fed.rounds())
    back = dropped & fed.server.mask[weight]
    assert back.any() and torch.equal(fed.server.weights[weight][back], start[back])
    assert not any(value.any() for value in fed.server.squares.values())  # begun anew


def test_clients_masks_reach_the_server():
    fed, seen, _ = watched(base=Moving(every=2), averaging="coverage", rounds=2)
    name, masks = "4.weight", [each.view.update.values["4.weight"] != 0 for each in seen if each.round == 2]
    union = torch.stack(masks).any(0)
    assert (fed.server.weights[name][~union] == 0).all()
    assert any((mask & ~_start_mask(name)).any() for mask in masks)


# Weights of two clients with 1 and 3 examples: kept by both; by the first alone; by both, and the first withholds it;
# by both, who withhold it; by nobody. The server has 9 everywhere.
BY_HAND = {
    "weighted": [(2 + 3 * 6) / 4, 4, 3 * 8 / 4, 0, 0],  # sum n m w / sum n m; a withheld zero counts
    "uniform": [(2 + 6) / 2, 4, 8 / 2, 0, 0],
    "coverage": [5, 4, 8, 9, 0],  # what all withhold stays as it was
}


@pytest.mark.parametrize("averaging", BY_HAND)
@pytest.mark.parametrize("execution", ["waits", "asks nothing", "stacked"])
def test_masks_of_their_own_by_hand(averaging, execution):
    server = federation(base=Moving(every=1), averaging=averaging, withholding=Withhold()).server
    name, clients = "4.weight", ([2, 4, 0, 0, 0], [6, 0, 8, 0, 0])
    masks, sends = ([1, 1, 1, 1, 0], [1, 0, 1, 1, 0]), ([1, 1, 0, 0, 0], [1, 0, 1, 0, 0])
    server.weights[name].fill_(9)
    server.broadcast()
    gathered, updates = server.begin_sums(own_masks=True), []

    def told(mask):
        ones = {n: torch.ones_like(keep) for n, keep in server.mask.items()}
        ones[name][0, :5] = torch.tensor(mask).bool()
        return ones

    for values, mask, sent in zip(clients, masks, sends, strict=True):
        whole = tree.clone(server.weights)
        whole[name][0, :5] = torch.tensor(values).to(whole[name])
        updates.append(ClientUpdate(whole, {}, told(sent), told(mask), {}, {}, {}))
    if execution == "stacked":  # a third that is not heard
        parts = [tree.stack([*part, part[0]]) if part[0] else {} for part in list(zip(*updates, strict=True))[:-1]]
        heard, sizes = torch.tensor([True, True, False]), torch.tensor([1.0, 3.0, 50.0]).double()
        server.add_stacked(gathered, ClientUpdate(*parts), sizes, heard)
    else:
        for update, size in zip(updates, (1, 3), strict=True):
            server.add(gathered, update, size, None if execution == "waits" else torch.tensor(True))
    server.step(gathered)
    assert server.weights[name][0, :5].tolist() == BY_HAND[averaging]
    assert (server.weights[name][1:] == 9).all()


def test_masks_of_their_own_of_clients_that_are_all_lost_change_nothing():
    fed = federation(base=Moving(every=1), rounds=1, execution="stacked", faults=Faults(nan=1))
    fed.waits, before = False, tree.clone(fed.server.weights)
    fed.server.adjust = lambda *_: False
    run(fed)
    assert all(torch.equal(value, before[name]) for name, value in fed.server.weights.items())


def _start_mask(name):
    return federation(base=Moving()).server.mask[name]


def test_what_is_withheld_changes_no_byte():
    fed = federation(base=Half(every=100), withholding=Withhold(), rounds=1)
    fed.server.broadcast()
    drawn, crowd = fed.sampler(1), fed.turns.trainer
    client, rows = drawn.clients[0], drawn.rows[0]
    one, rng = fed.turns.inputs(fed.seed, 1, client, rows, fed._state_of(client))
    made, _ = crowd.train_one(one, crowd.arrange_start(fed.turns.start(one.state)))
    first = fed.turns.update(made, None, one, 1, rng)
    where = {name: first.state[WITHHELD + name] for name in fed.server.mask}
    changed = {n: torch.where(where[n], v + 1, v) if n in where else v for n, v in made.params.items()}
    second = fed.turns.update(made._replace(params=changed), None, one, 1, rng)
    assert encode(first.values) == encode(second.values)
    assert not torch.equal(first.state[SAVED + "0.weight"], second.state[SAVED + "0.weight"])


class NoQuestions(TorchDispatchMode):
    """Fails whoever asks a tensor for its numbers, as a GPU would have to wait."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"base": Stale(every=100), "withholding": Withhold(), "averaging": "coverage"},
        {"base": Half(every=100), "custom_turn": Noisy()},
        {"upload": upload_of(defense("top-k"))},
        {"server_momentum": 0.9, "local": LocalTraining(3, None, 4, 0.1, 0.9, 0.01)},
    ],
)
@pytest.mark.parametrize("execution", ["sequential", "stacked"])
def test_a_round_on_a_gpu_asks_for_nothing(execution, terms, monkeypatch):
    monkeypatch.setattr(selection, "_must_not_read", lambda _: True)
    fed = federation(execution=execution, evaluate_every=100, rounds=3, **terms)
    fed.waits = False
    rounds = fed.rounds()
    next(rounds)
    with NoQuestions():
        next(rounds)
    measures = next(rounds).measures
    waiting = federation(execution=execution, evaluate_every=100, rounds=3, **terms)
    assert run(waiting) == measures
    for name, value in waiting.model().items():
        torch.testing.assert_close(fed.model()[name], value, rtol=0, atol=1e-12)


def test_on_a_gpu_too_the_lost_are_told_and_nothing_is_poisoned():
    made = []
    for execution, waits in (("sequential", True), ("sequential", False), ("stacked", False)):
        fed = federation(
            execution=execution, rounds=6, faults=Faults(drop_out=0.2, nan=0.3, shape=0.2), withholding=Withhold()
        )
        fed.waits = waits
        rows = [row for row in run(fed) if "lost" in row.metric]
        made.append(([(r.round, r.value, set(r.note.split(": ")[1].split("; "))) for r in rows], fed))
    (lost, one), *others = made
    words = {told for row in lost for told in row[2]}
    assert all(any(fault in told for told in words) for fault in ("dropped out", "NaN", "wrong shape"))
    for told, other in others:
        assert told == lost
        for name, value in one.model().items():
            torch.testing.assert_close(other.model()[name], value, rtol=0, atol=1e-12)
        for client, state in one.states.items():  # of who was lost at first the state before a first round
            for name, value in state.items():
                torch.testing.assert_close(other.states[client][name], value, rtol=0, atol=1e-12)


@pytest.mark.parametrize("nan", [0.4, 1.0])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"base": Half(every=2), "withholding": Withhold()},
        {"base": Stale(every=3)},
        {"base": Moving(every=2), "averaging": "coverage"},
        protection_of(defense("priprune")),
        {"net": bn_net(), "withholding": Withhold()},
    ],
)
def test_every_way_tells_the_same_where_clients_go_astray(terms, nan):
    told = []
    for execution, waits in (("sequential", True), ("sequential", False), ("stacked", False)):
        fed = federation(execution=execution, rounds=6, faults=Faults(nan=nan), **terms)
        fed.waits = waits
        told.append({(row.metric, row.round, row.client): row.value for row in run(fed)})
    up = sum(value for (name, _, client), value in told[0].items() if name == "bytes_up" and client is not None)
    assert up > 0  # what cannot be averaged has still been sent
    assert told[1] == pytest.approx(told[0]) and told[2] == pytest.approx(told[0])


# Faults ---------------------------------------------------------------------------------------------------------


def test_lost_clients_are_told_and_nothing_is_poisoned():
    faults = Faults(drop_out=0.2, nan=0.2, shape=0.2)
    fed = federation(rounds=20, per_round=5, faults=faults)
    rows = run(fed)
    lost = [row for row in rows if row.metric == "lost_clients"]
    told = "; ".join(row.note for row in lost)
    for words in ("dropped out", "returned NaN", "wrong shape"):
        assert words in told
    assert 30 < sum(row.value for row in lost) < 65  # of 100
    assert all(value.isfinite().all() for value in fed.model().values())


@pytest.mark.parametrize("fault", ["dropped", "late", "nan", "shape"])
def test_the_round_equals_one_without_the_lost_client(fault, monkeypatch):
    fed = federation(rounds=1, withholding=Withhold(), faults=Faults(drop_out=0.5))
    gone = fed.sampler(1).clients[1]
    monkeypatch.setattr(Faults, "draw", lambda *_: {gone: fault})
    rows = run(fed)
    assert [row.value for row in rows if row.metric == "lost_clients"] == [1]
    whole = federation(rounds=1, withholding=Withhold())
    drawn = whole.sampler(1)
    whole.sampler = lambda _: type(drawn)(
        *([x for i, x in enumerate(part) if i != 1] for part in (drawn.clients, drawn.rows))
    )
    run(whole)
    assert all(torch.equal(value, fed.model()[name]) for name, value in whole.model().items())
    assert gone not in fed.states


def test_all_lost_leaves_the_model():
    fed = federation(rounds=2, faults=Faults(drop_out=1.0))
    before = fed.model()
    rows = run(fed)
    assert all(torch.equal(value, before[name]) for name, value in fed.model().items())
    assert sum(row.value for row in rows if row.metric == "lost_clients") == 6


def test_stragglers_follow_the_time_model():
    faults = Faults(deadline=3.0, step_seconds=1.0, spread=0.5)
    late = {client for client in range(5) if faults.seconds(client, 3, seed=0) > 3.0}
    assert 0 < len(late) < 5
    fed = federation(rounds=6, per_round=5, faults=faults)
    told = {row.note for row in run(fed) if row.metric == "lost_clients"}
    assert len(told) >= 1 and all("missed the deadline" in note for note in told)
    assert all(all(f"client {client} " in note for client in late) for note in told)


def test_a_client_that_diverges_by_itself_is_lost():
    fed = federation(rounds=2, local=LocalTraining(3, None, 4, 1e200))
    before = fed.model()
    rows = run(fed)
    assert sum(row.value for row in rows if row.metric == "lost_clients") == 6
    assert all(torch.equal(value, before[name]) for name, value in fed.model().items())


def test_weights_that_are_finite_but_overflow_do_not_end_the_run():
    rows = run(federation(rounds=2, local=LocalTraining(1, None, 4, 1e200), evaluate_every=1))
    assert [(row.round, row.value) for row in rows if row.metric == "test_accuracy"] == [(1, 0.0), (2, 0.0)]
    assert not [row for row in rows if row.metric == "test_loss"]
    assert [(row.round, row.value) for row in rows if row.metric == "lost_clients"] == [(2, 3)]


@pytest.mark.parametrize("value", [torch.nan, 1e200])  # the second has no finite square
@pytest.mark.parametrize("execution, waits", [("sequential", True), ("sequential", False), ("stacked", False)])
def test_a_gradient_that_is_not_finite_where_nothing_is_sent_poisons_no_squares(execution, waits, value):
    fed = federation(base=Stale(every=100), rounds=1, execution=execution)
    fed.waits, one, many, count = waits, fed.turns.update, fed.turns.run_many, []

    def broken(found, client):
        dense = found.summed["0.weight"].clone()
        dense[client][~fed.server.mask["0.weight"]] = value
        return found._replace(summed=found.summed | {"0.weight": dense})

    def update(*given):
        count.append(0)
        return broken(one(*given), ...) if len(count) == 2 and execution == "sequential" else one(*given)

    fed.turns.update, fed.turns.run_many = update, lambda *given: broken(many(*given), 1)
    rows = run(fed)
    assert all(value.isfinite().all() for value in fed.server.squares.values())
    assert [row.value for row in rows if row.metric == "lost_clients"] == [1]


# Bytes ----------------------------------------------------------------------------------------------------------


def test_bytes_are_those_of_the_wire():
    fed, seen, rows = watched(base=Half(every=100), rounds=1, per_round=2)
    mask = fed.server.mask
    down = len(encode(seen[0].view.sent, inside=mask)) + len(encode_mask(mask))
    up = len(encode(seen[0].view.update.values, inside=mask))
    for client in fed.sampler(1).clients:
        assert fed.ledger.traffic.down[client] == down and fed.ledger.traffic.up[client] == up
    assert {row.metric: row.value for row in rows if row.client is None}["bytes_up"] == 2 * up
    assert up < len(encode(tree.params_of(plain_net())))


def test_a_mask_is_sent_again_when_it_changed():
    fed = federation(base=Stale(every=2), rounds=4, per_round=5, evaluate_every=1)
    wanted, traffic = 0, fed.ledger.traffic
    for done in fed.rounds():  # the mask goes out in rounds 1 and 3
        wanted += traffic.model_bytes + (traffic.mask_bytes if done.number in (1, 3) else 0)
        assert traffic.mask_bytes > 0 and traffic.down == dict.fromkeys(range(5), wanted)


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_withheld_values_cost_nothing_and_where_the_server_counts_who_sent_the_bits_that_say_so(averaging):
    terms = {"base": Half(every=100), "withholding": Withhold(), "rounds": 1, "per_round": 1}
    fed, seen, _ = watched(**terms, averaging=averaging)
    (client, *_), update = fed.sampler(1).clients, seen[0].view.update.values
    bits = encode_mask({name: update[name] != 0 for name in fed.server.mask}) if averaging == "coverage" else b""
    assert fed.ledger.traffic.up[client] == len(encode(update, inside=fed.server.mask)) + len(bits)


@pytest.mark.parametrize("base", [Half(every=100), Moving(every=2)])
def test_where_nothing_is_withheld_all_entries_are_of_all_who_keep_them(base):
    ends = [watched(averaging=how, base=base)[0].server.weights for how in ("coverage", "weighted")]
    assert all(torch.equal(value, ends[1][name]) for name, value in ends[0].items())


def test_uploads_send_gradients_and_keep_residuals():
    upload = upload_of(defense("dgp+error-feedback"))
    fed, seen, _ = watched(upload=upload, local=LocalTraining(1, None, 4, 0.1))
    assert isinstance(seen[0].view.update, Gradient)
    assert all(any(name.startswith("residual.") for name in state) for state in fed.states.values())
    several = watched(upload=upload)[1]
    assert isinstance(several[0].view.update, Weights)


# Bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong, word",
    [
        ({"rounds": 0}, "rounds"),
        ({"per_round": 6}, "1, 5"),
        ({"averaging": "mean"}, "weighted"),
        ({"broadcast": "both"}, "masked"),
        ({"server_momentum": 1.0}, "server_momentum"),
        ({"method": "fedsgd"}, "must be 1"),
        ({"upload": upload_of(defense("adgp"))}, "dgp"),
        ({"custom_turn": Noisy(), "withholding": Withhold()}, "use one"),
        ({"custom_turn": Noisy(), "local": LocalTraining(3, None, 4, 0.1, 0.9)}, "momentum"),
        ({"base": Moving(), "upload": upload_of(defense("dgp"))}, "gradients"),
    ],
)
def test_wrong_terms(wrong, word):
    with pytest.raises(WrongInput, match=word):
        FederationSpec(**{"shares": shares(), "per_round": 3, "local": LOCAL} | wrong)


def test_defenses_by_place():
    assert protection_of(defense("none")) == {"upload": None}
    assert protection_of(defense("dgp"))["upload"] is not None
    with pytest.raises(WrongInput, match="acts on"):
        protection_of(defense("ppb"))
    with pytest.raises(WrongInput):
        Faults(drop_out=2)
