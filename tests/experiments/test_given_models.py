"""A CNN that a user trained elsewhere, audited as its user would: shadows, repeated rows, trained functions."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from secateur.cli import main
from secateur.runs.folder import load_rows

MODULE = """
import torch
from safetensors.torch import load_file
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(),
                         nn.Linear(128, 20))

def trained():
    model = net()
    model.load_state_dict(load_file({!r}))
    return model

def fit(model, inputs, labels, generator):
    optimiser = torch.optim.Adam(model.parameters(), 5e-3)
    for _ in range({}):
        for rows in torch.randperm(len(inputs), generator=generator).split(50):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval()
"""
EPOCHS, MEMBERS, ROWS = 30, 300, 634


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """20 classes in heavy noise, and a CNN with BatchNorm that knows its members by heart."""
    folder, rng = tmp_path_factory.mktemp("given"), torch.Generator().manual_seed(0)
    labels = torch.arange(ROWS) % 20
    inputs = torch.randn(20, 1, 8, 8, generator=rng)[labels] * 0.4 + torch.randn(ROWS, 1, 8, 8, generator=rng)
    np.savez(folder / "own.npz", inputs=inputs.numpy(), labels=labels.numpy(), train_size=MEMBERS)
    repeated = torch.cat([inputs[:MEMBERS], inputs[:200], inputs[MEMBERS : MEMBERS + 200]])
    copies = torch.cat([labels[:MEMBERS], labels[:200], labels[MEMBERS : MEMBERS + 200]])
    np.savez(folder / "repeated.npz", inputs=repeated.numpy(), labels=copies.numpy(), train_size=MEMBERS)
    weights = str(folder / "net.safetensors")
    (folder / "given_cnn.py").write_text(MODULE.format(weights, EPOCHS))
    scope: dict = {}
    exec((folder / "given_cnn.py").read_text(), scope)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: nn.Module = scope["fit"](scope["net"](), inputs[:MEMBERS], labels[:MEMBERS], rng)
    hits = (model(inputs).argmax(1) == labels).float()
    assert hits[:MEMBERS].mean() > 0.95 and hits[MEMBERS:].mean() < 0.7
    save_file(model.state_dict(), weights)
    return folder


@pytest.fixture
def audit(given, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(given))

    def run(*flags, data="own.npz", model="net", weights=True, pruner="none"):
        own = [
            "--model",
            f"given_cnn:{model}",
            "--data",
            given / data,
            "--pruner",
            pruner,
            "--inputs-are",
            "normalised",
        ]
        own += ["--weights", given / "net.safetensors"] if weights else []
        return main(["audit", *map(str, [*own, "--out", tmp_path / "run", *flags])])

    return run


def value(folder, metric, attack):
    (row,) = (row for row in load_rows(folder) if row.metric == metric and row.attack == attack)
    return row.value


def check_of(folder, name):
    (row,) = (row for row in load_rows(folder) if row.extra.get("check") == name)
    return row


def test_in_out_models_by_the_users_function_find_more_than_few_disjoint_shadows(audit, tmp_path):
    train = ["--train", "given_cnn:fit", "--attack", "conf,lira"]
    assert audit(*train, "--shadows", 4) == 0
    disjoint, few = value(tmp_path / "run", "auc", "lira"), check_of(tmp_path / "run", "shadows")
    assert "4 shadow models, each trained on 67 rows" in few.note  # 45 % of 45 % of the outsiders
    assert few.value == 0 and "do not resemble the victim" in few.note
    assert audit(*train) == 0
    online, many = value(tmp_path / "run", "auc", "lira"), check_of(tmp_path / "run", "shadows")
    assert "8 shadow models, each trained on" in many.note and many.value == 1
    assert online > disjoint + 0.03 and online > value(tmp_path / "run", "auc", "conf") - 0.02


def test_members_repeated_among_the_non_members_are_no_proof_of_safety(audit, tmp_path, capsys):
    limits = ["--set", "limits.auc=.8", "--set", "limits.attacker=no-shadows", "--attack", "conf"]
    assert audit(*limits, data="repeated.npz") == 3
    check = check_of(tmp_path / "run", "duplicates")
    assert check.value == 0 and "non-members are members too; leave them out" in check.note
    assert "inconclusive" in capsys.readouterr().err
    assert "non-members are members too" in (tmp_path / "run" / "report.html").read_text()


def test_members_and_others_that_are_swapped_pass_no_limit(audit, given, tmp_path, capsys):
    arrays = dict(np.load(given / "own.npz"))
    swapped = {name: np.roll(arrays[name], -MEMBERS, 0) for name in ("inputs", "labels")}
    np.savez(tmp_path / "swapped.npz", **swapped, train_size=ROWS - MEMBERS)
    limits = ["--set", "limits.auc=.8", "--set", "limits.attacker=no-shadows", "--attack", "conf"]
    assert audit(*limits, data=tmp_path / "swapped.npz") == 3
    assert check_of(tmp_path / "run", "swapped").value == 0
    assert "members and others look swapped" in capsys.readouterr().err


def test_an_attack_that_needs_shadows_is_refused_without_a_recipe(audit, capsys):
    assert audit("--attack", "lira") == 2
    assert "attack: lira needs shadow models; give a `train:` recipe" in capsys.readouterr().err


def test_trained_weights_are_refused_without_weights_and_where_shadows_would_begin_at_them(audit, capsys):
    for weights, flags in ((False, ["--set", "train.epochs=2"]), (True, ["--set", "train.epochs=2"])):
        assert audit(*flags, model="trained", weights=weights) == 2
        assert "equal weights for two seeds" in capsys.readouterr().err
    assert audit("--attack", "conf", model="trained") == 0  # without a recipe nothing is trained


def test_attacks_that_rank_run_without_a_recipe(audit, tmp_path, capsys):
    assert audit("--attack", "conf") == 0
    assert value(tmp_path / "run", "auc", "conf") > 0.7
    assert "No attack was run" not in capsys.readouterr().out


def test_the_file_of_prune_leaks_as_the_audited_model_does(given, audit, tmp_path):
    same = ["--set", "finetune.epochs=3", "--sparsity", ".5"]
    assert audit(*same, "--attack", "conf", pruner="l1-unstructured") == 0
    audited = {row.sparsity: row.value for row in load_rows(tmp_path / "run") if row.metric == "auc"}
    own = ["--model", "given_cnn:net", "--data", str(given / "own.npz"), "--pruner", "l1-unstructured"]
    own += ["--inputs-are", "normalised"]
    weights = ["--weights", str(given / "net.safetensors"), "--out", str(tmp_path / "pruned.safetensors")]
    assert main(["prune", *own, *weights, *same]) == 0
    again = ["--model", "given_cnn:net", "--data", str(given / "own.npz"), "--pruner", "none", "--attack", "conf"]
    again += ["--weights", str(tmp_path / "pruned.safetensors"), "--inputs-are", "normalised"]
    assert main(["audit", *again, "--out", str(tmp_path / "again")]) == 0
    assert value(tmp_path / "again", "auc", "conf") == audited[0.5] != audited[0.0]
