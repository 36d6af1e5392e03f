"""Learning rates by epoch."""

import pytest

from secateur.errors import WrongInput
from secateur.federated.collaborative.plan import SCHEDULES, Schedule, schedule_of

TOLD = {  # epoch -> rate, as the paper's appendix and the authors' code say
    "paper": (100, {1: 0.01, 70: 0.01, 71: 0.005, 100: 0.005}),
    "paper-lenet": (100, {1: 0.1, 50: 0.1, 51: 0.01, 70: 0.01, 71: 0.005, 100: 0.005}),
    "code": (150, {1: 0.1, 50: 0.1, 51: 0.01, 70: 0.01, 71: 0.005, 150: 0.005}),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_presets(name):
    epochs, rates = TOLD[name]
    assert schedule_of(name).epochs == epochs
    assert {epoch: schedule_of(name).rate(epoch) for epoch in rates} == rates


def test_a_list_is_one_rate_an_epoch():
    rates = [0.1, 0.1, 0.02, 0.1]
    made = schedule_of(rates)
    assert made.epochs == 4 and [made.rate(epoch) for epoch in range(1, 5)] == rates
    assert schedule_of(made) is made


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: schedule_of("papr"), "schedule"),
        (lambda: schedule_of([]), "epochs"),
        (lambda: schedule_of([0.1, 0.0]), "schedule"),
        (lambda: schedule_of([float("nan")]), "schedule"),
        (lambda: Schedule(3, ((2, 0.1),)), "schedule"),
        (lambda: Schedule(3, ((1, 0.1), (1, 0.2))), "schedule"),
        (lambda: Schedule(3, ()), "schedule"),
    ],
)
def test_wrong_ones_are_refused(make, field):
    with pytest.raises(WrongInput) as caught:
        make()
    assert caught.value.field == field
