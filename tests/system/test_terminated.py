"""SIGTERM in a simulation over Flower: the run says how to go on, releases its lock, and does."""

import os
import signal
import subprocess
import sys
import time

import pytest

from secateur.runs.folder import open_run

pytest.importorskip("flwr")
pytestmark = pytest.mark.system
COMMAND = [
    "federate",
    "--engine",
    "flower",
    "--device",
    "cpu",
    "--clients",
    "2",
    "--per-round",
    "2",
    "--rounds",
    "2000",
]


def test_a_terminated_simulation_is_like_an_interrupted_one(tmp_path):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "secateur", *COMMAND, "--out", str(out)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 120
    while not (out / "config.yaml").exists() and time.monotonic() < until:
        time.sleep(0.2)
    time.sleep(20)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "secateur: interrupted; finished stages are saved" in said
    with open_run(out, "federate", {}):
        pass
