import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from secateur.cli import main
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.experiments.prune import load_pruned
from secateur.runs.folder import load_rows

TINY = ["--set", "train.epochs=3", "--set", "finetune.epochs=2"]


def prune(out, *arguments):
    return main(["prune", *TINY, "--out", str(out), *map(str, arguments)])


def accuracy(net, data):
    rows = slice(data.train_size, None) if data.train_size < len(data.inputs) else slice(None)
    with torch.no_grad():
        return float((net.eval()(data.inputs[rows]).argmax(1) == data.labels[rows]).float().mean())


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    out = tmp_path_factory.mktemp("models") / "model.safetensors"
    assert prune(out, "--pruner", "l1-structured", "--sparsity", ".5") == 0
    return out


def test_the_file_carries_the_recipe_that_made_it(masked):
    with safe_open(str(masked), "pt") as file:
        recipe = json.loads(file.metadata()["secateur"])
    assert recipe["config"]["pruner"] == "l1-structured"
    assert recipe["config"]["sparsity"] == 0.5
    assert recipe["schema"] == 1


def test_pruned_weights_are_exactly_zero_after_a_reload(masked):
    filters = [value for value in load_pruned(masked).state_dict().values() if value.ndim == 4]
    dead = [int((value.flatten(1) == 0).all(1).sum()) for value in filters]
    assert dead == [len(value) // 2 for value in filters]


def test_the_removed_model_is_smaller_and_answers_the_same(masked, tmp_path):
    small = tmp_path / "small.safetensors"
    assert prune(small, "--pruner", "l1-structured", "--sparsity", ".5", "--remove") == 0
    data = load("digits")
    first, second = load_pruned(masked).eval(), load_pruned(small).eval()
    with torch.no_grad():
        torch.testing.assert_close(second(data.inputs[:50]), first(data.inputs[:50]), rtol=1e-4, atol=1e-5)
    assert small.stat().st_size < 0.6 * masked.stat().st_size


def test_a_net_without_convolutions_says_what_was_counted(tmp_path, capsys):
    small = ["--model", "mlp", "--pruner", "l1-unstructured", "--sparsity", ".5"]
    assert prune(tmp_path / "mlp.safetensors", *small, "--json") == 0
    notes = {row["metric"]: row["note"] for row in json.loads(capsys.readouterr().out)}
    assert notes["conv_weights_masked"].startswith("of the linear weights: there is no convolution; mask: drops")
    assert notes["nonzero_parameters"].startswith("mask: drops single weights of layer")
    assert prune(tmp_path / "mlp.safetensors", *small) == 0
    assert capsys.readouterr().out.count("as above") > 3  # not the same sentence eight times


def test_given_weights_are_pruned_and_fine_tuned(masked, tmp_path, capsys):
    again = tmp_path / "again.safetensors"
    flags = ["--weights", masked, "--rows", "all", "--pruner", "l1-unstructured", "--sparsity", ".9"]
    assert prune(again, *flags, "--json") == 0
    rows = {row["metric"]: row["value"] for row in json.loads(capsys.readouterr().out)}
    assert rows["nonzero_parameters"] < 0.2 * rows["parameters_masked"]
    assert accuracy(load_pruned(again), load("digits")) > 0.3


def test_weights_that_do_not_fit_are_said_clearly(masked, tmp_path, capsys):
    assert prune(tmp_path / "x.safetensors", "--model", "mlp", "--weights", masked) == 2
    said = capsys.readouterr().err
    assert "weights" in said and "missing" in said and said.count("\n") == 1


def test_a_model_trained_privately_from_the_start_loads_with_its_own_structure(tmp_path):
    out = tmp_path / "private.safetensors"
    assert prune(out, "--defense", "dp-sgd-scratch", "--set", "train.epochs=1", "--set", "finetune.epochs=1") == 0
    assert any(isinstance(module, torch.nn.GroupNorm) for module in load_pruned(out).modules())


def test_a_file_without_a_recipe_is_not_ours(tmp_path):
    save_file({"w": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(WrongInput, match="no recipe"):
        load_pruned(tmp_path / "plain.safetensors")


TIED = """
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.third.weight = self.second.weight
        self.last = nn.Linear(32, 10)

    def forward(self, x):
        hidden = self.second(self.first(x.flatten(1)).relu()).relu()
        return self.last(self.third(hidden).relu())
"""


@pytest.mark.parametrize("flags", [["--pruner", "l1-unstructured"], ["--pruner", "l1-structured", "--remove"]])
def test_tied_weights_are_written_and_read(tmp_path, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tied_net.py").write_text(TIED)
    out = tmp_path / "tied.safetensors"
    assert prune(out, "--model", "tied_net:Tied", "--sparsity", ".5", "--rows", "all", *flags, "--json") == 0
    net, data = load_pruned(out), load("digits")
    assert accuracy(net, data) > 0.3
    if "--remove" in flags:
        assert net.second.weight.shape == (16, 16) and net.third.weight.shape == (16, 16)
    else:
        assert net.second.weight is net.third.weight and int((net.second.weight == 0).sum()) == 512


@pytest.mark.parametrize("pruner", ["l1-unstructured", "synflow", "l1-structured:mask=conv-only"])
def test_what_cannot_be_removed_is_refused_before_anything_is_trained(pruner, tmp_path, capsys):
    assert prune(tmp_path / "m.safetensors", "--pruner", pruner, "--sparsity", ".5", "--remove") == 2
    said = capsys.readouterr().err
    assert f"remove: {pruner} cannot be removed" in said and said.count("\n") == 1
    assert not list((tmp_path / "m.run").rglob("*.safetensors"))


@pytest.mark.parametrize("pruner", ["slimming", "l2-structured:groups=coupled"])
def test_what_can_be_removed_is_not_refused(pruner, tmp_path):
    assert prune(tmp_path / "m.safetensors", "--pruner", pruner, "--sparsity", ".5", "--remove") == 0


def test_data_too_small_to_test_on_is_one_sentence(tmp_path, capsys):
    for flags, problem in (([], "cannot be split for a victim"), (["--rows", "all"], "of digits are too few")):
        assert prune(tmp_path / "m.safetensors", "--set", "examples=5", *flags) == 2
        said = capsys.readouterr().err
        assert f"data: 5 rows {problem}" in said and said.count("\n") == 1
        assert not (tmp_path / "m.run").exists()
    assert prune(tmp_path / "m.safetensors", "--set", "examples=10", "--model", "mlp", "--rows", "all") == 0


@pytest.fixture(scope="module")
def own_data(tmp_path_factory):
    """Digits as a user's file: the first 300 are the members of a model that was trained elsewhere."""
    data, folder = load("digits"), tmp_path_factory.mktemp("own")
    np.savez(folder / "own.npz", inputs=data.inputs[:600].numpy(), labels=data.labels[:600].numpy(), train_size=300)
    assert prune(folder / "elsewhere.safetensors", "--pruner", "l1-structured", "--set", "examples=600") == 0
    return ["--data", folder / "own.npz", "--weights", folder / "elsewhere.safetensors"]


@pytest.mark.parametrize("case", ["trained", "given", "ppb", "adv", "slimming"])
def test_the_pruned_model_is_bit_for_bit_the_audited_one(case, own_data, tmp_path):
    given = own_data if case == "given" else ["--set", "examples=400"]
    pruner = ["--pruner", "slimming" if case == "slimming" else "l1-unstructured", "--sparsity", ".5"]
    defense = ["--defense", case] if case in ("ppb", "adv") else []
    same = [*map(str, given), *pruner, *defense]
    assert prune(tmp_path / "pruned.safetensors", *same, "--set", "seed=3") == 0
    audit = ["audit", *TINY, *same, "--seeds", "3,", "--attack", "conf", "--shadows", "0", "--out", str(tmp_path / "r")]
    assert main([*audit, "--export", str(tmp_path / "audited")]) == 0
    (audited,) = (tmp_path / "audited").glob(f"{pruner[1]}*.safetensors")
    assert audited.read_bytes() == (tmp_path / "pruned.safetensors").read_bytes()


def test_a_model_of_all_rows_says_that_no_audit_attacks_it(tmp_path, capsys):
    for rows, note in (("audited", False), ("all", True)):
        out = tmp_path / f"{rows}.safetensors"
        assert prune(out, "--rows", rows, "--set", "examples=200", "--model", "mlp") == 0
        assert ("not the one that an audit attacks" in capsys.readouterr().out) is note
    weights = [load_pruned(tmp_path / f"{rows}.safetensors").state_dict() for rows in ("audited", "all")]
    assert not all(map(torch.equal, *(state.values() for state in weights)))


def test_pixels_are_scaled_as_the_given_weights_know_them_in_prune_and_audit(tmp_path, monkeypatch):
    """Weights that were trained on [0, 1] pixels, and data of bytes: nobody says how inputs are scaled."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pixel_net.py").write_text(
        "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), "
        "nn.Linear(32, 10))\n"
    )
    data = load("digits")
    pixels = ((data.inputs[:500] * data.std[0] + data.mean[0]) * 255).round().byte()
    np.savez(tmp_path / "own.npz", inputs=pixels.numpy(), labels=data.labels[:500].numpy(), train_size=250)
    np.savez(tmp_path / "scaled.npz", inputs=pixels.float().numpy() / 255, labels=data.labels[:500].numpy())
    recipe = ["--set", "train.epochs=60", "--set", "train.patience=60", "--set", "finetune.epochs=2"]
    elsewhere = ["--model", "pixel_net:net", "--data", "scaled.npz", "--rows", "all", "--sparsity", "0"]
    assert main(["prune", *elsewhere, *recipe, "--out", str(tmp_path / "ours.safetensors")]) == 0
    save_file(load_pruned(tmp_path / "ours.safetensors").state_dict(), tmp_path / "net.safetensors")  # without recipe
    same = ["--model", "pixel_net:net", "--data", "own.npz", "--weights", "net.safetensors", "--sparsity", ".5"]
    same += ["--pruner", "l1-unstructured", "--set", "finetune.epochs=2"]
    assert main(["prune", *same, "--out", str(tmp_path / "pruned.safetensors")]) == 0
    assert main(["audit", *same, "--attack", "conf", "--out", "run", "--export", str(tmp_path / "audited")]) == 0
    (audited,) = (tmp_path / "audited").glob("l1*.safetensors")
    assert audited.read_bytes() == (tmp_path / "pruned.safetensors").read_bytes()
    again = ["--model", "pixel_net:net", "--data", "own.npz", "--weights", "pruned.safetensors", "--pruner", "none"]
    assert main(["audit", *again, "--attack", "conf", "--out", "again"]) == 0  # the file says its scaling
    value = {out: [r.value for r in load_rows(tmp_path / out) if r.metric == "auc"][-1] for out in ("run", "again")}
    assert value["run"] == pytest.approx(value["again"], abs=1e-6)
