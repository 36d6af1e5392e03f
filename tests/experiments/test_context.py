"""What a job needs and does not have is said before any of it is done."""

import numpy as np
import pytest
import torch
from torch import nn

import secateur
from secateur.cli import main
from secateur.config import Audit, choice, read
from secateur.errors import install_command
from secateur.experiments import audit, prune
from secateur.experiments.context import check_audit, shortage
from secateur.interfaces import Batch


@pytest.fixture
def idle(monkeypatch):
    """Whoever begins to work fails."""

    def begun(*_):
        raise AssertionError("work has begun")

    for module in (audit, prune):
        monkeypatch.setattr(module, "prepare", begun)


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--attack", "conf,lira", "--shadows", "1"], "lira needs at least 2 shadow models; 1 given"),
        (["--attack", "rmia", "--shadows", "1"], "rmia needs at least 2 shadow models; 1 given"),
        (["--attack", "lira:variance=per-example", "--shadows", "2"], "lira needs at least 3 shadow models; 2 given"),
        (["--attack", "lira", "--in-out", "2"], "lira needs at least 4 in-out models; 2 given"),
        (["--attack", "rmia:mode=online"], "rmia in mode online needs at least 4 in-out models; 0 given"),
        (
            ["--attack", "lira", "--shadows", "2", "--protocol", "select"],
            "the adversary keeps one shadow to try its recipes on: lira needs at least 2 shadow models; 1 given",
        ),
    ],
)
def test_too_few_shadows_are_refused_before_any_work(flags, sentence, dry, idle, tmp_path, capsys):
    assert main(["audit", *flags, *dry, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"secateur: shadows: {sentence}\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["audit", "--pruner", "none"],
        ["audit", "--pruner", "none", "--dry-run"],
        ["audit", "--sparsity", "0"],
        ["prune", "--sparsity", "0", "--out", "model.safetensors"],
    ],
)
def test_a_defense_that_no_model_gets_is_refused(command, idle, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--defense", "ppb"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("secateur: defense: ppb acts on a fine-tuning, and no pruned model") and said.count("\n") == 1
    )


def test_a_defense_of_training_is_applied_where_nothing_is_pruned_but_not_to_given_weights(tmp_path):
    check_audit(Audit(pruner="none", defense="dp-sgd-scratch,none"))
    check_audit(Audit(sparsity="0,.5", defense="basic,ppb"))
    with pytest.raises(secateur.WrongInput, match="which the given weights have behind them"):
        check_audit(Audit(pruner="none", defense="dp-sgd-scratch", weights=str(tmp_path / "w.safetensors")))


@pytest.mark.parametrize(
    ("package", "extra", "flags"),
    [
        ("opacus", "dp", ["--defense", "dp-sgd"]),
        ("opacus", "dp", ["--defense", "dp-sgd-scratch"]),
        ("ray", "ray", ["--set", "execution=ray"]),
    ],
)
@pytest.mark.parametrize("command", [["audit"], ["audit", "--dry-run"], ["prune"]])
def test_a_missing_package_is_refused_before_any_work(package, extra, flags, command, hide, idle, tmp_path, capsys):
    hide(package)
    assert main([*command, *flags, "--out", str(tmp_path / "m.safetensors")]) == 2
    said = capsys.readouterr()
    wanted = f"secateur: {package}: is not installed; install it with: {install_command(extra)}\n"
    assert (said.out, said.err) == ("", wanted)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("package", ["flwr", "ray"])
