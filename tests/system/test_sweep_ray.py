"""A sweep on a real Ray: the rows of one machine, whichever process is killed and wherever the workers write."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from secateur.config import Sweep
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable
from secateur.sweep import workers
from secateur.sweep.plan import plan

pytest.importorskip("ray")
pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

SCRIPT = Path(__file__).with_name("killable_sweep.py")
JOBS = {
    "audits": {"job": "audit", "pruner": "l1-unstructured", "attack": "conf", "shadows": 1, "train": {"epochs": 4}},
    "rounds": {"job": "federate", "model": "conv-1", "rounds": 30, "clients": 4, "per_round": 2, "local_steps": 1},
    "tables": {"job": "reproduce", "study": "dgp-fig2", "scale": "tiny", "set": {"targets": 1, "iterations": 2}},
    "updates": {"job": "invert", "attack": "ig:iterations=5", "targets": 1},
}
JOBS["audits"]["seeds"] = 2
JOBS["rounds"] |= {"batch_size": 4, "base_pruning": "random"}
JOBS["tables"]["set"] |= {"epochs": 1, "examples": 80}
WRONG = {"wrong": {"job": "audit", "model": "mlp", "pruner": "slimming"}}


@pytest.fixture(scope="module")
def in_sequence(tmp_path_factory):
    """The rows of the pieces that can be run, one after the other in this process."""
    rows, folder = [], tmp_path_factory.mktemp("alone")
    for piece in plan(Sweep.model_validate({"jobs": JOBS})):
        workers.run_job(piece, folder / piece.name)
        rows += [replace(row, extra=row.extra | {"run": piece.run}) for row in load_rows(folder / piece.name)]
    return select_comparable(rows)


def start(tmp_path, jobs, program, *flags):
    (tmp_path / "sweep.yaml").write_text(yaml.safe_dump({"jobs": jobs}, sort_keys=False))
    command = [sys.executable, *program, str(tmp_path / "sweep.yaml"), "--out", str(tmp_path / "out"), *flags]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, env=variables(tmp_path), cwd=tmp_path, **pipes)


def variables(tmp_path):
    """A disk of the workers' own. Ray's own folder has a short name, as sockets must."""
    (tmp_path / "disk").mkdir(exist_ok=True)
    # Ray would end workers wherever other programs use up the memory; that is not what is tested.
    return os.environ | {
        "RAY_memory_monitor_refresh_ms": "0",
        "TMPDIR": str(tmp_path / "disk"),
        "RAY_TMPDIR": "/tmp",
    }


@pytest.fixture
def cluster(tmp_path):
    """The address of a Ray cluster with two CPUs that was there before the sweep."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "start", "--head", "--block", f"--port={port}", "--num-cpus=2", f"--temp-dir={folder}"]
    command += ["--include-dashboard=false", "--disable-usage-stats"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(command, text=True, env=variables(tmp_path), **pipes)
    try:
        assert any("Ray runtime started" in line for line in process.stdout)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()  # it ends what it started
        process.communicate()
        shutil.rmtree(folder, ignore_errors=True)


def entries(tmp_path):
    try:
        return [json.loads(line) for line in (tmp_path / "out" / "pieces.jsonl").read_text().splitlines()]
    except FileNotFoundError:
        return []


def until(process, found):
    """What `found` finds, while the process lives."""
    while not (what := found()):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return what


def busy(folder):
    """The process of a run in one of the folders that is begun and not finished."""
    for marker in folder.glob("*/run.json"):
        if json.loads(marker.read_text())["finished"] is None:
            return int((marker.parent / ".lock").read_text())
    return None


def test_a_killed_worker_changes_nothing(tmp_path, in_sequence):
    process = start(tmp_path, JOBS | WRONG, ["-m", "secateur", "sweep"], "--workers", "2")
    worker = until(process, lambda: busy(tmp_path / "out" / "pieces"))
    os.kill(worker, signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode == 70  # for the one that cannot be run
    assert "secateur: wrong failed: pruner: slimming needs BatchNorm" in said and "Traceback" not in said
    assert said.count("worker died, restarting") == 1 and "start 2 of 4" in said
    assert select_comparable(load_rows(tmp_path / "out")) == in_sequence
    *others, wrong = entries(tmp_path)
    assert wrong["state"] == "failed" and {entry["state"] for entry in others} == {"done"}
    assert sorted(entry["starts"] for entry in others) == [1] * (len(others) - 1) + [2]
    assert (tmp_path / "out" / "pieces" / "tables" / "table.md").exists()
    assert (tmp_path / "out" / "report.html").exists()
    assert not list((tmp_path / "disk").glob("secateur-*"))  # they found the sweep's own folder


def test_a_killed_sweep_goes_on_at_a_cluster_and_other_disks_come_back(tmp_path, in_sequence, cluster):
    process = start(tmp_path, JOBS, [str(SCRIPT)], "--workers", "1")
    disk = tmp_path / "disk" / f"secateur-{os.getuid()}"
    until(process, lambda: any(entry["state"] == "done" for entry in entries(tmp_path)))
    worker = until(process, lambda: busy(disk))
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stderr.close()
    finished = {entry["name"] for entry in entries(tmp_path) if entry["state"] == "done"}
    deadline = time.monotonic() + 300
    while Path(f"/proc/{worker}").exists():  # Ray's processes end with the one that started them
        assert time.monotonic() < deadline
        time.sleep(0.1)

    process = start(tmp_path, JOBS, [str(SCRIPT)], "--address", cluster)
    _, said = process.communicate()
    assert process.returncode == 0, said
    assert select_comparable(load_rows(tmp_path / "out")) == in_sequence
    assert {entry["name"] for entry in entries(tmp_path) if not entry["starts"]} == finished
    assert not list(disk.iterdir())  # everything came back
    for piece in (tmp_path / "out" / "pieces").iterdir():
        assert (piece / "report.html").exists() and list((piece / "artifacts").iterdir())
