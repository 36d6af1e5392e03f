"""The tests of Flower's engine with the Flower before the installed one, and with the newest on the package index."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from overlay import environment_over, run_pip

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]


def version_before():
    """The minor version before the installed one."""
    major, minor = importlib.metadata.version("flwr").split(".")[:2]
    return f"{major}.{int(minor) - 1}"


def overlay(folder, version):
    """The environment of a process that imports a version; what Flower needs is what the installed one has."""
    run_pip("install", folder, f"flwr{version}")
    own = environment_over(folder)
    told = [sys.executable, "-c", "import importlib.metadata; print(importlib.metadata.version('flwr'))"]
    return own, subprocess.run(told, env=own, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("which", ["before", "newest"])
def test_the_engine_works_with_another_version(which, tmp_path):
    own, version = overlay(tmp_path, f"=={version_before()}.*" if which == "before" else "")
    if version == importlib.metadata.version("flwr"):
        pytest.skip(f"left out: the newest flwr, {version}, is the installed one, so that make test tries it")
    assert which == "newest" or version.startswith(f"{version_before()}.")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not system"]
    done = subprocess.run([*command, "tests/federated/flower"], cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f"flwr {version}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"


def test_the_lower_bound_is_the_version_before():
    (bound,) = re.findall(r'"flwr\[simulation\]>=([\d.]+),<2"', (ROOT / "pyproject.toml").read_text())
    assert bound == version_before()
