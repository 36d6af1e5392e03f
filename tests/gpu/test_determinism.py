"""Inside `deterministic` one seed gives equal weights, nothing is chosen by time, and all settings come back."""

import pytest
import torch
from torch import nn

from secateur.gpu.determinism import deterministic, device_key, is_deterministic
from secateur.gpu.graphs import cudnn_times
from secateur.interfaces import Batch
from secateur.models.create import create
from secateur.training import execution
from secateur.training.execution import Lane, choose, map_many
from secateur.training.recipe import Recipe, Task
from secateur.training.trainer import fit_many

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="left out: there is no GPU")


def settings():
    memory = torch.utils.deterministic.fill_uninitialized_memory
    return torch.get_deterministic_debug_mode(), memory, torch.backends.cudnn.benchmark


@pytest.mark.parametrize("before", ["default", "error"])
def test_all_settings_come_back_also_after_an_error(before, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    torch.set_deterministic_debug_mode(before)
    try:
        outside = settings()
        with pytest.raises(ZeroDivisionError), deterministic():
            assert is_deterministic() and settings() == (1, False, False)
            with cudnn_times():
                assert not torch.backends.cudnn.benchmark
            raise ZeroDivisionError
        assert settings() == outside
    finally:
        torch.set_deterministic_debug_mode("default")


def test_nothing_happens_where_it_is_not_wanted():
    outside = settings()
    with deterministic(False):
        assert settings() == outside and not is_deterministic()


def test_a_stage_of_a_gpu_depends_on_the_mode():
    names = [device_key(torch.device(kind)) for kind in ("cpu", "cuda")]
    with deterministic():
        assert device_key(torch.device("cpu")) == names[0] == "cpu"
        assert device_key(torch.device("cuda:1")) != names[1] == "cuda"


def train(device, seed=0):
    def task(role):
        rng = torch.Generator().manual_seed(10 * seed + role)
        net = create("resnet18-w16", (3, 8, 8), 4, rng).to(device)
        rows = Batch(torch.randn(24, 3, 8, 8, generator=rng), torch.randint(4, (24,), generator=rng)).to(device)
        return Task(net.state_dict(), rows, rows.take(torch.arange(8, device=device)), rng)

    net = create("resnet18-w16", (3, 8, 8), 4, torch.Generator().manual_seed(0))
    tasks = [task(role) for role in range(2)]
    with deterministic():
        fitted = dict(fit_many(net, tasks, Recipe(epochs=2, batch_size=8, patience=None)))
    return [value.cpu() for index in sorted(fitted) for value in fitted[index].state.values()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
def test_two_trainings_of_one_seed_are_equal_bit_for_bit(device):
    first, second, other = train(device), train(device), train(device, seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not is_deterministic()


def test_the_way_is_not_chosen_by_its_time(monkeypatch):
    seconds = {"sequential": 2.0, "stacked": 1.0}
    lane = Lane({"w": torch.zeros(1, device="meta")}, {})
    monkeypatch.setattr(execution, "_device", lambda lanes: torch.device("cuda"))
    monkeypatch.setattr(execution, "Lanes", lambda objective, lanes, optimiser, execution: execution)
    monkeypatch.setattr(execution, "_seconds", lambda execution, inputs: seconds[execution])
    assert choose(nn.Identity(), [lane, lane], None, []) == "stacked"
    with deterministic():
        assert choose(nn.Identity(), [lane, lane], None, []) == "sequential"


def test_a_worker_of_ray_has_the_mode_of_the_run():
    pytest.importorskip("ray", reason="left out: the extra ray is not installed")
    with deterministic():
        assert dict(map_many(lambda item: is_deterministic(), [0], "ray")) == {0: True}
    assert not is_deterministic()
