"""States of clients: where they are held, and that a federation does not depend on it."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch

from secateur.cli import main
from secateur.config import defense
from secateur.defenses.uploads import protection_of
from secateur.errors import WrongInput
from secateur.federated import stacked_rounds
from secateur.federated.stacked_rounds import Room, room_for
from secateur.federated.state_file import ClientStateFile
from tiny_rules import Withhold, federation, run

FRESH = {"saved": torch.zeros(1000), "withheld": torch.zeros(1000, dtype=torch.bool)}  # 5 kB
CPU, GPU = torch.device("cpu"), torch.device("cuda")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize(
    ("memory", "disk", "outcome"),
    [(49_152, 49_999, "refused"), (49_152, 50_000, "disk"), (53_248, 0, "told"), (98_304, 0, "told"), (102_400, 0, "")],
)
def test_states_that_cannot_all_be_held_are_refused_before_anything_runs(memory, disk, outcome, monkeypatch, caplog):
    monkeypatch.setattr(stacked_rounds.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": memory // 4096}.get)
    monkeypatch.setattr(stacked_rounds.shutil, "disk_usage", lambda folder: SimpleNamespace(free=disk))
    with caplog.at_level(logging.WARNING):
        if outcome == "refused":
            with pytest.raises(WrongInput, match=r"states of 10 clients take 0\.00 GB of disk.*fewer clients"):
                room_for(FRESH, 10, CPU)
        else:
            assert room_for(FRESH, 10, CPU) == Room(10, 50_000, CPU, on_host=False, on_disk=outcome == "disk")
    assert len(caplog.records) == (outcome == "told")


@pytest.mark.parametrize(("size", "on_disk"), [(2**18, True), (2**18 + 1, False)])
def test_many_light_states_go_to_disk(size, on_disk):
    room = room_for({"saved": torch.empty(size, device="meta")}, 65, CPU)
    assert room.on_disk == on_disk and ("of disk" if on_disk else "of memory of cpu") in str(room)


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
    def measured(on_host, on_disk=False):
        where = on_host, on_disk
        monkeypatch.setattr(
            "secateur.federated.federation.room_for", lambda fresh, clients, device: Room(clients, 1, device, *where)
        )
        fed = federation(execution=execution, device=device, rounds=5, **protection_of(defense(text)))
        measures = run(fed)
        held = {value.device.type for state in fed.states.values() for value in state.values()}
        assert held == {"cpu" if on_host or on_disk else torch.device(device).type}
        assert isinstance(fed.states, ClientStateFile) == on_disk
        return measures, fed.model()

    (there, model), (here, again) = measured(on_host=True), measured(on_host=False)
    assert there == here
    assert all(torch.equal(value, again[name]) for name, value in model.items())
    if execution == "sequential":  # as on disk
        (filed, again) = measured(on_host=False, on_disk=True)
        assert filed == here and all(torch.equal(value, again[name]) for name, value in model.items())


def test_a_federation_goes_on_with_the_states_of_the_checkpoint_that_was_saved(monkeypatch, tmp_path):
    def new():
        fed = federation(rounds=8, evaluate_every=1, per_round=4, **protection_of(defense("dgp+error-feedback")))
        fed.place_states(tmp_path / "of.states")
        return fed

    wanted = run(new())
    monkeypatch.setattr(
        "secateur.federated.federation.room_for", lambda fresh, clients, device: Room(clients, 1, device, False, True)
    )
    first = new()
    rounds, begun = first.rounds(), []
    for number in range(1, 7):
        begun += next(rounds).measures
        state = first.state()  # that of an odd round is never saved
        if number % 2 == 0:
            first.note_saved()
            saved = copy.deepcopy(state)
    assert not any(name.startswith("client.") for name in saved[0])  # no checkpoint copies the states
    begun += next(rounds).measures  # this round is lost with the process
    second = new()
    second.load(*saved)
    again = [measure for measure in begun if measure.round <= 6] + run(second)
    assert again == wanted
    assert (tmp_path / "of.states").stat().st_size <= 3 * 5 * first.states.size  # of slots for five clients


def test_states_of_a_file_are_what_was_kept():
    fresh = {
        "w": torch.zeros(3, 2, dtype=torch.float64),
        "keep": torch.zeros(5, dtype=torch.bool),
        "n": torch.zeros(()),
    }
    held, rng = ClientStateFile(fresh), torch.Generator().manual_seed(0)
    wanted = {}
    for turn in range(60):
        client = int(torch.randint(7, (), generator=rng))
        wanted[client] = {
            "w": torch.randn(3, 2, generator=rng).double(),
            "keep": torch.rand(5, generator=rng) > 0.5,
            "n": torch.tensor(turn * 1.0),
        }
        held[client] = wanted[client]
        if turn % 5 == 0:
            held.mark()
        if turn % 15 == 0:
            held.save()
    assert dict(held).keys() == wanted.keys() and len(held) == 7
    assert all(torch.equal(value, held[c][name]) for c, state in wanted.items() for name, value in state.items())


def test_a_federation_counts_who_can_be_sampled():
    fed = federation(withholding=Withhold(), rounds=1, per_round=2)
    assert fed.room.clients == 2 and fed.room.size > 0 and not fed.room.on_host


def test_a_dry_run_refuses_states_that_the_run_would_refuse(monkeypatch, capsys):
    monkeypatch.setattr(stacked_rounds.shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    monkeypatch.setattr(stacked_rounds.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 10}.get)
    flags = ["--clients", "8", "--per-round", "4", "--rounds", "2", "--dry-run", "--set", "examples=200"]
    assert main(["federate", "--base-pruning", "none", "--defense", "pseudo-largest", *flags]) == 2
    assert "clients: the states of 8 clients take 0.02 GB" in capsys.readouterr().err
    assert main(["federate", "--base-pruning", "none", "--defense", "none", *flags]) == 0
