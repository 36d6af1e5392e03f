"""Strength of attacks on updates: evidence without which nothing recognised is no sign of safety."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from secateur.evaluation.attack_strength import list_missing, measure_strength
from secateur.evaluation.client import describe_weights
from secateur.interfaces import Knowledge, Optimiser
from secateur.runs.rows import Row

UNMET = "of steps of adam ig-smooth or layerwise may see more, and was not met"


def strength(attack, update):
    extra = {"update": update, "total_variation": 0.0, "client": None}
    row = Row(model="m", dataset="d", seed=0, attack=attack, metric="updates", value=20, extra=extra)
    return measure_strength(attack, [row])


@pytest.mark.parametrize("local_epochs", [None, 2])
def test_steps_of_adam_ask_for_the_attacks_that_see_most_of_them(local_epochs):
    scale = torch.ones(1, 1, 1)
    known = Knowledge(nn.Identity(), (1, 2, 2), 2, scale, scale, 12, local_epochs=local_epochs, local_batch=5)
    plain, adam = (describe_weights(replace(known, optimiser=Optimiser(name))) for name in ("sgd", "adam"))
    assert list_missing([strength("ig", plain)], "none") == []
    assert list_missing([strength("ig", "gradient")], "none") == []
    assert list_missing([strength("ig", adam)], "none") == [UNMET]
    for stronger in ("ig-smooth", "layerwise"):
        assert UNMET not in list_missing([strength("ig", adam), strength(stronger, adam)], "none")
