"""Memory that runs out: the stacked axis is halved, or goes one by one, and the results are equal."""

import pytest
import torch
from torch import nn

from secateur import tree
from secateur.federated import server, stacked_rounds
from secateur.federated.faults import Faults
from secateur.federated.stacked_rounds import Room, StackedRounds
from secateur.gpu.memory import halve_on_shortage, ran_out
from secateur.interfaces import Batch
from secateur.training.execution import Lanes
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit_many
from tiny_rules import Stale, Withhold, federation, run


def shortage(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("x"), MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("x")]
)
def test_a_lack_of_memory_is_recognised(error):
    assert ran_out(error) == (str(error) != "x" or isinstance(error, torch.OutOfMemoryError))


def test_parts_come_in_order_and_one_alone_fails():
    sizes = []

    def work(rows):
        sizes.append(len(rows))
        return rows.tolist() if len(rows) <= 2 else shortage()

    assert halve_on_shortage(work, torch.arange(7)) == [[0, 1], [2, 3], [4, 5], [6]]
    assert sizes == [7, 4, 2, 2, 2, 1]
    with pytest.raises(torch.OutOfMemoryError):
        halve_on_shortage(shortage, torch.arange(2))


def test_models_of_a_training_are_halved(monkeypatch, caplog):
    rng = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)).double() for _ in range(5)]
    inputs, labels = torch.randn(40, 6, generator=rng).double(), torch.randint(3, (40,), generator=rng)
    batch = Batch(inputs, labels)
    tasks = [Task(tree.state_of(net), batch, batch, torch.Generator().manual_seed(i)) for i, net in enumerate(nets)]

    def train():
        done = dict(fit_many(nets[0], tasks, Recipe(epochs=3, batch_size=16), execution="stacked"))
        return [done[i].state for i in range(5)]

    plain, step, most = train(), Lanes.step, set()

    def limited(self, rows):
        most.add(len(rows))
        return shortage() if len(rows) > 2 else step(self, rows)

    monkeypatch.setattr(Lanes, "step", limited)
    for one, other in zip(plain, train(), strict=True):
        for name, value in one.items():
            torch.testing.assert_close(other[name], value, rtol=1e-9, atol=1e-9)
    assert most == {5, 3, 2, 1} and "memory ran out with 5 models at once; going on with 3" in caplog.text


@pytest.mark.parametrize("rule", [{}, {"withholding": Withhold()}], ids=["plain", "withholding"])
def test_clients_of_a_round_go_on_one_at_a_time(rule, monkeypatch, caplog):
    terms = rule | {"rounds": 4, "faults": Faults(nan=0.2, shape=0.2)}
    plain = federation(None, execution="stacked", **terms)
    rows = run(plain)
    tight, whole = federation(None, execution="stacked", **terms), StackedRounds.__call__
    tight.room = tight.room._replace(device=torch.device("cuda"))  # as if there were one, whose states move
    monkeypatch.setattr(
        StackedRounds, "__call__", lambda self, number, *rest: shortage() if number == 2 else whole(self, number, *rest)
    )
    assert [(row.metric, row.round, row.client) for row in run(tight)] == [
        (row.metric, row.round, row.client) for row in rows
    ]
    assert tight.together is None and "going on with one at a time" in caplog.text
    assert tight.room.on_host == bool(rule) == ("moved to the host: the states of 5 clients" in caplog.text)
    if rule:
        assert tight.states.on_host and len(tight.states) == len(plain.states) > 0
    for name, value in plain.model().items():
        torch.testing.assert_close(tight.model()[name], value, rtol=1e-6, atol=1e-8)


def test_squares_of_a_round_that_is_repeated_count_once(monkeypatch):
    """Memory may run out when the squares of some layers are already added."""
    terms = {"rounds": 4, "base": Stale(every=9)}  # no adjustment takes them
    plain = federation(None, execution="stacked", **terms)
    run(plain)
    tight, add, calls = federation(None, execution="stacked", **terms), server.add_weighted, []

    def limited(total, values, weights, squared=False):
        calls.append(squared)
        return shortage() if sum(calls) == 7 else add(total, values, weights, squared)  # 4 layers a round

    monkeypatch.setattr(server, "add_weighted", limited)
    run(tight)
    assert tight.together is None and len(plain.server.squares) == 4
    for name, value in plain.server.squares.items():
        torch.testing.assert_close(tight.server.squares[name], value, rtol=1e-9, atol=0)


@pytest.mark.parametrize(("memory", "moves"), [(8, False), (16, True)])
def test_states_that_would_fill_half_of_the_host_stay_on_the_gpu(memory, moves, monkeypatch):
    monkeypatch.setattr(stacked_rounds, "_host_bytes", lambda: memory)
    assert Room(2, 8, torch.device("cuda"), on_host=False).relieve().on_host == moves
    assert not Room(2, 0, torch.device("cuda"), on_host=False).relieve().on_host
    assert not Room(2, 8, torch.device("cpu"), on_host=False).relieve().on_host
