"""Compressed models end to end: depthwise networks, and what cannot be compressed."""

import csv
import sys

import numpy as np
import pytest
import torch

import secateur
from secateur.cli import main
from secateur.config import Audit, read
from secateur.evaluation.setup import prepare
from secateur.pruning import quantisation
from secateur.runs.folder import load_rows

TINY = ["--set", "train.epochs=1", "--set", "finetune.epochs=1", "--set", "train.patience=null"]
FEW = ["--set", "examples=300"]


def values(folder, metric, **fields):
    rows = [row for row in load_rows(folder) if row.metric == metric]
    return [row.value for row in rows if all(getattr(row, name) == value for name, value in fields.items())]


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's own networks."""
    lines = [
        "from torch import nn",
        "def grouped(input_shape, classes):",
        "    convs = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=2), nn.ReLU()]",
        "    return nn.Sequential(*convs, nn.Flatten(), nn.Linear(64, classes))",
        "class Attention(nn.Module):",
        "    def __init__(self, classes):",
        "        super().__init__()",
        "        self.embed, self.head = nn.Linear(8, 16), nn.Linear(16, classes)",
        "        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)",
        "    def forward(self, x):",
        "        x = self.embed(x.flatten(1, 2))",
        "        return self.head(self.attend(x, x, x)[0].mean(1))",
        "def attention(input_shape, classes):",
        "    return Attention(classes)",
    ]
    (tmp_path / "users_nets.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_nets"
    sys.modules.pop("users_nets", None)


@pytest.mark.system
def test_a_mobilenet_is_pruned_and_audited_and_its_removal_is_counted(tmp_path):
    flags = [
        "--model",
        "mobilenet-v2-small",
        "--pruner",
        "l1-structured,slimming,l1-structured+int8",
        "--sparsity",
        ".5",
    ]
    assert main(["audit", *flags, "--attack", "conf", "--shadows", "0", *TINY, *FEW, "--out", str(tmp_path)]) == 0
    for pruner in ("l1-structured", "slimming"):
        assert values(tmp_path, "auc", pruner=pruner)
        (masked,), (removed,) = (values(tmp_path, f"parameters_{x}", pruner=pruner) for x in ("masked", "removed"))
        assert removed < masked
    (small,) = values(tmp_path, "bytes_compressed", pruner="l1-structured+int8")
    assert small < values(tmp_path, "bytes_removed", pruner="l1-structured")[0] / 2
    (flops, fewer) = (values(tmp_path, f"flops_{x}", pruner="l1-structured")[0] for x in ("masked", "removed"))
    assert fewer < 0.6 * flops


def test_a_mobilenet_without_its_dead_channels_is_loaded_again(tmp_path):
    file = tmp_path / "m.safetensors"
    flags = ["--model", "mobilenet-v2-small", "--pruner", "l1-structured:groups=coupled", "--sparsity", ".5"]
    assert main(["prune", *flags, "--remove", *TINY, *FEW, "--out", str(file)]) == 0
    net = secateur.load_pruned(file)
    assert not net.training
    depthwise = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d) and m.groups > 1]
    assert len(depthwise) == 7 and all(m.groups == m.in_channels == m.weight.shape[0] for m in depthwise)
    assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_a_grouped_convolution_is_refused_by_a_dry_run_with_the_backend_that_can(own, tmp_path, capsys):
    flags = ["--model", f"{own}:grouped", "--pruner", "l1-unstructured,l1-structured"]
    assert main(["audit", *flags, "--dry-run", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "model: Conv2d (2) is a grouped convolution; prune with torch-pruning" in said and said.count("\n") == 1


def test_removal_never_advises_the_mask_that_it_refuses(own, tmp_path, capsys):
    flags = ["--model", f"{own}:grouped", "--pruner", "l1-structured:mask=conv-only", "--remove", *FEW]
    assert main(["prune", *flags, "--out", str(tmp_path / "m.safetensors")]) == 2
    said = capsys.readouterr().err
    assert "so no channel can be removed; leave it masked, or prune with torch-pruning" in said
    assert "mask conv-only" not in said and said.count("\n") == 1


@pytest.fixture(scope="module")
def compressed(tmp_path_factory):
    """One audit of digits: quantised, pruned and quantised, pruned, distilled, and pruned by Torch-Pruning."""
    folder = tmp_path_factory.mktemp("compressed")
    pruners = "int8,int8:mode=dynamic,l1-structured+int8,l1-unstructured,torch-pruning,distil:student=mlp"
    flags = ["--pruner", pruners, "--sparsity", ".3,.5", "--attack", "conf", "--shadows", "0", *TINY, *FEW]
    assert main(["audit", *flags, "--out", str(folder / "run"), "--export", str(folder / "models")]) == 0
    return folder


def test_a_compressor_without_a_sparsity_is_audited_once(compressed):
    rows = load_rows(compressed / "run")
    sparsities = {name: {row.sparsity for row in rows if row.pruner == name} for name in {row.pruner for row in rows}}
    assert sparsities["int8"] == sparsities["int8:mode=dynamic"] == sparsities["distil:student=mlp"] == {0.0}
    assert (
        sparsities["l1-structured+int8"] == sparsities["torch-pruning"] == sparsities["l1-unstructured"] == {0.3, 0.5}
    )


def test_every_compressed_model_has_its_size_and_its_latency(compressed):
    run = compressed / "run"
    whole = values(run, "bytes_masked", pruner="none")[0]
    (small,) = values(run, "bytes_compressed", pruner="int8")
    (smaller,) = values(run, "bytes_compressed", pruner="l1-structured+int8", sparsity=0.5)
    (halved,) = values(run, "bytes_compressed", pruner="torch-pruning", sparsity=0.5)
    assert smaller < small < whole / 3 and halved < whole / 2
    for pruner in ("int8", "int8:mode=dynamic", "distil:student=mlp"):
        rows = [row for row in load_rows(run) if row.metric == "seconds_compressed" and row.pruner == pruner]
        assert all(row.timing and row.value > 0 for row in rows) and rows


def test_the_auc_of_a_quantised_model_is_that_of_its_own_answers(compressed):
    """The exported model is asked by plain PyTorch; the oracle is scikit-learn's AUC of its confidences."""
    import torchao.quantization.pt2e.quantize_pt2e  # noqa: F401  (the operators of the saved program)
    from sklearn.metrics import roc_auc_score

    net = torch.export.load(compressed / "models" / "int8-with-basic-seed-0.pt2").module()
    data, _ = prepare(read(Audit, compressed / "run" / "config.yaml", {}))
    lines = list(csv.DictReader((compressed / "run" / "records.csv").open()))
    rows = [line for line in lines if line["model"].startswith("int8 with")]
    ids = torch.tensor([int(line["id"]) for line in rows])
    with torch.no_grad():
        confidence = net(data.inputs[ids]).softmax(1).gather(1, data.labels[ids][:, None]).squeeze(1)
    auc = roc_auc_score([line["member"] == "1" for line in rows], confidence)
    assert values(compressed / "run", "auc", pruner="int8")[0] == pytest.approx(auc, abs=1e-6)


def test_exported_smaller_networks_are_loaded_again(compressed):
    for name, layers in (("torch-pruning-0.5-with-basic", 8), ("distil-student-mlp-with-basic", None)):
        net = secateur.load_pruned(compressed / "models" / f"{name}-seed-0.safetensors")
        assert net(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
        assert layers is None or net[0].out_channels == layers


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--pruner", "int8+l1-structured"], "pruner: int8 and l1-structured cannot be joined; join one pruner"),
        (["--pruner", "snip+slimming"], "pruner: snip and slimming cannot be joined"),
        (["--pruner", "int8:mode=half"], "pruner.int8.mode: "),
        (["--pruner", "int8", "--defense", "ppb"], "defense: ppb acts on fine-tuning, which int8 does not have"),
        (["--pruner", "distil:student=mlp", "--defense", "dp-sgd"], "defense: dp-sgd replaces the training of the"),
        (["--pruner", "distil"], "pruner: distil needs a student; write distil:student=NAME"),
        (["--pruner", "int8", "--protocol", "unknown-sparsity"], "pruner: int8 has no sparsity to guess"),
    ],
)
def test_what_cannot_be_compressed_so_is_one_sentence(flags, sentence, tmp_path, capsys):
    assert main(["audit", *flags, "--dry-run", "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def test_a_quantised_model_is_written_as_a_program_and_is_exported_once(tmp_path, capsys, monkeypatch):
    flags = ["prune", "--pruner", "l1-structured+int8", "--sparsity", ".5", *TINY, *FEW]
    assert main([*flags, "--out", str(tmp_path / "m.safetensors")]) == 2
    assert "is written to a file that ends in .pt2" in capsys.readouterr().err
    assert main([*flags, "--remove", "--out", str(tmp_path / "m.pt2")]) == 2
    assert "removes by itself what it can" in capsys.readouterr().err
    convert, calls = quantisation._round_statically, []
    monkeypatch.setattr(quantisation, "_round_statically", lambda *given: calls.append(given) or convert(*given))
    assert main([*flags, "--out", str(tmp_path / "m.pt2")]) == 0 and len(calls) == 1
    assert torch.export.load(tmp_path / "m.pt2").module()(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_grouped_convolutions_and_attention_are_pruned_by_the_backend(own, tmp_path):
    flags = ["--pruner", "torch-pruning", "--sparsity", ".5", "--attack", "conf", "--shadows", "1", *TINY, *FEW]
    for model in ("grouped", "attention"):
        assert main(["audit", "--model", f"{own}:{model}", *flags, "--out", str(tmp_path / model)]) == 0
        (small,) = values(tmp_path / model, "parameters_compressed")
        assert small < 0.7 * values(tmp_path / model, "parameters_masked", pruner="none")[0]


def test_a_quantised_file_is_audited_as_it_is(compressed, tmp_path):
    data = prepare(read(Audit, compressed / "run" / "config.yaml", {}))[0]
    file = tmp_path / "own.npz"
    np.savez(file, inputs=data.inputs.numpy(), labels=data.labels.numpy(), train_size=150)
    model = str(compressed / "models" / "int8-with-basic-seed-0.pt2")
    flags = ["--model", model, "--data", str(file), "--set", "inputs_are=normalised", "--attack", "conf"]
    assert main(["audit", *flags, "--out", str(tmp_path / "run")]) == 0
    assert len(values(tmp_path / "run", "auc")) == 1
