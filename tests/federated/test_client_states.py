"""States of clients: whether they fit into memory."""

import logging

import pytest
import torch

from secateur.errors import WrongInput
from secateur.federated import stacked_rounds
from secateur.federated.stacked_rounds import check_room
from tiny_rules import Withhold, federation, run

FRESH = {"saved": torch.zeros(1000), "withheld": torch.zeros(1000, dtype=torch.bool)}  # 5 kB


@pytest.mark.parametrize(
    ("memory", "outcome"), [(49_999, "refused"), (50_000, "told"), (99_999, "told"), (100_000, "")]
)
def test_states_that_cannot_all_be_held_are_refused_before_anything_runs(memory, outcome, monkeypatch, caplog):
    monkeypatch.setattr(stacked_rounds, "_memory", lambda device: memory)
    with caplog.at_level(logging.WARNING):
        if outcome == "refused":
            with pytest.raises(WrongInput, match=r"states of 10 clients take 0\.0 GB.*fewer clients"):
                check_room(FRESH, 10, torch.device("cpu"))
        else:
            check_room(FRESH, 10, torch.device("cpu"))
    assert len(caplog.records) == (outcome == "told")


def test_a_federation_counts_who_can_be_sampled(monkeypatch):
    asked = []
    monkeypatch.setattr("secateur.federated.federation.check_room", lambda *given: asked.append(given))
    run(federation(withholding=Withhold(), rounds=1, per_round=2))
    (fresh, clients, device), *_ = asked
    assert fresh and clients == 2 and device.type == "cpu"


def test_the_memory_of_this_machine_is_known():
    assert stacked_rounds._memory(torch.device("cpu")) > 2**28
