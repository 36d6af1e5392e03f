"""`secateur invert` as a user types it, on updates made here and captured elsewhere."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from secateur import catalogue, tree
from secateur.attacks.inversion.updates import gradient_update, weights_update
from secateur.cli import main
from secateur.data.load import load
from secateur.evaluation.calibration import WEIGHTS
from secateur.interfaces import Batch, Optimiser
from secateur.models.create import create
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable
from secateur.seeding import derive
from secateur.training.optimisers import LocalSteps

QUICK = ["--attack", "ig", "--iterations", "60", "--targets", "2"]


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """A sent model and updates of it, good and bad, as files."""
    folder = tmp_path_factory.mktemp("captured")
    data, net = load("digits"), create("lenet-zhu", (1, 8, 8), 10, derive(5, "sent"))
    state, batch = tree.state_of(net), data.batch.take(torch.tensor([7]))
    save_file(state, folder / "sent.safetensors")
    gradient = gradient_update(net, state, batch).values
    save_file(gradient, folder / "gradient.safetensors")
    after = weights_update(net, state, batch, "eval", 2, 0.05).values
    save_file(after, folder / "weights.safetensors", metadata={"kind": "weights"})
    adam = LocalSteps(((0,),), (0.002,), Optimiser("adam"))
    stepped = weights_update(net, state, batch, turn=adam).values
    save_file(stepped, folder / "adam.safetensors", metadata={"kind": "weights"})
    save_file(state | stepped, folder / "sent-next.safetensors")
    again = weights_update(net, state | stepped, batch, turn=adam).values
    save_file(again, folder / "again.safetensors", metadata={"kind": "weights"})
    stepped = weights_update(net, state | stepped, data.batch.take(torch.tensor([8])), turn=adam).values
    save_file(stepped, folder / "adam-next.safetensors", metadata={"kind": "weights"})
    save_file(gradient | {"0.bias": gradient["0.bias"] * torch.nan}, folder / "nan.safetensors")
    save_file(gradient | {"0.bias": torch.zeros(5)}, folder / "shape.safetensors")
    save_file({"other": torch.zeros(1)}, folder / "names.safetensors")
    save_file(gradient, folder / "kind.safetensors", metadata={"kind": "picture"})
    whole = (folder / "gradient.safetensors").read_bytes()
    (folder / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    return folder


def invert(*arguments):
    return main(["invert", *map(str, arguments)])


def test_real_digits_come_back(tmp_path, capsys):
    assert invert(*QUICK, "--out", tmp_path / "run", "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows == [row.to_json() for row in load_rows(tmp_path / "run")]
    assert all({"target", "trial", "labels", "total_variation"} <= row.keys() for row in rows)
    whole = {row["metric"]: row for row in rows if row["target"] is None}
    assert whole["psnr_min"]["value"] > whole["psnr_grey"]["value"] + 5
    assert whole["label_accuracy"]["value"] == 1.0
    assert {row["total_variation"] for row in rows} == {1e-3}  # chosen on other digits
    assert invert(*QUICK, "--out", tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "PSNR" in printed and "honest-but-curious" in printed and "report.html" in printed


def test_a_step_of_adam_gives_a_digit_back_to_those_who_take_it_too(tmp_path):
    attacks = "ig:tv=.01:iterations=150,ig:tv=.01:iterations=150:unrolls=false"
    assert invert("--optimiser", "adam", "--targets", 2, "--attack", attacks, "--out", tmp_path / "run") == 0
    rows = [row for row in load_rows(tmp_path / "run") if row.extra["target"] is None]
    aware, naive = ([row for row in rows if ("unrolls" in str(row.attack)) == one] for one in (False, True))
    values = [{row.metric: row.value for row in part} for part in (aware, naive)]
    assert values[0]["psnr"] > values[0]["psnr_grey"] + 3 and values[0]["psnr"] > values[1]["psnr"] + 3
    assert aware[0].extra["update"] == "weights after 1 local step of adam"
    assert "its optimiser (adam)" in aware[0].extra["knows"] and "plain gradient descent" in naive[0].extra["knows"]


def test_captured_rounds_of_the_same_examples_are_joined(captured, tmp_path, capsys):
    update = ["--update", captured / "again.safetensors", "--weights", captured / "sent-next.safetensors"]
    update += ["--data", "digits", "--optimiser", "adam", "--learning-rate", 0.002, "--out", tmp_path / "run"]
    two = [*update, "--update", captured / "adam.safetensors", "--sent", captured / "sent.safetensors"]
    assert invert(*two, "--attack", "ig:tv=.01:iterations=2:rounds=2,ig:tv=.01:iterations=2") == 0
    rows = [row for row in load_rows(tmp_path / "run") if "knows" in row.extra]
    belief = "that its last 2 rounds are of the same examples"
    assert {(belief in row.extra["knows"], "rounds=2" in str(row.attack)) for row in rows} == {(1, 1), (0, 0)}
    capsys.readouterr()
    assert invert(*update, "--attack", "ig:tv=.01:rounds=2") == 2
    assert "update: has 1 files, and an attack joins 2 rounds; use one for each" in capsys.readouterr().err


@pytest.mark.parametrize(("how", "wanted"), [("adam", "its optimiser (adam)"), ("unknown", "adam, rate 0.002")])
def test_a_captured_step_of_adam(captured, tmp_path, how, wanted):
    update = ["--update", captured / "adam.safetensors", "--weights", captured / "sent.safetensors"]
    rate = ["--learning-rate", 0.002] if how == "adam" else []
    attack = ["--attack", "ig:tv=.01", "--iterations", 2, "--data", "digits", "--optimiser", how, *rate]
    assert invert(*attack, *update, "--out", tmp_path / "run") == 0
    assert all(wanted in row.extra["knows"] for row in load_rows(tmp_path / "run") if "knows" in row.extra)


def test_two_rounds_of_a_client_show_its_optimiser_and_how_sure_that_is(captured, tmp_path, capsys):
    first, model = captured / "adam-next.safetensors", ["--weights", captured / "sent-next.safetensors"]
    rounds = [*model, "--update", first, "--update", captured / "adam.safetensors"]
    attack = ["--attack", "ig:tv=.01", "--iterations", 2, "--data", "digits", *rounds, "--out", tmp_path / "run"]
    assert invert(*attack, "--optimiser", "unknown", "--sent", captured / "sent.safetensors") == 0
    known = {row.extra["knows"] for row in load_rows(tmp_path / "run") if "knows" in row.extra}
    assert len(known) == 1 and "adam, rate 0.002, decay not shown; certainty 1.00, from 2 rounds" in known.pop()
    capsys.readouterr()
    assert invert(*attack, "--optimiser", "unknown", "--sent", f"{first},{first}") == 2
    assert "sent: has 2 files for 1 further updates; use one for each" in capsys.readouterr().err
    assert invert(*attack, "--optimiser", "adam", "--learning-rate", 0.002) == 2
    assert "update: has 2 files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--optimiser", "adm"], "did you mean 'adam'"),
        (["--optimiser", "unknown"], "optimiser: unknown is about a captured update"),
        (["--local-epochs", "1", "--local-steps", "2"], "cannot be combined with local_steps"),
        (["--optimiser", "sgd:schedule=.1/.05", "--local-steps", "3"], "2 rates, and the client takes 3 steps"),
        (["--optimiser", "adam", "--attack", "rob"], "steps of adam do not show them"),
        (["--optimiser", "adam", "--defense", "dgp"], "cannot be combined with local steps"),
    ],
)
def test_a_wrong_optimiser_is_one_sentence(tmp_path, capsys, wrong, said):
    assert invert(*wrong, "--out", tmp_path / "run") == 2
    assert said in capsys.readouterr().err


def test_a_dry_run_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert invert("--dry-run", "--attack", "ig,dlg", "--local-steps", "3") == 0
    said = capsys.readouterr().out
    assert "20 updates of 1 example of digits" in said and "weights after 3 local steps" in said and "dlg" in said
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["gradient", "weights"])
def test_an_update_captured_elsewhere(captured, tmp_path, name, capsys):
    update = ["--update", captured / f"{name}.safetensors", "--weights", captured / "sent.safetensors"]
    more = ["--local-steps", 2, "--learning-rate", 0.05] if name == "weights" else []
    assert invert(*QUICK[:4], *update, *more, "--out", tmp_path / "run") == 0
    rows = [row.to_json() for row in load_rows(tmp_path / "run")]
    assert {row["metric"].removesuffix("_median") for row in rows} >= {"attack_loss"}
    assert not [row for row in rows if row["metric"] in ("psnr", "label_accuracy")]
    assert {row["update"] for row in rows} == {"gradient" if name == "gradient" else "weights after 2 local steps"}
    assert [path.name for path in (tmp_path / "run" / "pictures").iterdir()] == [
        "seed0-target0000-00-ig_iterations_60.png"
    ]
    assert "no truth to compare with" in capsys.readouterr().out


def test_an_update_needs_no_data_where_its_picture_is_described(captured, tmp_path, capsys):
    """Finding 6: classes, mean and std were no flags, and 1000 classes needed 1000 rows."""
    update = ["--update", captured / "gradient.safetensors", "--weights", captured / "sent.safetensors"]
    shape = ["--input-shape", "1,8,8", "--classes", 10, "--mean", 0.3053, "--std", 0.3760, "--iterations", 3]
    assert invert(*update, *shape, "--out", tmp_path / "run") == 0
    rows = load_rows(tmp_path / "run")
    assert {row.dataset for row in rows} == {"no data"}
    assert {row.attack for row in rows} == {f"ig:iterations=3:tv={weight}" for weight in WEIGHTS}  # none was picked
    assert invert(tmp_path / "run" / "config.yaml", "--out", tmp_path / "again") == 0  # the run file says it all
    assert select_comparable(load_rows(tmp_path / "again")) == select_comparable(rows)
    capsys.readouterr()


def test_few_rows_serve_many_classes(tmp_path, capsys):
    net = create("lenet-zhu", (1, 8, 8), 1000, derive(0, "net"))
    batch = Batch(torch.rand(1, 1, 8, 8), torch.tensor([990]))
    save_file(tree.state_of(net), tmp_path / "sent.safetensors")
    save_file(gradient_update(net, tree.state_of(net), batch).values, tmp_path / "gradient.safetensors")
    np.savez(tmp_path / "few.npz", inputs=np.random.default_rng(0).random((3, 1, 8, 8)), labels=[0, 7, 999])
    update = ["--update", tmp_path / "gradient.safetensors", "--weights", tmp_path / "sent.safetensors"]
    update += ["--data", tmp_path / "few.npz", "--iterations", 2, "--out", tmp_path / "run"]
    assert invert(*update) == 2 and "labels: few has labels from 0 to 999 in 3 rows" in capsys.readouterr().err
    assert invert(*update, "--classes", 1000) == 0


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--input-shape", "1,8"], "input_shape: has 2 numbers; write channels,height,width"),
        (["--input-shape", "1,8,8"], "classes: is missing; without data write the number of the model's classes"),
        (
            ["--input-shape", "3,8,8", "--classes", "9", "--mean", ".5", "--std", ".5"],
            "mean: must be one number for each",
        ),
        (
            ["--input-shape", "1,8,8", "--classes", "9", "--mean", ".5"],
            "std: is missing; mean and std are only used together",
        ),
        (["--classes", "0"], "classes: '0' is not allowed"),
        (["--input-shape", "3,9,9", "--data", "digits"], "input_shape: is (3, 9, 9); digits has (1, 8, 8)"),
    ],
)
def test_a_described_picture_that_does_not_fit(captured, tmp_path, arguments, expected, capsys):
    update = ["--update", captured / "gradient.safetensors", "--weights", captured / "sent.safetensors"]
    assert invert(*update, *arguments, "--out", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_a_forgotten_batch_size_has_a_hint(tmp_path, caplog):
    net = create("lenet-zhu", (1, 8, 8), 10, derive(0, "net"))
    batch = load("digits").batch.take(torch.arange(4))
    save_file(tree.state_of(net), tmp_path / "sent.safetensors")
    save_file(gradient_update(net, tree.state_of(net), batch).values, tmp_path / "four.safetensors")
    update = ["--update", tmp_path / "four.safetensors", "--weights", tmp_path / "sent.safetensors", "--dry-run"]
    assert invert(*update) == 0
    assert "The update shows 4 labels, so it has more than one example; set --batch-size." in caplog.text
    caplog.clear()
    assert invert(*update, "--batch-size", 4) == 0 and not caplog.text


def test_one_attack_that_cannot_be_mounted_does_not_end_the_others(tmp_path, capsys):
    """Finding 12: r-gap on a network with biases ended the whole command."""
    assert invert(*QUICK, "--attack", "ig:tv=0.001,r-gap", "--iterations", 3, "--out", tmp_path / "run") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "r-gap was not run: cannot invert this network: 0 (Conv2d) has a bias" in said
    rows = {
        row.attack: row for row in load_rows(tmp_path / "run") if row.metric == "psnr" and row.extra["target"] is None
    }
    assert rows["r-gap"].value is None and rows["ig:iterations=3:tv=0.001"].value is not None
    assert "not run: cannot invert this network" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("nan", "update: FILE holds NaN or infinity in 0.bias; every number must be finite"),
        ("shape", "update: FILE does not fit the model; of another shape: 0.bias (5,) for (12,)"),
        ("names", "unexpected: other"),
        ("kind", "update: FILE says that its kind is 'picture'; allowed: gradient, weights"),
        ("cut", "update: FILE cannot be read as a .safetensors file"),
        ("nowhere", "update: FILE cannot be read as a .safetensors file"),
        ("weights", "learning_rate: is needed"),
    ],
)
def test_updates_that_do_not_fit(captured, tmp_path, name, expected, capsys):
    file = captured / f"{name}.safetensors"
    sent = ["--weights", captured / "sent.safetensors", "--out", tmp_path / "run"]
    assert invert("--update", file, *sent) == 2
    said = capsys.readouterr().err
    assert expected.replace("FILE", str(file)) in said and said.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--attack", "igg"], "attack: 'igg' is not known; did you mean 'ig'"),
        (["--attack", "ig:tvv=1"], "attack.ig: 'tvv' is not known; did you mean 'tv'"),
        (["--attack", "r-gap"], "attack r-gap: cannot invert this network: 0 (Conv2d) has a bias"),
        (["--attack", "r-gap,rob", "--restarts", "2"], "restarts: r-gap does not have it"),
        (["--attack", "ig,rob", "--adaptive", "layer"], "rob"),
        (["--data", "breast_cancer"], "data: breast_cancer has examples of the shape (30,); it must have pictures"),
        (["--targets", "1000", "--batch-size", "2"], "targets: 1000 targets of 2 need 2000 training rows"),
        (["--batch-size", "0"], "batch_size"),
        (["--labels", "guessed"], "labels: 'guessed' is not allowed"),
        (["--adaptive", "yes"], "adaptive: 'yes' is not allowed"),
        (["--update", "u.safetensors"], "weights: must be set with update"),
        (
            ["--update", "u", "--weights", "w", "--targets", "3"],
            "targets: cannot be combined with update",
        ),
        (["--update", "u", "--weights", "w", "--set", "together=2"], "together: cannot be combined with update"),
        (["--learning-rate", "0.1"], "learning_rate: is about local steps; set local_steps too"),
        (["--update", "u", "--weights", "w", "--labels", "oracle"], "update: cannot be combined with labels: oracle"),
        (["--input-shape", "1,8,8"], "input_shape: describes a captured update; set update too, or leave it out"),
        (["--set", "train.epochs=3"], "train: nothing is trained here"),
        (["--set", "local_batch=2"], "local_batch: 2 is not allowed; batch_size is 1"),
    ],
)
def test_wrong_input_is_one_sentence_before_any_work(arguments, expected, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invert(*arguments) == 2
    said = capsys.readouterr()
    assert expected in said.err and said.err.count("\n") == 1 and said.out == ""
    assert not list(tmp_path.iterdir())


def test_the_list_of_attacks_has_both_kinds_and_what_each_needs_to_know(capsys):
    assert main(["list", "attacks", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in rows} == {"attack", "inversion"}
    assert {"dlg", "idlg", "ig", "gi", "sgi", "r-gap", "rob", "ggl", "conf", "samia"} <= {row["name"] for row in rows}
    assert all(row["threat"] for row in rows if row["kind"] == "inversion")
    assert main(["list", "attacks"]) == 0
    printed = capsys.readouterr().out
    assert "needs to know" in printed and all(name in printed for name in catalogue.methods("inversion"))


def test_flags_are_laid_over_every_attack():
    from secateur.config import Invert, read

    config = read(Invert, None, {"attack": "ig:tv=0.1,dlg", "iterations": 7, "restarts": 2, "adaptive": "support"})
    assert [str(attack) for attack in config.attacks] == [
        "ig:adaptive=support:iterations=7:restarts=2:tv=0.1",
        "dlg:adaptive=support:iterations=7:restarts=2",
    ]


def test_a_captured_update_runs_again_from_its_own_run_file(captured, tmp_path, capsys):
    """The fields that mean nothing to it are not written, so they cannot be refused."""
    update = ["--update", captured / "gradient.safetensors", "--weights", captured / "sent.safetensors"]
    assert invert(*QUICK[:4], *update, "--out", tmp_path / "run") == 0
    assert "targets" not in (tmp_path / "run" / "config.yaml").read_text()
    assert invert(tmp_path / "run" / "config.yaml", "--out", tmp_path / "again", "--dry-run") == 0
    assert invert(*QUICK[:4], *update, "--learning-rate", "0.1") == 2
    assert "learning_rate: cannot be combined with" in capsys.readouterr().err
