"""A round's clients: equal to torch.optim.Adam, and equal stacked and one by one, whatever their sizes and widths."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import tiny_submodels as tiny
from secateur.federated.submodels import clients
from secateur.federated.submodels.clients import _list_steps
from secateur.federated.submodels.networks import batches, without_statistics
from secateur.federated.submodels.structure import params_of
from secateur.gpu import graphs
from secateur.models.resnet import Block


def without_biases_before_norms(federation, client, flat):
    """What must be equal: a bias before a BatchNorm has no gradient but round-off, which Adam makes large."""
    params = params_of(flat, federation.narrow(client).shapes)
    return torch.cat([v.flatten() for name, v in params.items() if name not in ("0.bias", "3.bias")])


def turns(execution, number=1, **fields):
    federation = tiny.federation(execution=execution, **fields)
    jobs = federation.begin(number)
    return federation, [turn.client for turn in federation._turns], federation.trainer(jobs)


def test_a_turn_is_an_epoch_of_torchs_adam():
    federation = tiny.federation("none", local=tiny.Adam(epochs=2, batch_size=tiny.BATCH))
    jobs = federation.begin(1)
    made = federation.trainer(jobs)
    worker = without_statistics(tiny.net()).train()
    optimiser = torch.optim.Adam(worker.parameters(), 1e-3)
    for rows in (rows for epoch in jobs[0].epochs for rows in batches(epoch, tiny.BATCH)):
        optimiser.zero_grad()
        inputs, labels = federation.train.take(rows)
        cross_entropy(worker(inputs), labels).backward()
        optimiser.step()
    wanted = torch.cat([value.detach().flatten() for value in worker.parameters()])
    found, wanted = (without_biases_before_norms(federation, 0, flat) for flat in (made[0].flat, wanted))
    assert (found - wanted).abs().max() < 1e-9


@pytest.mark.parametrize("rule", ["mapp-fl", "fdropout", "none"])
def test_stacked_is_equal_to_one_by_one(rule):
    local = tiny.Adam(epochs=2, batch_size=tiny.BATCH)
    federation, clients, stacked = turns("stacked", rule=rule, widths=(0.5, 0.25), local=local)
    _, _, alone = turns("sequential", rule=rule, widths=(0.5, 0.25), local=local)
    assert len({federation.rates[client] for client in clients}) == (1 if rule == "none" else 3)
    for client, one, other in zip(clients, stacked, alone, strict=True):
        flats = [without_biases_before_norms(federation, client, made.flat) for made in (one, other)]
        assert (flats[0] - flats[1]).abs().max() < 1e-9
        assert one.moments.steps == other.moments.steps


def residual():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        stem = [nn.Conv2d(1, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.3), nn.Linear(16, 3)]
        return nn.Sequential(*stem, Block(8, 8, 1), Block(8, 16, 2), *head).double()


def test_stacked_is_equal_on_a_residual_network_with_dropout_and_own_labels():
    fields = {"own_labels": True, "model": residual()}
    _, _, stacked = turns("stacked", **fields)
    _, _, alone = turns("sequential", **fields)
    for one, other in zip(stacked, alone, strict=True):
        assert (one.flat - other.flat).abs().max() < 1e-9


def test_steps_of_unequal_clients_are_never_padded():
    lanes = [batches(torch.arange(size), 8) for size in (29, 17, 12, 9, 8)]
    lanes.sort(key=lambda lane: (-sum(len(rows) == 8 for rows in lane), -len(lane[-1])))
    steps = [(first, last, len(rows[0])) for first, last, rows in _list_steps(lanes, 8)]
    assert steps == [(0, 4, 8), (0, 1, 8), (0, 1, 8), (0, 1, 5), (1, 2, 9), (3, 4, 4), (4, 5, 9)]
    work = sum((last - first) * size for first, last, size in steps)
    assert work == 29 + 17 + 12 + 9 + 8


def test_clients_of_equal_size_take_their_last_batch_together():
    lanes = [batches(torch.arange(size), 8) for size in (20, 20, 20)]
    assert [(first, last, len(rows[0])) for first, last, rows in _list_steps(lanes, 8)] == [
        (0, 3, 8),
        (0, 3, 8),
        (0, 3, 4),
    ]


def test_batches_never_leave_a_single_row():
    assert [len(rows) for rows in batches(torch.arange(17), 8)] == [8, 9]
    assert [len(rows) for rows in batches(torch.arange(9), 8)] == [9]
    assert [len(rows) for rows in batches(torch.arange(1), 8)] == [1]


def test_no_more_graphs_are_captured_than_may_be(monkeypatch):
    class Counting:
        """Stands for CUDA graphs: tells the warm-ups and replays of one step."""

        def __init__(self, function, device):
            self.function, self.stream, self.pool = function, None, None

        def __call__(self, given):
            told.append("graph")

    monkeypatch.setattr(clients, "Captured", Counting)
    monkeypatch.setattr(clients, "MOST_GRAPHS", 1)
    federation, told = tiny.federation(), []
    federation.trainer.data = SimpleNamespace(inputs=SimpleNamespace(device=torch.device("cuda")))
    first, second = (federation.trainer.capture_step(lambda given: told.append("eager")) for _ in range(2))
    given = clients._Step(torch.zeros(2, 8), torch.zeros(2, 2), ())
    other = clients._Step(torch.zeros(2, 5), torch.zeros(2, 2), ())
    for step, form in ((first, given), (first, other), (second, given)):
        told.clear()
        for _ in range(graphs.WARMUPS + 2):
            step(form)
        captured = step is first and form is given
        assert told == ["graph"] * graphs.WARMUPS + ["graph" if captured else "eager"] * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")
@pytest.mark.parametrize("rule", ["mapp-fl", "fdropout", "heterofl", "none"])
def test_a_gpu_equals_a_cpu(rule):
    made = [tiny.federation(rule, rounds=8, device=device) for device in ("cpu", "cuda")]
    rows = [tiny.told(federation) for federation in made]
    one, other = (federation.model() for federation in made)
    for name in (name for name in one if name not in ("0.bias", "3.bias")):
        torch.testing.assert_close(other[name].cpu(), one[name], rtol=0, atol=1e-8)
    assert [(row.metric, row.round) for row in rows[0]] == [(row.metric, row.round) for row in rows[1]]
