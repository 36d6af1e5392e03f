"""An attack on updates killed at many random moments goes on in the middle and ends with the same rows."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import finished, killed

from secateur.report.page import write_page
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

SCRIPT = Path(__file__).with_name("killable_invert.py")
SETTINGS = ["--attack", "ig:iterations=400,gi:iterations=200,dlg:iterations=12", "--restarts", "2"]
SETTINGS += ["--targets", "4", "--set", "together=2"]


def start(folder):
    command = [sys.executable, str(SCRIPT), "--out", str(folder), *SETTINGS]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=os.environ, preexec_fn=listen
    )


def listen():
    """What is started in the background ignores Control-C, and its children with it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.timeout(1200)
def test_killed_many_times_and_still_the_same_rows(tmp_path):
    finished(start(tmp_path / "whole"))
    whole, folder = select_comparable(load_rows(tmp_path / "whole")), tmp_path / "killed"

    moments, kills, caught = random.Random(0), 0, 0
    while kills < 6 or caught < 2:  # twice at least in the middle of an attack, wherever chance lets the others fall
        assert kills < 30
        if killed(start(folder), folder, "unfinished/*.jsonl", moments):
            kills += 1
            if list(folder.glob("unfinished/*.jsonl")):  # a page shows what the attack had
                caught += 1
                page = write_page([folder], tmp_path / "page.html").read_text()
                assert "unfinished</small>" in page
        else:  # it got through: compare, and begin anew for the kills that are left
            assert select_comparable(load_rows(folder)) == whole
            shutil.rmtree(folder)
    finished(start(folder))
    assert select_comparable(load_rows(folder)) == whole
    assert not (folder / "unfinished").exists()
    assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]


def test_control_c_writes_the_page(tmp_path):
    process = start(tmp_path / "run")
    deadline = time.monotonic() + 300
    while not list((tmp_path / "run").glob("unfinished/*.jsonl")):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 130 and "interrupted; finished stages are saved" in said and "Traceback" not in said
    page = (tmp_path / "run" / "report.html").read_text()
    assert "unfinished</small>" in page or 'id="recovered"' in page
