"""An audit killed at many random moments ends with the rows of one that was never killed."""

import random
import shutil
import signal
import time

import pytest
from killable import KillableCommand
from killing import finished, killed

from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

pytestmark = pytest.mark.system

SETTINGS = ["--shadows", "2", "--pruner", "l1-unstructured,l1-structured", "--sparsity", ".5"]
EPOCHS = ["--set", "train.epochs=20", "--set", "finetune.epochs=10"]


def start(folder):
    return KillableCommand("audit", "--out", str(folder), *SETTINGS, *EPOCHS)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    """The folder of an audit that was never killed."""
    folder = tmp_path_factory.mktemp("audit") / "whole"
    finished(start(folder))
    return folder


@pytest.mark.timeout(1200)
def test_killed_many_times_and_still_the_same_rows(tmp_path, finished_run):
    whole, folder = select_comparable(load_rows(finished_run)), tmp_path / "killed"

    moments, kills = random.Random(0), 0
    while kills < 8:
        if killed(start(folder), folder, "artifacts/*.safetensors", moments):
            kills += 1
        else:  # it got through: compare, and begin anew for the kills that are left
            assert select_comparable(load_rows(folder)) == whole
            shutil.rmtree(folder)
    finished(start(folder))
    assert select_comparable(load_rows(folder)) == whole
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_two_runs_may_not_write_one_folder(tmp_path):
    first = start(tmp_path / "run")
    try:
        deadline = time.monotonic() + 300
        while not (tmp_path / "run" / "run.json").exists():
            assert time.monotonic() < deadline and first.poll() is None
            time.sleep(0.05)
        second = start(tmp_path / "run")
        _, said = second.communicate()
        assert second.returncode == 2
        assert "in use by another run" in said and "Traceback" not in said
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate()


def test_a_damaged_artifact_is_computed_again(tmp_path, finished_run):
    folder = shutil.copytree(finished_run, tmp_path / "run")
    before = select_comparable(load_rows(folder))
    damaged = sorted((folder / "artifacts").glob("prune-*"))[0]
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    process = start(folder)
    _, said = process.communicate()
    assert process.returncode == 0
    assert damaged.name in said and "damaged" in said
    assert select_comparable(load_rows(folder)) == before
