"""Kill a process at a moment that its own progress sets: a clock would kill a slow machine's before it begins."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from pathlib import Path

PAUSE = 0.3  # seconds at most between a saving and the kill: it falls anywhere in what follows
SAVINGS = 3  # at most, that a process makes before it is killed


def seen(folder: Path, saved: str) -> set[tuple[str, int]]:
    """The files by name and time of writing; one that is gone meanwhile does not count."""
    found = set()
    for path in folder.glob(saved):
        try:
            found.add((path.name, path.stat().st_mtime_ns))
        except FileNotFoundError:
            continue
    return found


def killed(process: subprocess.Popen[str], folder: Path, saved: str, moments: random.Random) -> bool:
    """Kill `process` some time after it wrote a file of the pattern `saved`; False if it ended before, and well."""
    before, savings = seen(folder, saved), moments.randint(1, SAVINGS)
    while savings and process.poll() is None:
        time.sleep(0.01)
        now = seen(folder, saved)
        savings, before = savings - bool(now - before), now
    try:
        process.wait(timeout=moments.uniform(0, PAUSE))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), said
    return process.returncode != 0


def finished(process: subprocess.Popen[str]) -> None:
    """Wait until it has ended, and well."""
    _, said = process.communicate()
    assert process.returncode == 0, said
