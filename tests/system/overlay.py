"""Packages of the package index in a folder of their own, which PYTHONPATH lays over the installed ones."""

import os
import subprocess
import sys

import pytest


def run_pip(command, folder, *requirements):
    """Install or download packages, without what they need, into a folder; skip the test if pip cannot get them."""
    where = {"install": "--target", "download": "--dest"}[command]
    flags = ["--disable-pip-version-check", command, "--quiet", "--no-deps", where, str(folder)]
    flags += ["--no-compile"] if command == "install" else []  # most modules are never imported
    done = subprocess.run([sys.executable, "-m", "pip", *flags, *requirements], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"left out: pip cannot get {', '.join(requirements)}: {done.stderr[-300:]}")


def environment_over(folder):
    """The environment of processes that find the packages of a folder first."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return own | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), own.get("PYTHONPATH")]))}
