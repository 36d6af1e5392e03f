"""Recipes on a real Ray cluster with a token: the rows of a search in one process, from stages of workers."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

pytest.importorskip("ray")
pytest.importorskip("optuna")
pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

SEARCH = ["--pruner", "l1-unstructured,l1-structured", "--sparsity", ".5,.9", "--defense", "basic,ppb"]
SEARCH += ["--shadows", "1", "--candidates", "4", "--finalists", "1", "--attack", "conf", "--set", "examples=300"]
SEARCH += ["--set", "train.epochs=2", "--set", "finetune.epochs=2"]
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4, "RAY_TMPDIR": "/tmp"}


@pytest.fixture
def cluster():
    """The address of a cluster of two CPUs that asks for a token."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}"]
    command += ["--num-cpus=2", f"--temp-dir={folder}", "--include-dashboard=false", "--disable-usage-stats"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, env=os.environ | TOKEN, **pipes)
    try:
        assert any("Ray runtime started" in line for line in process.stdout)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def search(folder, *flags):
    command = [sys.executable, "-m", "secateur", "recommend", "--out", str(folder), *SEARCH, *flags]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | TOKEN, check=False)


def test_workers_measure_the_recipes_and_the_rows_are_the_same(tmp_path, cluster):
    spread, alone = search(tmp_path / "spread", "--address", cluster), search(tmp_path / "alone")
    assert spread.returncode == alone.returncode == 0, spread.stderr
    assert f"4 recipes on {cluster}" in spread.stderr
    assert "ppb" not in spread.stderr.partition("strongest attackers")[0]  # workers fine-tuned them
    rows = [select_comparable(load_rows(tmp_path / name)) for name in ("spread", "alone")]
    assert rows[0] == rows[1]
