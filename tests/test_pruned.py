import json

import pytest
import torch
from safetensors import safe_open

from secateur.cli import main
from secateur.data.load import load
from secateur.errors import WrongInput
from secateur.pruned import load_pruned

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


def test_given_weights_are_pruned_and_fine_tuned(masked, tmp_path, capsys):
    again = tmp_path / "again.safetensors"
    assert prune(again, "--weights", masked, "--pruner", "l1-unstructured", "--sparsity", ".9", "--json") == 0
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
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(1)}, tmp_path / "plain.safetensors")
    with pytest.raises(WrongInput, match="no recipe"):
        load_pruned(tmp_path / "plain.safetensors")
