"""Inversion of sub-model clients: the attacked update is Adam's step on the client's network; a picture comes back."""

from dataclasses import replace

import pytest
import torch

import tiny_submodels as tiny
from secateur.attacks.inversion.gradient_matching import aim_at
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.config import inversion
from secateur.defenses.top_k import TopK
from secateur.federated.attacks.schedule import AttackSchedule
from secateur.federated.checkpoint import FederationLog
from secateur.federated.spec import Adam
from secateur.federated.submodels.inversion import SubmodelInversion, compression_of, submodel_knowledge

LABELS = {"model": "m", "dataset": "d", "seed": 0, "defense": "none", "extra": {"clients": 5}}


def attacked(attack, who="all", local=None, rule="mapp-fl", rounds=2, **options):
    """A federation whose clients take one step, with an attacker of the last round."""
    local = local or Adam(batch_size=2, learning_rate=1e-3, steps=1)
    bright = replace(tiny.data(), inputs=tiny.data().inputs.sigmoid())
    terms, log = tiny.federation(rule, local=local, rounds=rounds).terms, FederationLog()
    known = submodel_knowledge(tiny.net(norm=False), bright, terms, "cpu")
    orders = AttackSchedule(rounds, who=who)
    observer = SubmodelInversion(terms, [inversion(attack)], known, LABELS, log, orders, {}, images=False, **options)
    fed = tiny.federation(rule, local=local, rounds=rounds, model=tiny.net(norm=False), observers=[observer])
    fed.train = fed.trainer.data = fed.train._replace(inputs=fed.train.inputs.sigmoid())
    return fed, observer, log


@pytest.mark.parametrize("rule", ["mapp-fl", "heterofl", "fdropout"])
def test_what_is_matched_is_adams_step_on_the_clients_examples(rule, monkeypatch):
    fed, observer, log = attacked("ig:iterations=1:tv=0", rule=rule)
    seen, attack = [], observer._attack
    monkeypatch.setattr(observer, "_attack", lambda group: (seen.extend(group), attack(group)))
    tiny.told(fed)
    assert [aimed.seen[0].client for aimed in seen] == [0, 1, 2, 3, 4]
    for aimed in seen:
        known, view = aimed.known, aimed.targets[0][0]
        true = gradient_update(known.net, view.sent, aimed.truths[0], known.batchnorm).values
        aim = aim_at(inversion("ig").make(), [view], known, 0).observed[0]
        assert aimed.truths[0].size == 2 and set(aim) == set(true)
        for name, value in true.items():
            torch.testing.assert_close(aim[name], value / (value.abs() + 1e-8), rtol=1e-6, atol=1e-6)
    assert len({id(aimed.known.net) for aimed in seen}) == 2  # the whole network, and the narrow one
    rows = {row.extra["client"]: row for row in log.rows if row.metric == "psnr"}
    assert [rows[client].extra["rate"] for client in range(5)] == [1.0, 0.5, 0.5, 0.5, 0.5]
    assert rows[0].extra["update"] == "weights after 1 local step of adam"
    assert "its optimiser (adam)" in rows[0].extra["knows"]


def test_only_those_that_are_ordered_are_attacked():
    for who, clients in ((2, [0, 1]), ((3, 1), [1, 3])):
        fed, _, log = attacked("ig:iterations=1:tv=0:adaptive=reapply", who=who)
        tiny.told(fed)
        assert [row.extra["client"] for row in log.rows if row.metric == "psnr"] == clients


def test_steps_take_rows_in_turn_and_epochs_are_as_before():
    rows, rng = torch.arange(3), torch.Generator().manual_seed(0)
    (taken,) = Adam(batch_size=4, steps=2).order_rows(rows, rng)
    assert len(taken) == 8 and sorted(taken[:3].tolist()) == sorted(taken[3:6].tolist()) == [0, 1, 2]
    assert [sorted(part.tolist()) for part in Adam(epochs=2).order_rows(rows, rng)] == [[0, 1, 2]] * 2
    assert (Adam(batch_size=2, epochs=3).count_steps(5), Adam(steps=2).count_steps(5)) == (9, 2)


def test_several_steps_and_epochs_are_unrolled_as_they_were_taken(monkeypatch):
    """At the truth, in its order, the change of the trial is the client's; the order of a later epoch is unknown."""
    for local, turns in ((Adam(batch_size=2, steps=2), 2), (Adam(batch_size=3, epochs=1), 2)):
        fed, observer, _ = attacked("ig:iterations=1:tv=0:softness=0", local=local)
        seen, attack = [], observer._attack
        monkeypatch.setattr(
            observer, "_attack", lambda group, seen=seen, attack=attack: (seen.extend(group), attack(group))
        )
        tiny.told(fed)
        aimed = seen[0]
        known = observer._knowledge_of(aimed.known, aimed.truths)
        aim = aim_at(inversion("ig:softness=0").make(), aimed.targets[0], known, 0)
        assert len(aim.turn.batches) >= turns and aim.bounds is None
        update = weights_update(known.net, aimed.targets[0][0].sent, aimed.truths[0], known.batchnorm, turn=aim.turn)
        for name, value in aimed.targets[0][0].update.values.items():
            torch.testing.assert_close(update.values[name], value, rtol=1e-4, atol=2e-6)


def test_a_defense_acts_after_the_step():
    terms = tiny.federation("mapp-fl").terms
    change = {"w": torch.tensor([3.0, -1e-3, 0.0])}
    assert compression_of(terms)(change) is change
    squeezed = compression_of(replace(terms, upload=TopK(keep=0.3)))(change)["w"]
    assert squeezed.tolist() == [3.0, 0.0, 0.0]
