"""States of clients: where they are held, and that a federation does not depend on it."""

import logging

import pytest
import torch

from secateur.cli import main
from secateur.config import defense
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput
from secateur.federated import stacked_rounds
from secateur.federated.stacked_rounds import Room, room_for
from tiny_rules import Withhold, federation, run

FRESH = {"saved": torch.zeros(1000), "withheld": torch.zeros(1000, dtype=torch.bool)}  # 5 kB
CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize(
    ("memory", "outcome"), [(49_152, "refused"), (53_248, "told"), (98_304, "told"), (102_400, "")]
)
def test_states_that_cannot_all_be_held_are_refused_before_anything_runs(memory, outcome, monkeypatch, caplog):
    monkeypatch.setattr(stacked_rounds.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}.get)
    with caplog.at_level(logging.WARNING):
        if outcome == "refused":
            with pytest.raises(WrongInput, match=r"states of 10 clients take 0\.00 GB of memory of cpu.*fewer clients"):
                room_for(FRESH, 10, CPU)
        else:
            assert room_for(FRESH, 10, CPU) == Room(10, 50_000, CPU, on_host=False)
    assert len(caplog.records) == (outcome == "told")


@pytest.mark.parametrize(("free", "on_host"), [(100_000, False), (99_999, True)])
def test_states_that_would_fill_half_of_a_gpus_free_memory_live_on_the_host(free, on_host, monkeypatch):
    monkeypatch.setattr(stacked_rounds, "_free_bytes", lambda device: free)
    room = room_for(FRESH, 10, GPU)
    assert room == Room(10, 50_000, GPU, on_host)
    assert ("host memory" if on_host else "memory of cuda") in str(room)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("execution", ["stacked", "sequential"])
@pytest.mark.parametrize("text", ["pseudo-largest", "priprune", "dgp+error-feedback"])
def test_a_federation_is_the_same_wherever_states_are_held(text, execution, device, monkeypatch):
    def measured(on_host):
        monkeypatch.setattr(
            "secateur.federated.federation.room_for", lambda fresh, clients, device: Room(clients, 1, device, on_host)
        )
        fed = federation(execution=execution, device=device, rounds=5, **protection_of(defense(text)))
        measures = run(fed)
        held = {value.device.type for state in fed.states.values() for value in state.values()}
        assert held == {"cpu" if on_host else torch.device(device).type}
        return measures, fed.model()

    (there, model), (here, again) = measured(on_host=True), measured(on_host=False)
    assert there == here
    assert all(torch.equal(value, again[name]) for name, value in model.items())


def test_a_federation_counts_who_can_be_sampled():
    fed = federation(withholding=Withhold(), rounds=1, per_round=2)
    assert fed.room.clients == 2 and fed.room.size > 0 and not fed.room.on_host


def test_a_dry_run_refuses_states_that_the_run_would_refuse(monkeypatch, capsys):
    monkeypatch.setattr(stacked_rounds.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}.get)
    flags = ["--clients", "8", "--per-round", "4", "--rounds", "2", "--dry-run", "--set", "examples=200"]
    assert main(["federate", "--base-pruning", "none", "--defense", "pseudo-largest", *flags]) == 2
    assert "clients: the states of 8 clients take 0.02 GB" in capsys.readouterr().err
    assert main(["federate", "--base-pruning", "none", "--defense", "none", *flags]) == 0