@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("kind", [[], ["--submodels", "mapp-fl"]])
def test_a_federation_over_flower_without_it_is_refused_before_any_work(package, dry, kind, hide, tmp_path, capsys):
    if package != "flwr":
        pytest.importorskip("flwr", reason="left out: Flower is not installed")
    hide(package)
    assert main(["federate", "--engine", "flower", *kind, *dry, "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr()
    wanted = f"secateur: {package}: is not installed; install it with: {install_command('flower')}\n"
    assert (said.out, said.err) == ("", wanted) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("dry", [[], ["--dry-run"]])
@pytest.mark.parametrize("command", ["audit", "federate", "invert"])
@pytest.mark.parametrize(
    ("field", "file", "sentence"),
    [
        ("weights", "none.safetensors", "none.safetensors cannot be read as a .safetensors file: No such file"),
        ("weights", "bad.safetensors", "bad.safetensors cannot be read as a .safetensors file: Error"),
        ("data", "none.npz", "none.npz does not exist"),
        ("data", "bad.npz", "bad.npz is truncated, damaged or unreadable"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_a_dry_run_too(
    field, file, sentence, command, dry, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("bad.safetensors", "bad.npz"):
        (tmp_path / name).write_text("no such thing")
    assert main([command, f"--{field}", file, *dry]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"secateur: {field}: {sentence}")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_refuses_data_that_is_too_small_to_be_split(tmp_path, capsys):
    np.savez(tmp_path / "few.npz", inputs=np.zeros((4, 1, 8, 8), np.float32), labels=np.arange(4) % 2)
    assert main(["audit", "--data", str(tmp_path / "few.npz"), "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("secateur: data: 4 rows cannot be split")


NAMES = ("correctness", "conf", "nn", "rmia", "lira:variance=per-example")


def test_every_attack_says_whether_so_many_models_are_enough():
    enough = {name: [models for models in range(4) if not shortage(choice("attack", name), models)] for name in NAMES}
    any_number = [0, 1, 2, 3]
    wanted = {"correctness": any_number, "conf": any_number, "nn": [1, 2, 3], "rmia": [2, 3]}
    assert enough == wanted | {"lira:variance=per-example": [3]}
    assert shortage(choice("attack", "nn"), 0) == "nn needs at least 1 shadow model; 0 given"
    assert shortage(choice("attack", "lira:mode=online"), 0, in_out=4) is None


def test_a_model_without_a_recipe_is_audited_by_the_attacks_that_need_no_shadow(tmp_path):
    flags = {"weights": tmp_path / "w.safetensors", "attack": "lira,correctness", "shadows": 1}
    check_audit(read(Audit, None, flags))
    with pytest.raises(secateur.WrongInput, match="lira needs at least 2"):
        check_audit(read(Audit, None, flags, ["train.epochs=3"]))


def test_a_dry_run_of_saved_predictions_speaks_of_them(tmp_path, capsys):
    file = tmp_path / "mine.csv"
    asked = ["audit", "--predictions", str(file), "--attack", "conf,lira", "--dry-run"]
    assert main(asked) == 2  # what a run would refuse at once
    assert "is not a file" in capsys.readouterr().err
    file.write_text("p0,p1,label,membership\n0.9,0.1,0,1\n0.4,0.6,1,0\n")
    assert main(asked) == 0
    assert capsys.readouterr().out == f"attack the saved predictions {file} with conf, lira\n"


def test_python_is_refused_before_anything_is_pruned(hide, monkeypatch):
    rng = torch.Generator().manual_seed(0)
    sides = [Batch(torch.randn(6, 3, generator=rng), torch.arange(6) % 2) for _ in range(4)]
    net = nn.Linear(3, 2)
    asked = {"shadows": [(net, *sides[2:])], "pruner": "l1-unstructured"}
    monkeypatch.setattr("secateur.api.audit._prune_side", lambda *_: pytest.fail("work has begun"))
    with pytest.raises(secateur.WrongInput, match=r"^shadows: lira needs at least 2 shadow models; 1 given$"):
        secateur.audit(net, *sides[:2], attacks=["conf", "lira"], **asked)
    with pytest.raises(secateur.WrongInput, match=r"^attack: 'cnf' is not known"):
        secateur.audit(net, *sides[:2], attacks=["cnf"], **asked)
    hide("opacus")
    with pytest.raises(secateur.WrongInput, match=r"^opacus: is not installed"):
        secateur.audit(net, *sides[:2], attacks=["conf"], defense="dp-sgd", **asked)


def test_from_python_one_shadow_runs_all_that_one_is_enough_for():
    rng = torch.Generator().manual_seed(0)
    sides = [Batch(torch.randn(40, 3, generator=rng), torch.arange(40) % 2) for _ in range(4)]
    report = secateur.audit(nn.Linear(3, 2), *sides[:2], shadows=[(nn.Linear(3, 2), *sides[2:])])
    ran = {row.attack for row in report.rows}
    assert ran >= {"conf", "mentr", "nn", "samia", "correctness"} and not ran & {"lira", "rmia"}
