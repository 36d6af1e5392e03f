"""An attacker that remembers which weights a client sent last has the gradient of its turn, and says so."""

import sys
from contextlib import nullcontext

import pytest
import torch
from test_federated_inversion import ONE, bright

from secateur import tree
from secateur.attacks.inversion.gradient_matching import GradientMatching, aim_at
from secateur.attacks.inversion.sgi import SGI
from secateur.config import defense, inversion
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput
from secateur.experiments.federate_observers import ObservedFederation, attackers
from secateur.federated.attacks.knowledge import check_attacks, knowledge_of
from secateur.federated.attacks.schedule import AttackSchedule
from secateur.federated.base_pruning.prunefl import PruneFL
from secateur.federated.checkpoint import FederationLog
from secateur.federated.faults import Faults
from secateur.federated.spec import FederationSpec
from tiny_rules import federation, plain_net, run, shares

SHOWN = ("sgi:iterations=2", "sgi:follows=true:iterations=2")


def attacked(rule, orders=None, **more):
    """A federation attacked in its last round by both, and what was told."""
    given = {"rounds": 6, "per_round": 3, "local": ONE, "shares": shares(), "evaluate_every": 6} | more
    given |= protection_of(defense(rule))
    agreed, net, log = FederationSpec(**given), plain_net(), FederationLog()
    known = knowledge_of(net, bright(), agreed, torch.device("cpu"))
    labels = {"model": "m", "dataset": "d", "seed": 0, "defense": rule, "extra": {"clients": 5}}
    watched = ObservedFederation(net, bright(), agreed, labels, log, torch.device("cpu"))
    choices = [inversion(each) for each in SHOWN]
    observers = attackers(watched, orders or AttackSchedule(6, who="all"), choices, (), known, images=False)
    return federation(net, observers=observers, data=bright(), **given), observers[0], log


def cosines(rule, monkeypatch, **more):
    """By attack the cosine of what it matches with the gradient of the client's turn, where it matches something."""
    fed, attacker, log = attacked(rule, **more)
    true, found, clients = {}, {}, []
    updates, chosen, whole = fed._updates, attacker._select_updates, GradientMatching.reconstruct

    def noted(*given):
        for client, rows, update in updates(*given):
            true[client] = tree.clone(update.summed)
            yield client, rows, update

    def whom(look):
        clients[:] = [one.client for one in chosen(look)]
        return chosen(look)

    def reconstruct(self, targets, known, chance, watch):
        for client, views in zip(clients, targets, strict=True):
            seen = aim_at(self, views, known, 0).observed[0]
            parts = ([v[name][seen[name] != 0] for name in seen] for v in (seen, true[client]))
            found.setdefault(self.follows, []).append(float(torch.cosine_similarity(*map(torch.cat, parts), 0)))
        return whole(self, targets, known, chance, watch)

    fed.turns.trainer.summing, fed._updates, attacker._select_updates = True, noted, whom
    monkeypatch.setattr(GradientMatching, "reconstruct", reconstruct)
    run(fed)
    return found, log


@pytest.mark.parametrize("averaging, misled", [("weighted", 0.5), ("coverage", 0.6)])
@pytest.mark.parametrize("rule", ["pseudo-largest", "pseudo-random"])
def test_what_comes_late_is_left_out(rule, averaging, misled, monkeypatch):
    found, log = cosines(rule, monkeypatch, averaging=averaging)
    assert (
        min(found[False]) < misled and min(found[True]) > 0.999
    )  # where clients withhold the same again nothing is late
    rows = {row.attack: row.extra for row in log.rows if row.metric == "psnr" and row.extra["client"] is not None}
    followed = {name: extra for name, extra in rows.items() if "follows" in name}
    (extra,) = followed.values()
    assert extra["follows"] and "which weights the client sent last" in extra["knows"]
    assert all("follows" not in extra for name, extra in rows.items() if name not in followed)


def test_error_feedback_is_followed_too(monkeypatch):
    """An entry of the gradient that was sent the last time has no residual; the others have one."""
    found, log = cosines("top-k:keep=0.5+error-feedback", monkeypatch, method="fedsgd")
    assert min(found[False]) < 0.99 and min(found[True]) > 0.9999
    assert any("which weights the client sent last" in row.extra.get("knows", "") for row in log.rows)


