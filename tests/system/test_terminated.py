"""SIGTERM in a simulation over Flower: the run says how to go on, releases its lock, and does."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from secateur.runs.folder import open_run

pytest.importorskip("flwr")
pytestmark = pytest.mark.system
SCRIPT = Path(__file__).with_name("killable_federate.py")  # saves its state after nearly every round
COMMAND = [sys.executable, str(SCRIPT), "--engine", "flower", "--device", "cpu", "--clients", "2", "--per-round", "2"]


def test_a_terminated_simulation_is_like_an_interrupted_one(tmp_path):
    out = tmp_path / "run"
    command = [*COMMAND, "--rounds", "2000", "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 300
    while not list(out.glob("unfinished/*.safetensors")):  # a round was simulated
        assert time.monotonic() < until and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "secateur: interrupted; finished stages are saved" in said
    with open_run(out, "federate", {}):
        pass
