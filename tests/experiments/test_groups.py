"""Groups of the user's own column: rows, a limit, records.csv and the page, from every door."""

import csv
import json

import numpy as np
import pytest
import torch

import secateur
from secateur.cli import main
from secateur.data.load import load
from secateur.interfaces import BlackBox
from secateur.runs.folder import load_rows

TINY = ["--set", "train.epochs=2", "--set", "train.patience=2", "--model", "mlp", "--pruner", "none"]
TINY += ["--attack", "conf", "--shadows", "1"]
WARDS = np.array(["north", "south", "east", "west"])[np.arange(600) % 4]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, data = tmp_path_factory.mktemp("files"), load("digits")
    arrays = {"inputs": data.inputs[:600].numpy(), "labels": data.labels[:600].numpy()}
    np.savez(folder / "named.npz", **arrays, ward=WARDS, half=np.arange(600) % 2)
    np.savez(folder / "plain.npz", **arrays, groups=WARDS)
    np.savez(folder / "short.npz", **arrays, ward=WARDS[:10])
    flat = data.inputs[:600].flatten(1)[:, ::8].numpy()
    with (folder / "table.csv").open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow([*(f"x{i}" for i in range(8)), "label", "ward"])
        writer.writerows(
            [*map(str, row), label, ward] for row, label, ward in zip(flat, arrays["labels"], WARDS, strict=True)
        )
    return folder


def audit(out, data, *flags):
    return main(["audit", *TINY, "--data", str(data), "--out", str(out), *map(str, flags)])


@pytest.mark.parametrize(("file", "flags"), [("named.npz", ["--group", "ward"]), ("plain.npz", [])])
def test_the_column_of_the_data_is_in_rows_records_and_on_the_page(files, tmp_path, file, flags):
    assert audit(tmp_path / "run", files / file, *flags) == 0
    (worst,) = (row for row in load_rows(tmp_path / "run") if row.metric == "worst_group_auc")
    assert "the worst of 4" in worst.note and worst.note.startswith("group ")  # the classes are too small here
    with (tmp_path / "run" / "records.csv").open() as stream:
        records = list(csv.DictReader(stream))
    assert len(records) > 200 and all(record["group"] == WARDS[int(record["id"])] for record in records)
    page = (tmp_path / "run" / "report.html").read_text()
    section = page.partition('id="groups"')[2].partition("</section>")[0]
    assert all(f">group {ward}</td>" in section for ward in set(WARDS))


def test_a_table_has_a_column_of_groups_that_is_no_input(files, tmp_path):
    assert audit(tmp_path / "run", files / "table.csv", "--group", "ward", "--label", "label") == 0
    assert any("the worst of 4" in (row.note or "") for row in load_rows(tmp_path / "run"))
    data = load(str(files / "table.csv"))
    assert data.input_shape == (12,)  # without a word the texts are an input: a column of bits for each


def test_another_column_is_measured_anew(files, tmp_path):
    assert audit(tmp_path / "run", files / "named.npz", "--group", "ward") == 0
    assert audit(tmp_path / "run", files / "named.npz", "--group", "half") == 0
    (worst,) = (row for row in load_rows(tmp_path / "run") if row.metric == "worst_group_auc")
    assert "the worst of 2" in worst.note


def test_a_limit_holds_for_the_worst_group(files, tmp_path, capsys):
    limit = ["--set", "limits.worst_group_auc=.5", "--set", "limits.decide=high", "--seeds", "1"]
    assert audit(tmp_path / "run", files / "named.npz", "--group", "ward", *limit) in (1, 3)
    assert "worst_group_auc" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "group", "problem"),
    [
        ("named.npz", "wards", "group: named has no column 'wards'; name an array of an .npz file, or a column"),
        ("short.npz", "ward", "group: short has 10 values for 600 rows; use one for each row"),
        ("named.npz", "inputs", "group: the groups of named have the shape (600, 1, 8, 8); use one value for each row"),
    ],
)
def test_a_wrong_column_is_one_sentence(files, tmp_path, file, group, problem, capsys):
    assert audit(tmp_path / "run", files / file, "--group", group) == 2
    said = capsys.readouterr().err
    assert problem in said and said.count("\n") == 1


def test_saved_predictions_have_a_column_of_any_name(tmp_path, capsys):
    rng = torch.Generator().manual_seed(0)
    probabilities = torch.rand(400, 3, generator=rng).softmax(1).numpy()
    arrays = {"probabilities": probabilities, "labels": np.arange(400) % 3, "membership": np.arange(400) % 2}
    np.savez(tmp_path / "answers.npz", **arrays, ward=WARDS[np.arange(400) // 2 % 4])
    flags = ["--predictions", str(tmp_path / "answers.npz"), "--attack", "conf", "--out", str(tmp_path / "run")]
    assert main(["audit", *flags, "--group", "ward", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert any(
        "of 7" in (row["note"] or "") for row in rows if row["metric"] == "worst_group_auc"
    )  # 3 classes, 4 wards
    assert main(["audit", *flags, "--group", "wards"]) == 2
    assert "has no column 'wards'; it holds probabilities, labels, membership, ward" in capsys.readouterr().err


def test_python_takes_groups_of_members_then_nonmembers():
    rng = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 3, generator=rng)
    labels = torch.zeros(200, dtype=torch.int64)
    inputs[:50, 0] += 4  # the members of one group stand out
    sides = [(inputs[:100], labels[:100]), (inputs[100:], labels[100:])]
    model = BlackBox(lambda x: torch.softmax(x, 1))
    groups = ["a"] * 50 + ["b"] * 50 + ["a"] * 50 + ["b"] * 50
    report = secateur.audit(model, *sides, attacks=["conf"], groups=groups)
    (worst,) = (row for row in report.rows if row.metric == "worst_group_auc")
    assert worst.note.startswith("group a") and worst.value > 0.9
    assert list(report.records.groups) == groups
    with pytest.raises(secateur.WrongInput, match="groups: 3 values for 200 examples; use one for each"):
        secateur.audit(model, *sides, attacks=["conf"], groups=["a", "b", "c"])