def test_without_a_defense_nothing_changes(monkeypatch):
    found, _ = cosines("none", monkeypatch)
    assert found[False] == found[True] and min(found[True]) > 0.999


def test_it_holds_where_the_last_turn_was_lost(monkeypatch):
    found, _ = cosines("pseudo-largest", monkeypatch, rounds=8, orders=AttackSchedule(8), faults=Faults(nan=0.3))
    assert min(found[True]) > 0.999


def test_it_is_saved_as_bools():
    fed, attacker, _ = attacked("pseudo-largest")
    rounds = fed.rounds()
    for _ in range(5):
        next(rounds)
    tensors, data = attacker.state()
    assert tensors and {value.dtype for value in tensors.values()} == {torch.bool}
    _, again, _ = attacked("pseudo-largest")
    again.load(tensors, data)
    assert again.following.lacking.keys() == attacker.following.lacking.keys()
    for client, late in attacker.following.lacking.items():
        assert all(torch.equal(value, again.following.lacking[client][name]) for name, value in late.items())


def test_a_sum_is_of_nobody():
    terms = FederationSpec(shares(), rounds=2, per_round=3, local=ONE, view="sum")
    known = knowledge_of(plain_net(), bright(), terms, torch.device("cpu"))
    with pytest.raises(WrongInput, match="follows one client"):
        check_attacks([inversion("sgi:follows=true")], known, bright(), terms)


@pytest.mark.parametrize("rule", ["pseudo-largest", "priprune:sharing=.01:alpha=.6"])
def test_squares_show_what_was_withheld_and_what_comes_late(rule, monkeypatch):
    """The sizes are those of the client's turn in every entry; most signs are right, by what was sent and by rows."""
    monkeypatch.setattr(sys.modules[__name__], "SHOWN", ("sgi:iterations=2", "sgi:magnitudes=true:iterations=2"))
    fed, _, log = attacked(rule, base=PruneFL(every=4, iterations=4))
    true, seen, whole = {}, [], SGI.reconstruct
    updates = fed._updates

    def noted(*given):
        for client, rows, update in updates(*given):
            true[client] = tree.clone(update.summed)
            yield client, rows, update

    def reconstruct(self, targets, known, chance, watch):
        seen.extend(aim_at(self, views, known, 0) for views in targets if self.magnitudes)
        return whole(self, targets, known, chance, watch)

    fed._updates = noted
    monkeypatch.setattr(SGI, "reconstruct", reconstruct)
    run(fed)
    assert len(seen) == 3
    for aim, summed in zip(seen, (true[one] for one in fed.sampler.clients(6)), strict=True):
        unknown = torch.cat([mask.flatten() for mask in aim.unsigned[0].values()])
        pairs = [torch.cat([part[name].flatten() for name in aim.unsigned[0]]) for part in (aim.observed[0], summed)]
        torch.testing.assert_close(pairs[0].abs(), pairs[1].abs(), rtol=1e-6, atol=1e-12)
        right = (pairs[0].sign() == pairs[1].sign())[~unknown]
        assert 0 < int(unknown.sum()) < len(unknown) / 2 and right.double().mean() > 0.97
    notes = {row.attack: row for row in log.rows if row.metric == "psnr" and row.extra["client"] is not None}
    assert "sizes of its gradients" in notes["sgi:iterations=2:magnitudes=true"].extra["knows"]
    assert not any("no attack reads these" in (row.note or "") for row in notes.values())


def test_squares_are_read_only_where_they_are_sent():
    for more, refused in (({}, True), ({"base": PruneFL(iterations=50)}, False)):
        terms = FederationSpec(shares(), rounds=2, per_round=3, local=ONE, **more)
        known = knowledge_of(plain_net(), bright(), terms, torch.device("cpu"))
        with pytest.raises(WrongInput, match="clients send none") if refused else nullcontext():
            check_attacks([inversion("sgi:magnitudes=true")], known, bright(), terms)
