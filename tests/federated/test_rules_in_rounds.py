"""Every base pruning under every rule of the catalogue: equal stacked and one by one, and nothing withheld leaves."""

import pytest
import torch
from tiny_rules import federation, run

from secateur.catalogue import methods
from secateur.config import base_pruning, defense
from secateur.federated.terms import protection_of

TOLD = {"prunefl": "prunefl:every=2:iterations=2", "feddst": "feddst:every=2", "random": "random:every=2"}
BASES = sorted(methods("base-pruning"))
DEFENSES = [name for name, each in methods("defense").items() if each.info["acts_on"] == "client"]


def rows_of(base, rule, way):
    seen = []
    terms = {"base": base_pruning(TOLD.get(base, base)).make()}
    fed = federation(
        way=way, averaging="coverage", observers=[(1, seen.append)], **terms, **protection_of(defense(rule))
    )
    return run(fed), fed, seen


@pytest.mark.parametrize("rule", DEFENSES)
@pytest.mark.parametrize("base", BASES)
def test_rounds(base, rule):
    (rows, one, seen), (others, many, _) = rows_of(base, rule, "sequential"), rows_of(base, rule, "stacked")
    assert [(row.metric, row.round) for row in rows] == [(row.metric, row.round) for row in others]
    for name, value in one.model().items():
        torch.testing.assert_close(many.model()[name], value, rtol=0, atol=1e-9)
    told = {row.metric: row.value for row in rows if row.round == 4 and row.client is None}
    assert told["density"] == pytest.approx(1 if base == "none" else 0.7, abs=0.02)
    assert 0 <= told["withheld_of_all"] <= 1 and (rule == "priprune" or told["withheld_of_all"] > 0.1)
    last = {each.client: each.view.update.values for each in seen}
    for client, state in one.states.items():
        for name in (name for name in state if name.startswith("withheld.")):
            assert (last[client][name.removeprefix("withheld.")][state[name]] == 0).all()
