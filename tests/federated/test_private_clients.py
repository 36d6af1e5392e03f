"""Local differential privacy inside a federation: alone, under a base pruning, and with weights withheld on top."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from alone import pictures
from secateur import tree
from secateur.config import defense
from secateur.defenses import dp
from secateur.defenses.dp import LOOKS, DifferentialPrivacy, PrivateTurn
from secateur.defenses.priprune import PriPrune
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput
from secateur.federated.client_training import LocalTraining
from secateur.federated.faults import Faults
from secateur.federated.spec import FederationSpec
from secateur.federated.traffic import check_spending, measure_epsilon
from secateur.interfaces import Batch, Gradient, Weights
from tiny_rules import Half, Moving, Noisy, Stale, Withhold, bn_net, federation, plain_net, run, shares

pytest.importorskip("opacus")

ONE = LocalTraining(1, None, 4, 0.1)
SILENT = DifferentialPrivacy(noise_multiplier=0.0, max_grad_norm=1e6)  # clips nothing and adds nothing
PRIVATE = PrivateTurn(Noisy(), SILENT)


def models_equal(one, other):
    for name, value in one.model().items():
        torch.testing.assert_close(other.model()[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("terms", [{}, {"base": Half(every=2)}, {"base": Half(every=2), "broadcast": "dense"}])
def test_without_noise_it_is_federated_sgd(terms):
    plain, private = federation(local=ONE, method="fedsgd", **terms), federation(local=ONE, upload=SILENT, **terms)
    run(plain), run(private)
    models_equal(plain, private)


@pytest.mark.parametrize("pseudo", [True, False])
@pytest.mark.parametrize("base", [{}, {"base": Half(every=2)}])
def test_withheld_on_top_without_noise_is_withheld_alone(base, pseudo):
    alone = federation(local=ONE, withholding=Withhold(pseudo), **base)
    both = federation(local=ONE, withholding=Withhold(pseudo), upload=SILENT, **base)
    run(alone), run(both)
    models_equal(alone, both)
    assert alone.states.keys() == both.states.keys()


def test_what_is_withheld_is_chosen_by_the_noisy_gradient():
    """The weights, the choice and what stays at home: all is made of the noisy gradient, so the epsilon covers it."""
    seen = []
    rule = Withhold()
    private = DifferentialPrivacy(noise_multiplier=5.0)
    fed = federation(local=ONE, withholding=rule, upload=private, observers=[(1, seen.append)], rounds=1, per_round=5)
    run(fed)
    assert isinstance(seen[0].view.update, Weights)
    plain = federation(local=ONE, withholding=rule, rounds=1, per_round=5)
    run(plain)
    differ = [not torch.equal(plain.states[c][n], v) for c, state in fed.states.items() for n, v in state.items()]
    assert all(name.startswith(("withheld.", "saved.")) for name in fed.states[0]) and any(differ)


def test_one_example_moves_an_update_by_no_more_than_it_may():
    """Without noise: another example in a client's batch changes what it sends by at most 2 C / B."""
    bound, sent = 0.05, []
    for change in (0.0, 3.0):
        data = pictures(40, 8)
        inputs = data.inputs.clone()
        inputs[shares()[0][0]] += change
        seen = []
        private = DifferentialPrivacy(noise_multiplier=0.0, max_grad_norm=bound)
        local = replace(ONE, batch_size=8)  # all of its rows
        data = replace(data, inputs=inputs)
        run(federation(local=local, upload=private, observers=[(1, seen.append)], rounds=1, per_round=5, data=data))
        sent.append({each.client: each.view.update for each in seen})
    before, after = (one[0].values for one in sent)
    moved = sum(float((before[name] - after[name]).square().sum()) for name in before) ** 0.5
    assert 0 < moved <= 2 * bound / 8 + 1e-12 and isinstance(sent[0][0], Gradient)
    assert all(torch.equal(value, sent[1][1].values[name]) for name, value in sent[0][1].values.items())


def test_statistics_do_not_leave_a_private_client():
    fed = federation(bn_net(), local=ONE, upload=DifferentialPrivacy())
    before = {name: value.clone() for name, value in fed.server.buffers.items()}
    run(fed)
    assert all(torch.equal(value, before[name]) for name, value in fed.server.buffers.items())


