"""The server adds updates up as they come: what it holds does not grow with the clients of a round."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from near import over_flower

from alone import pictures
from secateur.data.partition import iid
from secateur.federated import sampling
from secateur.federated.client_training import LocalTraining
from tiny_rules import ROWS, federation, run

MIB = 1 << 20
SCRIPT = """
import sys
sys.path[:0] = {paths!r}
from test_flower_memory import peak
print(*map(peak, {clients}))
"""


def peak(clients):
    """MiB by which the peak of this process grows in two rounds; an update has 8.5 MiB."""
    gc.collect()  # a federation before this one
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(36, 56_000), torch.nn.Linear(56_000, 3))
    shares = iid(ROWS, clients, torch.Generator().manual_seed(0))
    here = federation(net, shares=shares, per_round=clients, rounds=2, local=LocalTraining(steps=1, batch_size=2))
    here.data = pictures(ROWS, 8)
    there, _ = over_flower(here, deadline=300)
    begun = held()
    run(there)
    return (held() - begun) / MIB


def held():
    """Bytes of memory at most so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def measured(*clients):
    here = Path(__file__).parent
    code = SCRIPT.format(paths=[str(here), str(here.parents[1])], clients=clients)
    at_once = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(MIB)}  # a freed update goes back to the system at once
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=at_once)
    return list(map(float, done.stdout.split()))


@pytest.mark.system
def test_peak_memory_does_not_grow_with_the_clients_of_a_round():
    few, more = measured(16, 40)  # what is freed fills up to about 16 of them before it is used again
    assert more < 100, (few, more)  # above the peak of the few; the updates of 24 more clients are 205 MiB


def test_rounds_of_many_clients_are_drawn_one_at_a_time(monkeypatch):
    """64 rounds ahead of a thousand clients were 90 MiB, and seconds for every message to a deployed client."""
    given = [torch.arange(5)] * 600, 600, LocalTraining(steps=2, batch_size=3), 0
    monkeypatch.setattr(sampling.Sampler, "_move_rows", lambda self, drawn: drawn)
    few = sampling.Sampler(*given, device="cuda")
    rounds = [few(number) for number in (1, 2)]
    assert len(few._ahead) == 1
    local = sampling.Sampler(*given[:1], 10, *given[2:])
    assert len(local(1).clients) == 10 and len(local._ahead) == 1  # a CPU draws no round ahead
    monkeypatch.setattr(sampling, "TURNS", 10**6)
    many = sampling.Sampler(*given, device="cuda")
    assert all(torch.equal(torch.stack(one.rows), torch.stack(many(n).rows)) for n, one in enumerate(rounds, 1))
    assert len(many._ahead) == sampling.AHEAD


def test_the_order_of_arrival_changes_nothing():
    def found(order):
        here = federation(rounds=2, per_round=5)
        here.data = pictures(ROWS, 8)
        there, grid = over_flower(here)
        plain = grid.pull_messages
        grid.pull_messages = lambda idents: plain(sorted(idents, key=int, reverse=order))
        run(there)
        return there.model()

    one, other = found(False), found(True)
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)
