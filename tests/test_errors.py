"""Optional parts: whoever asks for one that is missing learns which extra brings it."""

import importlib.util
import tomllib
from pathlib import Path

import pytest

from secateur.cli import main
from secateur.errors import WrongInput, require


@pytest.fixture
def hide(monkeypatch):
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec

    def hidden(package):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == package else find(name))

    return hidden


@pytest.mark.parametrize(
    ("package", "extra", "flags"),
    [
        ("ray", "ray", ["--set", "way=ray"]),
        ("opacus", "dp", ["--defense", "dp-sgd"]),
        ("opacus", "dp", ["--defense", "dp-sgd-scratch"]),
    ],
)
@pytest.mark.parametrize("command", ["prune", "audit"])
def test_a_missing_optional_part_is_one_sentence(package, extra, flags, command, hide, tmp_path, capsys):
    hide(package)
    small = ["--model", "mlp", "--pruner", "l1-unstructured", "--set", "train.epochs=1", "--set", "finetune.epochs=1"]
    small += ["--attack", "correctness", "--shadows", "1"] if command == "audit" else []
    assert main([command, *small, *flags, "--out", str(tmp_path / "m.safetensors")]) == 2
    said = [line for line in capsys.readouterr().err.splitlines() if package in line]
    assert len(said) == 1
    assert f"{package}: is not installed; install it with: pip install 'secateur[{extra}]'" in said[0]


def test_what_is_there_is_not_refused():
    require("torch", "core")


def test_the_extras_that_are_named_exist(hide):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    for package, extra in (("ray", "ray"), ("opacus", "dp")):
        assert any(line.startswith(package) for line in project["project"]["optional-dependencies"][extra])
        hide(package)
        with pytest.raises(WrongInput, match=rf"secateur\[{extra}\]"):
            require(package, extra)