def test_the_epsilon_is_of_every_update_that_a_client_took_part_in():
    private = DifferentialPrivacy(noise_multiplier=2.0)
    fed = federation(local=ONE, upload=private, base=Half(every=100), faults=Faults(drop_out=0.3))
    rows = [row for row in run(fed) if row.metric == "epsilon"]
    took = Counter()
    for number in range(1, 5):
        faults = fed.terms.faults.draw(*_round(fed, number))
        for client in fed.sampler.clients(number):
            took[client] += faults.get(client) != "dropped"
    assert fed.ledger.turns == took and max(took.values()) > 0
    last = {row.client: row.value for row in rows if row.round == 4}
    wanted = {c: private.guarantee(count).epsilon for c, count in took.items() if count}
    assert last == pytest.approx(wanted | {None: max(wanted.values())})
    assert "snip, grasp" in rows[0].note and len([row for row in rows if row.round == 2]) == 1


def _round(fed, number):
    from secateur.seeding import derive

    drawn = fed.sampler(number)
    return drawn.clients, drawn.steps, fed.seed, derive(fed.seed, "faults", number)


def test_an_example_that_is_twice_in_a_batch_counts_twice():
    private = DifferentialPrivacy(noise_multiplier=4.0)
    terms = FederationSpec(shares(), per_round=3, local=replace(ONE, batch_size=16), upload=private)  # of 8 rows
    told = measure_epsilon(terms, [3, 0, 0, 0, 0], 3, False)[0]
    assert told.value == pytest.approx(replace(private, noise_multiplier=2.0).guarantee(3).epsilon)
    assert measure_epsilon(FederationSpec(shares(), per_round=3), [3] * 5, 3, True) == []


LEARNT = PriPrune(sharing=0.02, step=0.5)  # some alphas cross one half in these few rounds


@pytest.mark.parametrize("base", [{}, {"base": Half(every=2)}])
def test_priprune_without_noise_is_priprune_alone(base):
    alone, both = (federation(local=ONE, custom_turn=own, **base) for own in (LEARNT, PrivateTurn(LEARNT, SILENT)))
    run(alone), run(both)
    models_equal(alone, both)
    assert alone.states.keys() == both.states.keys()
    for client, state in alone.states.items():
        assert all(torch.allclose(both.states[client][name], value, atol=1e-9) for name, value in state.items())
    held = torch.cat([v.flatten() for s in both.states.values() for n, v in s.items() if n.startswith("withheld.")])
    assert held.any() and not held.all()


def test_a_private_priprune_stacked_equals_one_by_one():
    own = PrivateTurn(LEARNT, DifferentialPrivacy())
    one, many = (
        federation(local=ONE, custom_turn=own, base=Half(every=2), execution=execution)
        for execution in ("sequential", "stacked")
    )
    assert [row.value for row in run(one)] == pytest.approx([row.value for row in run(many)], abs=1e-9)
    models_equal(one, many)
    silent = federation(local=ONE, custom_turn=PrivateTurn(LEARNT, SILENT), base=Half(every=2))
    run(silent)
    assert any(not torch.allclose(value, silent.model()[name]) for name, value in one.model().items())


def test_a_private_turn_is_made_of_its_noisy_looks_alone(monkeypatch):
    """With the same answers other examples change nothing: not the weights, not the mask, not what stays at home."""
    fed = federation(local=ONE, custom_turn=PrivateTurn(LEARNT, DifferentialPrivacy()))
    own, weights, asked = fed.terms.custom_turn, fed.server.weights, []

    def answer(loss, params, batch):
        asked.append(params)
        return [{name: torch.ones(1, *value.shape, dtype=value.dtype) for name, value in params.items()}]

    monkeypatch.setattr(dp, "gradients", answer)
    noise = own.noise(weights, 1, torch.Generator().manual_seed(0))
    made = []
    for seed in (0, 1):
        inputs = torch.randn(1, 4, 1, 6, 6, generator=torch.Generator().manual_seed(seed)).double()
        batches = Batch(inputs, torch.full((1, 4), seed))
        made.append(own.turn(fed.turns.trainer._loss, weights, {}, own.init(weights), batches, noise, 0.1))
    one, other = made
    assert len(asked) == 2 * LOOKS and float(one.loss) == 0
    for mine, theirs in zip(one[:-1], other[:-1], strict=True):
        assert all(torch.equal(value, theirs[name]) for name, value in mine.items())
    assert any(bool(where.any()) for where in one.withheld.values())


