"""Compressed models end to end: depthwise networks, and what cannot be compressed."""

import sys

import pytest
import torch

import secateur
from secateur.cli import main
from secateur.runs.folder import load_rows

TINY = ["--set", "train.epochs=3", "--set", "finetune.epochs=1", "--set", "train.patience=null"]
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
    ]
    (tmp_path / "users_nets.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    yield "users_nets"
    sys.modules.pop("users_nets", None)


def test_a_mobilenet_is_pruned_and_audited_and_its_removal_is_counted(tmp_path):
    flags = ["--model", "mobilenet-v2-small", "--pruner", "l1-structured,slimming", "--sparsity", ".5"]
    assert main(["audit", *flags, "--attack", "conf", "--shadows", "1", *TINY, *FEW, "--out", str(tmp_path)]) == 0
    for pruner in ("l1-structured", "slimming"):
        assert values(tmp_path, "auc", pruner=pruner)
        (masked,), (removed,) = (values(tmp_path, f"parameters_{x}", pruner=pruner) for x in ("masked", "removed"))
        assert removed < masked
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
