"""One thread for every test process, set before torch is imported, and the real data's folder."""

import importlib.util
import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def data_folder() -> Path:
    """The folder of real data sets in their public layouts."""
    folder = os.environ.get("SECATEUR_DATA")
    if not folder:
        pytest.skip("left out: SECATEUR_DATA does not name a folder of real data")
    return Path(folder)


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.fixture
def hide(monkeypatch):
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hidden(package):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name))

    return hidden
