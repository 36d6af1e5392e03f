"""One thread for every test process, set before torch is imported, and the real data's folder.

`--device auto` takes the CPU in tests: rows of two runs are equal bit for bit there, and on a GPU nearly so. Tests of a
GPU name it.
"""

import gc
import importlib.util
import os
from dataclasses import replace

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE", SECATEUR_DEVICE="cpu")

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
gc.disable()  # while files are collected, which makes a million objects and no garbage; `frozen` turns it on
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine is slow
settings.load_profile("busy")


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """Leave what stands before a file's tests out of later collections of garbage.

    Every federation starts one, which would walk a million objects of pytest and of torch for half a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)  # tests make many objects and little garbage
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def unsynced():
    """Do not wait for the disk: what a power cut needs, a test does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets in their public layouts."""
    folder = os.environ.get("SECATEUR_DATA")
    if not folder:
        pytest.skip("left out: SECATEUR_DATA does not name a folder of real data")
    return Path(folder)


@pytest.fixture(scope="session")
def lpips_weights(data_folder: Path) -> dict[str, torch.Tensor]:
    """The published weights of LPIPS, from the file that users make or from an archive of arrays with its names."""
    from secateur.metrics.lpips import FILE, SHAPES, load_weights

    weights, arrays = load_weights(data_folder), data_folder / "lpips" / "alex.npz"
    if weights is None and arrays.is_file():
        weights = {name: torch.from_numpy(array).float() for name, array in np.load(arrays).items()}
        assert {name: tuple(value.shape) for name, value in weights.items()} == SHAPES
    if weights is None:
        pytest.skip(f"left out: {FILE} is not in the folder of real data")
    return weights


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def few_epochs(monkeypatch):
    """Let attacks that are networks train for two epochs, where a test asks nothing of their strength."""
    from secateur.attacks.membership import neural

    train = neural.train
    monkeypatch.setattr(neural, "train", lambda net, rows, plan, rng: train(net, rows, replace(plan, epochs=2), rng))


@pytest.fixture
def hide(monkeypatch):
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hidden(package):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name))

    return hidden
