"""Models of an audit: those that are refused, those whose outputs are probabilities, and those that are exported."""

import pytest
import torch
from torch import nn

import secateur
from secateur.cli import main
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.inference import predict, to_probabilities
from secateur.models.create import check_untrained
from secateur.runs.folder import load_rows
from secateur.tree import state_of

QUICK = ["--shadows", "1", "--attack", "conf", "--pruner", "l1-unstructured", "--set", "train.epochs=2"]
MODULE = """
import torch
from torch import nn

def fresh():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def trained():
    net = fresh()
    torch.nn.init.constant_(net[1].weight, .01)
    return net
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    (tmp_path / "own_models_of_audit.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_models_of_audit"


def test_a_function_that_returns_trained_weights_is_refused_without_weights(own_models, tmp_path, capsys):
    check_untrained(f"{own_models}:fresh", (1, 8, 8), 10)
    with pytest.raises(WrongInput, match="equal weights for two seeds"):
        check_untrained(f"{own_models}:trained", (1, 8, 8), 10)
    assert main(["audit", "--model", f"{own_models}:trained", *QUICK, "--out", str(tmp_path / "run")]) == 2
    assert "pass trained ones by --weights" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_probabilities_are_not_softmaxed_again():
    logits = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(to_probabilities(logits.softmax(1)), logits.softmax(1))
    assert torch.equal(to_probabilities(logits), logits.softmax(1))


def test_a_model_that_returns_probabilities_leaks_as_its_logits_do():
    rng = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 3))
    inputs, labels = torch.randn(200, 6, generator=rng) * 9, torch.randint(3, (200,), generator=rng)
    sides = (inputs[:100], labels[:100]), (inputs[100:], labels[100:])
    plain, soft = (
        secateur.audit(model, *sides, attacks=["conf", "entropy"]) for model in (net, nn.Sequential(net, nn.Softmax(1)))
    )
    for name in ("conf", "entropy"):
        assert plain.value("auc", name) == pytest.approx(soft.value("auc", name), abs=1e-3)


def test_the_exported_models_are_those_that_were_audited(tmp_path):
    flags = ["--out", str(tmp_path / "run"), "--export", str(tmp_path / "models"), "--set", "finetune.epochs=1"]
    assert main(["audit", *QUICK, *flags]) == 0
    files = sorted(path.name for path in (tmp_path / "models").iterdir())
    assert files == ["l1-unstructured-0.7-with-basic-seed-0.safetensors", "the-original-seed-0.safetensors"]
    net = secateur.load_pruned(tmp_path / "models" / files[0])
    share = sum(int((value == 0).sum()) for value in net.parameters() if value.ndim > 1)
    assert share >= 0.69 * sum(value.numel() for value in net.parameters() if value.ndim > 1)
    data = load("digits")
    assert bool(predict(net, state_of(net), data.inputs[:5]).isfinite().all())
    assert {row.pruner for row in load_rows(tmp_path / "run")} == {"none", "l1-unstructured"}


def test_select_without_shadows_is_one_sentence(own_models, tmp_path, capsys):
    from own_models_of_audit import trained
    from safetensors.torch import save_file

    save_file(trained().state_dict(), tmp_path / "w.safetensors")
    given = ["--model", f"{own_models}:fresh", "--weights", str(tmp_path / "w.safetensors"), "--protocol", "select"]
    assert main(["audit", *given, "--out", str(tmp_path / "run")]) == 2
    assert "select needs shadow models" in capsys.readouterr().err
