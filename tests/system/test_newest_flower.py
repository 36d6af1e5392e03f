"""The tests of Flower's engine with the newest Flower on the package index, in an environment of its own."""

import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.timeout(1500)]

ROOT = Path(__file__).parents[2]
PINS = (ROOT / "constraints.txt").read_text().splitlines()
OPEN = ("flwr", "ray", "typer", "rich", "protobuf", "grpcio")  # Flower chooses these itself, and what these need


def test_the_engine_works_with_it(tmp_path):
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
