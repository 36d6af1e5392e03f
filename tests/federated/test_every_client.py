"""Every client of the catalogue, on every base pruning: the sent model stays, and no byte holds what is withheld."""

import pytest
import torch

from secateur import tree
from secateur.catalogue import methods
from secateur.config import base_pruning, defense
from secateur.defenses.uploads import protection_of
from secateur.defenses.withholding import SAVED, WITHHELD
from secateur.federated.client_training import LocalTraining
from secateur.federated.traffic import messages
from secateur.wire import decode
from tiny_rules import federation

TOLD = {"prunefl": "prunefl:every=2:iterations=2", "feddst": "feddst:every=2", "random": "random:every=2"}
BASES = sorted(methods("base-pruning"))
PLACES = {name: entry.info["acts_on"] for name, entry in methods("defense").items()}
RULES = [name for name, place in PLACES.items() if place == "client"]
LEARNT = "priprune:sharing=0.02:step=0.5"  # some alphas cross one half in these few rounds
RULES = [LEARNT if rule == "priprune" else rule for rule in RULES]
UPLOADS = [name for name, place in PLACES.items() if place == "upload" and name != "adgp"]
UPLOADS += [f"{name}+error-feedback" for name in UPLOADS if name not in ("dp", "distributed-dp")]
CLIENTS = [(base, rule) for base in BASES for rule in RULES]
CLIENTS += [("random", rule) for rule in [*UPLOADS, *(f"{rule}+dp" for rule in RULES)]]


def carried(update, fed):
    """How many weights an update withholds, each of which is 0 in its bytes and whose own bytes are not there."""
    mask, shapes = fed.server.model.mask, {name: value.shape for name, value in fed.server.weights.items()}
    found = messages(update, mask, fed.server.base.wants_squares)
    read = decode(found["values"], shapes, inside=mask if mask and update.own_mask is None else None)
    for name, where in update.withheld.items():
        assert (read[name][where] == 0).all()
        assert all(value.numpy().tobytes() in found["values"] for value in read[name][read[name] != 0])
        for value in update.state[SAVED + name][update.state[WITHHELD + name]] if update.state else ():
            assert value != 0 and not any(value.numpy().tobytes() in each for each in found.values())
    return sum(int(where.sum()) for where in update.withheld.values())


@pytest.mark.parametrize("base, rule", CLIENTS)
def test_the_sent_model_is_never_changed_and_no_byte_is_of_a_withheld_weight(base, rule):
    terms = {"base": base_pruning(TOLD.get(base, base)).make()} | protection_of(defense(rule))
    fed = federation(rounds=3, per_round=5, averaging="coverage", local=LocalTraining(1, None, 4, 0.1), **terms)
    withheld = 0
    for number in (1, 2, 3):
        fed.server.broadcast()
        tensors = {f"{kind} {n}": v for kind, each in vars(fed.server.model).items() for n, v in each.items()}
        before = tree.clone(tensors)
        updates = [update for _, _, update in fed._updates(number, fed.sampler(number), {})]
        assert len(updates) == 5 and all(torch.equal(value, before[name]) for name, value in tensors.items())
        withheld += sum(carried(update, fed) for update in updates)
        if number < 3:
            fed.run_round(number)
    assert (withheld > 0) == (rule not in UPLOADS)
