"""What a stranger meets first: init, the description of one method, completion, public names, results in a notebook."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import secateur
from secateur.cli import STRONGER, main
from secateur.data.load import load
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

QUICK = ["--set", "train.epochs=2", "--set", "finetune.epochs=1", "--set", "train.patience=null"]


@pytest.fixture(scope="module")
def brought(tmp_path_factory):
    """A pruned model that was trained elsewhere, and its data."""
    folder = tmp_path_factory.mktemp("brought")
    data = load("digits")
    np.savez(folder / "own.npz", inputs=data.inputs[:600].numpy(), labels=data.labels[:600].numpy(), train_size=300)
    flags = ["--pruner", "l1-structured:groups=coupled", "--sparsity", ".5", "--set", "train.epochs=20"]
    assert main(["prune", *flags, "--data", str(folder / "own.npz"), "--out", str(folder / "net.safetensors")]) == 0
    tensors = secateur.load_pruned(folder / "net.safetensors").state_dict()
    torch.save(tensors, folder / "net.pt")  # without the recipe of `secateur prune`
    return folder


def test_init_describes_a_trained_model_and_writes_a_file_that_runs(brought, tmp_path, capsys):
    file = tmp_path / "audit.yaml"
    flags = ["--model", "digits-cnn", "--weights", str(brought / "net.pt"), "--data", str(brought / "own.npz")]
    assert main(["init", *flags, "--out", str(file)]) == 0
    said = capsys.readouterr().out
    assert "300 rows in its train part and 300 others, inputs of the shape (1, 8, 8) and 10 classes" in said
    assert "An audit keeps a tenth of the others" in said
    assert "It is pruned already: " in said and "whole filters" in said and "One batch was tried: " in said
    assert f"run it: secateur audit {file}" in said
    fields = yaml.safe_load(file.read_text())
    assert fields == {"model": "digits-cnn", "weights": flags[3], "data": flags[5], "pruner": "none"}
    assert "# train: {epochs: 100" in file.read_text() and "# Scaling: " in file.read_text()
    assert main(["audit", str(file), "--out", str(tmp_path / "run")]) == 0
    assert STRONGER in capsys.readouterr().out
    assert main(["init", *flags, "--out", str(file)]) == 2  # never over a file that is there
    assert f"out: {file} is there already" in capsys.readouterr().err


def test_init_of_a_network_that_is_to_be_trained(tmp_path, capsys):
    file = tmp_path / "audit.yaml"
    assert main(["init", "--model", "digits-cnn", "--data", "digits", "--out", str(file)]) == 0
    assert "The network has 25,978 parameters." in capsys.readouterr().out
    assert yaml.safe_load(file.read_text())["pruner"] == "l1-unstructured,l1-structured"
    assert main(["audit", str(file), "--dry-run", "--out", str(tmp_path / "run")]) == 0


def test_init_asks_in_a_terminal_only(tmp_path, capsys, monkeypatch):
    assert main(["init", "--out", str(tmp_path / "a.yaml")]) == 2
    assert "model: is missing; use --model, or run init in a terminal" in capsys.readouterr().err
    answers = iter(["digits-cnn", "", "digits"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert main(["init", "--out", str(tmp_path / "a.yaml")]) == 0
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["data"] == "digits"


def test_init_asks_again_for_an_answer_that_cannot_be_right(tmp_path, capsys, monkeypatch):
    answers = iter(["digits-cn", "", "digits", "digits-cnn"])
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.prompt", lambda *_, **__: next(answers))
    assert main(["init", "--out", str(tmp_path / "a.yaml")]) == 0
    assert "secateur: model: 'digits-cn' is not known" in capsys.readouterr().err
    assert yaml.safe_load((tmp_path / "a.yaml").read_text())["model"] == "digits-cnn"


def test_a_method_is_described_by_its_name(capsys):
    assert main(["list", "lira"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Threat model: the attacker sees the model's probabilities" in said
    assert "Not covered: a low score says nothing of stronger attackers" in said
    assert "Cost: at least 2 shadow or 4 in-out models" in said and "queries 1 2: the mirrored image" in said
    assert main(["list", "dgp", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["kind"] == "defense" and row["defaults"]["k1"] == 0.05 and "largest entries" in row["meanings"]["k1"]
    assert row["gap"].startswith("answers of the trained model")
    assert main(["list", "int8"]) == 0
    assert "seconds; needs the extra compress." in " ".join(capsys.readouterr().out.split())
    assert main(["list", "nothing-like-it"]) == 2
    assert "kind: 'nothing-like-it' is not known; " in capsys.readouterr().err


def test_the_public_names_are_shown():
    assert {"audit", "invert", "federate", "load_pruned", "wrap", "Report"} <= set(dir(secateur))
    assert not {"Any", "TYPE_CHECKING"} & set(dir(secateur))


def test_names_of_methods_are_completed_in_a_shell():
    code = "import sys; sys.argv[0] = 'secateur'; from secateur.cli import entry; entry()"
    words = {"COMP_WORDS": "secateur audit --pruner l1-structured+in", "COMP_CWORD": "3"}
    asked = os.environ | words | {"_SECATEUR_COMPLETE": "complete_bash"}
    done = subprocess.run([sys.executable, "-c", code], env=asked, capture_output=True, text=True)
    assert done.stdout.split() == ["l1-structured+int8"], done.stderr
    shown = subprocess.run(
        [sys.executable, "-c", code, "--show-completion", "bash"], env=os.environ, capture_output=True, text=True
    )
    assert "_SECATEUR_COMPLETE=complete_bash" in shown.stdout


def test_results_in_a_notebook(rng):
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    inputs, labels = torch.randn(80, 6, generator=rng), torch.randint(3, (80,), generator=rng)
    report = secateur.audit(
        net, (inputs[:40], labels[:40]), (inputs[40:], labels[40:]), attacks=["conf"], name="<mine>"
    )
    frame = report.to_pandas()
    (auc,) = frame[(frame.metric == "auc") & (frame.attack == "conf")].value
    assert auc == report.value("auc", "conf")
    page = report._repr_html_()
    assert page.startswith("<table>") and "&lt;mine&gt;" in page and "<mine>" not in page and f"{auc:.4g}" in page
    assert report.provenance["torch"] == torch.__version__ and "secateur" in report.provenance


def test_the_run_file_of_a_run_has_the_training_that_was_used_and_repeats_the_run(tmp_path):
    flags = ["--pruner", "l1-unstructured", "--attack", "conf", "--shadows", "1", "--set", "examples=300"]
    assert main(["audit", *flags, *QUICK, "--out", str(tmp_path / "first")]) == 0
    fields = yaml.safe_load((tmp_path / "first" / "config.yaml").read_text())
    assert (fields["train"]["epochs"], fields["finetune"]["epochs"]) == (2, 1)
    assert fields["train"]["batch_size"] == 128 and fields["finetune"]["weight_decay"] == 5e-4
    assert main(["audit", str(tmp_path / "first" / "config.yaml"), "--out", str(tmp_path / "second")]) == 0
    first, second = (select_comparable(load_rows(tmp_path / name)) for name in ("first", "second"))
    assert first == second


def test_weights_without_a_recipe_stay_without_one(brought, tmp_path):
    flags = ["--model", "digits-cnn", "--weights", str(brought / "net.pt"), "--data", str(brought / "own.npz")]
    assert main(["audit", *flags, "--pruner", "none", "--attack", "conf", "--out", str(tmp_path / "run")]) == 0
    assert "train" not in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
