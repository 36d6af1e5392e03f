"""Commands to be killed, each in a process of its own that is forked from one with all imports done.

A command is killed and started many times, and a fresh interpreter imports for seconds. The server of forks has run
nothing, so that a command finds on disk alone what the killed one left.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

SAVINGS = {"federate": {"secateur.federated.checkpoint:EVERY": 0.1}}  # of states many times a second
PARTS = ("attacks", "data", "defenses", "evaluation", "experiments", "federated", "models", "pruning", "report")
MODULES = [
    module.name
    for part in PARTS
    for module in pkgutil.walk_packages(importlib.import_module(f"secateur.{part}").__path__, f"secateur.{part}.")
    if not {"flower", "flare"} & set(module.name.split("."))  # they need extras, and are not killed here
]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["secateur.cli", "sklearn.datasets", *MODULES])


class KillableCommand:
    """A command of `secateur` in a forked process, with the methods of Popen that killing.py uses."""

    def __init__(self, *words: str) -> None:
        handle, self._errors = tempfile.mkstemp(prefix="killable-")
        os.close(handle)
        self._process = CONTEXT.Process(target=run, args=(words, self._errors))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code; None while the process lives."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return the exit code, if the process has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process; refuse to wait for longer than a timeout."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("secateur", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send a signal to the process."""
        os.kill(self._process.pid, number)  # type: ignore[arg-type]

    def communicate(self) -> tuple[None, str]:
        """Wait for the end of the process, and return what it said on standard error."""
        self.wait()
        said = Path(self._errors).read_text()
        Path(self._errors).unlink()
        return None, said


def run(words: tuple[str, ...], errors: str) -> None:
    """Run a command in this process, which then ends."""
    imported = "secateur.experiments.audit" in sys.modules  # a server that cannot import does not say so
    for stream, path in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(path, os.O_WRONLY), stream)
    for place, value in SAVINGS.get(words[0], {}).items():
        module, _, name = place.partition(":")
        setattr(importlib.import_module(module), name, value)
    from secateur.cli import main

    assert imported, "the server of forks has not imported the experiments"
    code = main(list(words))
    sys.stderr.flush()
    os._exit(code)
