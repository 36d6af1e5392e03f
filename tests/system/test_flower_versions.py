"""The tests of Flower's engine with the Flower before the installed one, and with the newest on the package index."""

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PINS = (ROOT / "constraints.txt").read_text().splitlines()
OPEN = ("flwr", "ray", "typer", "rich", "protobuf", "grpcio")  # Flower chooses these itself, and what these need


def version_before():
    """The minor version before the installed one, and its files over the installed environment."""
    major, minor = importlib.metadata.version("flwr").split(".")[:2]
    return f"{major}.{int(minor) - 1}"


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    """The environment of a process that imports that version; what Flower needs is what the installed one has."""
    folder = tmp_path_factory.mktemp("before")
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    done = subprocess.run([*command, "--target", folder, f"flwr=={version_before()}.*"], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"left out: flwr {version_before()} cannot be installed: {done.stderr[-300:]}")
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), own.get("PYTHONPATH")]))
    told = [sys.executable, "-c", "import importlib.metadata; print(importlib.metadata.version('flwr'))"]
    assert subprocess.run(told, env=own, capture_output=True, text=True).stdout.startswith(f"{version_before()}.")
    return own


@pytest.mark.parametrize(
    "tests", [["-m", "not system", "tests/federated/flower"], ["tests/system/test_flower_example.py"]], ids=str
)
def test_the_engine_and_the_examples_work_with_the_version_before(tests, before):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, env=before, capture_output=True, text=True)
    assert done.returncode == 0, f"flwr {version_before()}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"


def test_the_lower_bound_is_the_version_before():
    (bound,) = re.findall(r'"flwr\[simulation\]>=([\d.]+),<2"', (ROOT / "pyproject.toml").read_text())
    assert bound == version_before()


def test_the_engine_works_with_the_newest(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    kept = [pin for pin in PINS[: PINS.index("# What these need")] if re.split(r"[<>=]", pin)[0] not in OPEN]
    (tmp_path / "constraints.txt").write_text("\n".join(kept))

    def pip(*arguments):
        command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    found = pip("download", "--quiet", "--no-deps", "--dest", tmp_path / "newest", "flwr")
    if found.returncode:
        pytest.skip(f"left out: the package index cannot be reached: {found.stderr[-300:]}")
    (wheel,) = (tmp_path / "newest").iterdir()
    newest = wheel.name.split("-")[1]
    if f"flwr=={newest}" in PINS:
        pytest.skip(f"left out: constraints.txt has the newest flwr, {newest}, so that make test tries it")
    wanted = ["-c", tmp_path / "constraints.txt", "-e", f"{ROOT}[dp,flower]", "pytest", "pytest-timeout", "hypothesis"]
    for arguments in (wanted, ["--no-deps", wheel]):  # the index may lack a package that the newest one wants
        done = pip("install", "--quiet", *arguments)
        assert done.returncode == 0, done.stderr
    command = [python, "-m", "pytest", "-q", "-m", "not system", "-p", "no:cacheprovider", "tests/federated/flower"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True)
    assert done.returncode == 0, f"flwr {newest}\n{done.stdout[-8000:]}{done.stderr[-2000:]}"
