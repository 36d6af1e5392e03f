"""A run killed with SIGKILL at any moment goes on and ends with the same rows and artifacts."""

import fcntl
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from functools import partial

import pytest
import yaml
from killable_run import work

import secateur.runs.artifacts
import secateur.runs.folder
import secateur.runs.rows
from secateur.runs.artifacts import decode
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

pytestmark = pytest.mark.system
TRACED = {module.__file__ for module in (secateur.runs.artifacts, secateur.runs.rows, secateur.runs.folder)}


def artifacts(folder):
    return {path.name: path.read_bytes() for path in (folder / "artifacts").glob("*.safetensors")}


def assert_whole(folder, expected):
    """Nothing is torn under a final name, what is there is right, and the lock is free."""
    if (folder / "run.json").exists():
        assert json.loads((folder / "run.json").read_text())["kind"] == "audit"
        rows = select_comparable(load_rows(folder))
        assert rows == select_comparable(load_rows(expected))[: len(rows)]
    if (folder / "config.yaml").exists():
        assert yaml.safe_load((folder / "config.yaml").read_text())["schema"] == 1
    for name, content in artifacts(folder).items():
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        assert decode(content, json.loads(header["__metadata__"]["secateur"])["key"]) is not None
        assert content == artifacts(expected)[name]
    if (folder / ".lock").exists():
        with (folder / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def assert_finished(folder, expected):
    assert select_comparable(load_rows(folder)) == select_comparable(load_rows(expected))
    assert len(load_rows(folder)) == len(load_rows(expected))
    assert artifacts(folder) == artifacts(expected)
    assert json.loads((folder / "run.json").read_text())["finished"]
    assert {path.name for path in folder.iterdir()} == {path.name for path in expected.iterdir()}


def started(target):
    """A process of its own, its imports done."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    return process


def worked(folder):
    """The exit code of the whole work."""
    process = started(partial(work, folder))
    process.join()
    return process.exitcode


def test_killed_at_random_moments(tmp_path):
    whole = tmp_path / "whole"
    start = time.perf_counter()
    assert worked(whole) == 0
    seconds = time.perf_counter() - start
    assert len(artifacts(whole)) == 30
    chance = random.Random(0)
    kills = finished = 0
    while kills < 25:
        folder = tmp_path / f"killed-{finished}"
        process = started(partial(work, folder))
        time.sleep(chance.uniform(0, seconds))
        process.kill()
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
        if process.exitcode == 0:
            assert_finished(folder, whole)
            finished += 1
        else:
            assert_whole(folder, whole)
            kills += 1
    assert worked(folder) == 0
    assert_finished(folder, whole)


def killed_at(folder, line):
    """Work in a process of its own that is killed before the given line of the run's code; its exit code."""

    def traced():
        lines = 0

        def trace(frame, event, argument):
            nonlocal lines
            if frame.f_code.co_filename not in TRACED:
                return None
            lines += event == "line"
            if lines == line:
                os.kill(os.getpid(), signal.SIGKILL)
            return trace

        sys.settrace(trace)
        work(folder, models=1, pause=0)

    process = started(traced)
    process.join()
    return process.exitcode


def test_killed_before_every_line(tmp_path):
    whole = tmp_path / "whole"
    work(whole, models=1, pause=0)
    chance = random.Random(0)
    line = kills = 0
    while True:
        line += 1
        folder = tmp_path / str(line)
        if killed_at(folder, line) == 0:
            break
        assert_whole(folder, whole)
        kills += killed_at(folder, chance.randint(1, 2 * line)) != 0
        assert_whole(folder, whole)
        work(folder, models=1, pause=0)
        assert_finished(folder, whole)
    assert line > 200
    assert kills > 100  # and most of them twice
