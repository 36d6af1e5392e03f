"""Without Flower one sentence says what to install; with it nothing is reported home."""

import importlib.util
import os
import subprocess
import sys

import pytest

from secateur.cli import main
from secateur.errors import install_command


def test_without_flower_the_extra_is_named(monkeypatch, capsys, tmp_path):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "flwr" else found(name, *rest))
    for name in [name for name in sys.modules if name.startswith("secateur.federated.flower")]:
        monkeypatch.delitem(sys.modules, name)
    flags = ["--model", "digits-cnn", "--clients", "2", "--per-round", "2", "--rounds", "1"]
    assert main(["federate", "--engine", "flower", *flags, "--out", str(tmp_path / "run")]) == 2
    assert install_command("flower") in capsys.readouterr().err


@pytest.mark.parametrize("given", [None, "1"])
def test_nothing_is_reported_home_unless_somebody_says_so(given):
    own = {name: value for name, value in os.environ.items() if name != "FLWR_TELEMETRY_ENABLED"}
    own |= {} if given is None else {"FLWR_TELEMETRY_ENABLED": given}
    code = "import secateur.federated.flower, flwr.supercore.telemetry as t; print(t.FLWR_TELEMETRY_ENABLED)"
    done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (given or "0")


def test_an_engine_that_is_not_known(capsys, tmp_path):
    assert main(["federate", "--engine", "flwr", "--out", str(tmp_path / "run")]) == 2
    assert "engine" in capsys.readouterr().err