def test_a_look_that_has_no_noise_fails():
    own = PrivateTurn(PriPrune(learns="step"), DifferentialPrivacy())
    fed = federation(local=ONE, custom_turn=own)
    batch = fed.train.take(torch.arange(8))
    batches = Batch(batch.inputs.double().unflatten(0, (2, 4)), batch.labels.unflatten(0, (2, 4)))
    weights = tree.clone(fed.server.weights)
    noise = own.noise(weights, 2, torch.Generator().manual_seed(0))
    with pytest.raises(IndexError):
        own.turn(fed.turns.trainer._loss, weights, {}, own.init(weights), batches, noise, 0.1)


def test_a_parameter_may_be_called_as_a_look():
    net, named = plain_net(), torch.nn.Sequential()
    for place, part in enumerate(net):
        named.add_module(f"look{place}", part)
    own = PrivateTurn(LEARNT, DifferentialPrivacy())
    one, other = (federation(each, local=ONE, custom_turn=own) for each in (net, named))
    run(one), run(other)
    for mine, theirs in zip(one.model().values(), other.model().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_priprune_pays_for_two_looks_a_turn():
    private = DifferentialPrivacy(noise_multiplier=4.0)
    terms = FederationSpec(shares(), per_round=3, local=ONE, custom_turn=PrivateTurn(PriPrune(), private))
    told = measure_epsilon(terms, {0: 3, 2: 1}, 3, True)
    assert told[0].value == pytest.approx(private.guarantee(6).epsilon)
    assert "2 looks a turn: which weights are withheld is covered" in told[0].note
    assert {each.client: each.value for each in told[1:]}[2] == pytest.approx(private.guarantee(2).epsilon)


@pytest.mark.parametrize(
    "terms, said",
    [
        ({"local": LocalTraining(2, None, 4, 0.1)}, "must be 1"),
        ({"local": LocalTraining(1, None, 4, 0.1, 0.9)}, "momentum"),
        ({"base": Stale()}, "no epsilon covers"),
        ({"base": Moving(), "withholding": Withhold()}, "no epsilon covers"),
        ({"custom_turn": Noisy()}, "cannot be combined"),
        ({"custom_turn": PRIVATE}, "cannot be combined"),
        (
            {"upload": None, "custom_turn": PRIVATE, "local": LocalTraining(2, None, 4, 0.1)},
            "must be 1",
        ),
        ({"upload": None, "custom_turn": PRIVATE, "base": Stale()}, "no epsilon covers"),
        ({"upload": None, "custom_turn": PRIVATE, "base": Moving()}, "no epsilon covers"),
    ],
)
def test_what_no_epsilon_covers_is_refused(terms, said):
    with pytest.raises(WrongInput, match=said):
        FederationSpec(shares(), **{"per_round": 3, "local": ONE, "upload": DifferentialPrivacy()} | terms)


def test_what_goes_together():
    both = protection_of(defense("pseudo-largest+dp"))
    assert both["withholding"].pseudo and isinstance(both["upload"], DifferentialPrivacy)
    own = protection_of(defense("priprune:sharing=.01+dp:noise_multiplier=3"))
    assert own == {"custom_turn": PrivateTurn(PriPrune(sharing=0.01), DifferentialPrivacy(noise_multiplier=3.0))}
    wrong = (
        ("priprune+dgp", "can be combined only with dp"),
        ("largest+dgp", "can be combined only with dp"),
        ("priprune+dp+error-feedback", "cannot be combined with DifferentialPrivacy"),
    )
    for text, said in wrong:
        with pytest.raises(WrongInput, match=said):
            protection_of(defense(text))


def test_an_accountant_refuses_before_any_work():
    private = DifferentialPrivacy(noise_multiplier=0.3, accountant="prv")
    with pytest.raises(WrongInput, match="rdp"):
        check_spending(FederationSpec(shares(), rounds=100, per_round=3, local=ONE, upload=private))
    check_spending(FederationSpec(shares(), rounds=100, per_round=3, local=ONE))


def test_a_private_client_is_attacked_by_its_running_statistics():
    from secateur.federated.attacks.knowledge import knowledge_of

    bright = replace(pictures(40, 8), inputs=pictures(40, 8).inputs.sigmoid())
    for upload, wanted in ((None, "batch"), (DifferentialPrivacy(), "eval")):
        terms = FederationSpec(shares(), per_round=3, local=ONE, upload=upload)
        assert knowledge_of(bn_net(), bright, terms, torch.device("cpu")).batchnorm == wanted
