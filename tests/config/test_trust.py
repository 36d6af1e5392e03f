"""Run files that come from somebody else: the code that they name is not called unless the user says so."""

import re
import sys
from pathlib import Path

import pytest
import yaml

import secateur
from secateur.cli import main
from secateur.config import Audit, Federate, Invert, Reproduce, list_code, read
from secateur.runs.folder import open_run

TINY = {"device": "cpu", "pruner": "l1-unstructured", "shadows": 1, "attack": "conf", "examples": 200}
TINY |= {"train": {"epochs": 1}, "finetune": {"epochs": 1}}


@pytest.fixture
def trap(tmp_path, monkeypatch):
    """A module beside the run file whose import leaves a mark."""
    (tmp_path / "trap.py").write_text(
        "open('ran', 'w').close()\n\ndef call(*_, **__):\n    raise ValueError('called')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "trap", raising=False)
    return tmp_path / "ran"


def run_file(**fields):
    Path("run.yaml").write_text(yaml.safe_dump(fields))
    return "run.yaml"


FILES = [
    ("audit", TINY | {"model": "trap:call"}),
    ("audit", TINY | {"data": "trap:call"}),
    ("audit", TINY | {"train": "trap:call"}),
    ("audit", TINY | {"train": {"function": "trap:call"}}),
    ("audit", TINY | {"transform": "trap:call"}),
    ("audit", TINY | {"population": "trap:call"}),
    ("audit", TINY | {"model": "trap.sub-module:call"}),
    ("audit", TINY | {"model": "http://localhost:1/ask", "pruner": "none"}),
    ("audit", TINY | {"before": "http://localhost:1/ask"}),
    ("recommend", {"model": "trap:call"}),
    ("recommend", {"population": "trap:call"}),
    ("recommend", {"train": {"function": "trap:call"}}),
    ("prune", {"model": "trap:call"}),
    ("invert", {"model": "trap:call"}),
    ("invert", {"attack": "ggl:generator=trap:call"}),
    ("invert", {"attack": [{"name": "ggl", "generator": "trap:call"}]}),
    ("federate", {"data": "trap:call"}),
    ("federate", {"attack": "ggl:generator=trap:call"}),
    ("sweep", {"job": "audit", "grid": {"model": ["mlp", "trap:call"]}}),
    ("sweep", {"job": "audit", "cases": [{"train": {"function": "trap:call"}}]}),
    ("sweep", {"jobs": {"a": {"job": "invert", "data": "trap:call"}}}),
    ("sweep", {"job": "reproduce", "study": "dgp-table1", "set": {"attacks": "ggl:generator=trap:call"}}),
]


@pytest.mark.parametrize(("command", "fields"), FILES, ids=lambda value: str(value)[-40:])
def test_code_of_a_run_file_is_refused_and_not_called(trap, command, fields, capsys):
    assert main([command, run_file(**fields), "--out", "out"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "add --trust" in said and ("trap" in said or "http" in said)
    assert not trap.exists() and not Path("out").exists()


@pytest.mark.parametrize(
    ("command", "fields"), [x for x in FILES if x[0] != "prune"], ids=lambda value: str(value)[-40:]
)
@pytest.mark.parametrize("trust", [[], ["--trust"]])
def test_a_dry_run_never_calls_it(trap, command, fields, trust, capsys):
    assert main([command, run_file(**fields), "--dry-run", *trust]) == 0, capsys.readouterr().err
    assert not trap.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--trust"], ["--data", "trap:call"], ["--set", "data=trap:call"]],
    ids=" ".join,
)
def test_trusted_code_and_code_of_the_command_line_is_called(trap, arguments, capsys):
    assert main(["audit", run_file(**TINY, data="trap:call"), *arguments, "--out", "out"]) == 2
    assert "trap:call failed with ValueError: called" in capsys.readouterr().err
    assert trap.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--set", "data=my_trap:call"], ["--set", "label=trap:call "], ["--attack", "conf,lira"]],
    ids=" ".join,
)
def test_another_value_on_the_command_line_trusts_nothing(trap, arguments, capsys):
    folder = Path("trap:call")
    folder.mkdir()
    file = Path(run_file(**TINY | {"data": "trap:call", "train": "trap:call"})).rename(folder / "run.yaml")
    assert main(["audit", str(file), *arguments, "--out", "out"]) == 2
    assert "add --trust" in capsys.readouterr().err
    assert not trap.exists()


def test_the_configuration_of_a_run_folder_is_a_run_file(trap, capsys):
    with open_run("run", "audit", TINY | {"data": "trap:call"}):
        pass
    assert main(["audit", "run/config.yaml", "--out", "run"]) == 2
    assert "add --trust" in capsys.readouterr().err
    assert main(["report", "run"]) == 2  # there are no rows yet
    assert not trap.exists()


def test_names_of_the_catalogue_files_and_other_colons_are_no_code():
    plain = {"model": "timm:resnet18", "data": "folder/2026:01/a.npz", "attack": "samia:epochs=3"}
    assert list_code(read(Audit, None, plain)) == {}
    assert list_code(read(Audit, None, {"model": "hf:folder", "pruner": "none", "device": "cuda:0"})) == {}
    assert list_code(read(Invert, None, {"attack": "ig:tv=0.1:restarts=2", "defense": "dgp:k1=.05"})) == {}
    assert list_code(read(Federate, None, {})) == list_code(read(Reproduce, None, {"study": "dgp-table1"})) == {}


def test_every_field_that_reaches_users_own_is_listed():
    """A new way to name code must be listed, or a run file could use it unasked."""
    source = Path(secateur.__file__).parent
    calls = {
        match
        for file in source.rglob("*.py")
        for match in re.findall(r'(?:users_own|source_key)\("(\w+)", ', file.read_text())
    }
    assert calls == {"train", "model", "transform", "data", "generator"}
