"""The examples of a text and of a table, in a quick form."""

from pathlib import Path

import pytest
import torch

from secateur.cli import main
from secateur.data.load import load
from secateur.runs.folder import load_rows

EXAMPLES = Path(__file__).parents[2] / "examples"
QUICK = ["--shadows", "2", "--set", "train.epochs=4", "--set", "finetune.epochs=1", "--set", "examples=400"]


@pytest.fixture
def text(monkeypatch):
    """Go to the folder of the text, whose module is found there."""
    monkeypatch.chdir(EXAMPLES / "text")


@pytest.mark.usefixtures("text")
def test_sentences_are_tokens_of_seven_packages():
    data = load("sentences:data")
    assert data.inputs.dtype == torch.int64 and data.input_shape == (24,) and data.classes == 7
    assert len(data.inputs) > 1000 and int(data.inputs.max()) < 2000 and int(data.labels.bincount().min()) > 50


@pytest.mark.parametrize("name", ["text", "table"])
def test_the_example_runs_from_training_to_the_page(name, tmp_path, monkeypatch):
    monkeypatch.chdir(EXAMPLES / name)
    flags = [*QUICK, "--attack", "conf,lira", "--out", str(tmp_path / "run")]
    assert main(["audit", "audit.yaml", "--trust", *flags]) == 0
    rows = load_rows(tmp_path / "run")
    assert {row.pruner for row in rows} == {"none", "l1-unstructured"}
    aucs = [row.value for row in rows if row.metric == "auc"]
    assert len(aucs) == 4 and all(0.3 < value < 1 for value in aucs)
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.usefixtures("text")
def test_attacks_that_move_inputs_are_refused_for_tokens_and_left_out_by_default(tmp_path, capsys):
    flags = ["--dry-run", "--out", str(tmp_path / "run")]
    given = ["--model", "sentences:net", "--data", "sentences:data"]  # a dry run calls what is typed here, not a file's
    assert main(["audit", "audit.yaml", *given, "--attack", "samia", *flags]) == 2
    assert "attack: samia moves inputs by a little" in capsys.readouterr().err
    assert main(["audit", *given, "--pruner", "none", *flags]) == 0
    said = capsys.readouterr().out
    assert "with conf, lira, rmia" in said and "samia" not in said
