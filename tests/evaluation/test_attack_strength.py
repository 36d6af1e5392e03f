"""Strength of attacks on updates: evidence without which nothing recognised is no sign of safety."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import secateur
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


def searched(*attacks, colour=True):
    extra = {"update": "gradient", "total_variation": 0.0, "client": None}
    notes = {"updates": None, "pictures": "in colour" if colour else None}

    def rows(attack):
        labels = {"model": "m", "dataset": "d", "seed": 0, "attack": attack, "extra": extra}
        return [Row(**labels, metric=metric, value=20, note=note) for metric, note in notes.items()]

    return list_missing([measure_strength(attack, rows(attack)) for attack in attacks], "none")


def test_of_colour_pictures_both_searches_are_asked_in_the_same_modes():
    said = "of colour pictures {} may see more, and was not met"
    assert searched("ig", colour=False) == [] == searched("ig", "ig-smooth") == searched("sgi", "ig-smooth")
    assert searched("ig") == searched("gi-dgp", "rob") == [said.format("ig-smooth")]
    assert searched("ig-smooth") == searched("ig:smoothing=0.3") == [said.format("ig")]
    assert searched("rob") == [], "no search"
    both = ("ig", "ig:adaptive=support", "ig-smooth")
    assert searched(*both) == [said.format("ig-smooth:adaptive=support")]
    assert searched(*both, "ig-smooth:adaptive=support") == []


def test_rows_say_that_pictures_have_colours():
    for channels, note in ((3, "in colour"), (1, None)):
        inputs = torch.rand(2, channels, 8, 8)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64 * channels, 3))
        report = secateur.invert(net, (inputs, torch.tensor([0, 1])), "dlg", iterations=2)
        assert {row.note for row in report.rows if row.metric == "pictures"} == {note}
