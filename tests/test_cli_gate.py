"""Gate and limits on the command line, with saved predictions as evidence."""

import json
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest
from sklearn.datasets import make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.metrics import roc_auc_score

from secateur.cli import main
from secateur.runs.folder import load_rows

LIMITS = ["--set", "limits.auc=.9", "--set", "limits.tpr_at_fpr_0.01=.05"]


def save(file, confidences, membership, **more):
    labels = np.arange(len(confidences)) % 2
    answers = np.stack([np.where(labels == k, confidences, 1 - confidences) for k in (0, 1)], 1)
    np.savez(file, probabilities=answers, labels=labels, membership=membership, **more)


def audit(file, out, *flags):
    return main(["audit", "--predictions", str(file), "--out", str(out), *flags])


@pytest.fixture(scope="module")
def forest(tmp_path_factory):
    """A random forest whose confidences separate members from others: the case of a leaking model that passed."""
    inputs, labels = make_classification(1200, 20, n_informative=4, flip_y=0.4, random_state=0)
    inside = np.arange(1200) < 600
    model = RandomForestClassifier(100, bootstrap=False, max_features=1, random_state=0)
    model.fit(inputs[inside], labels[inside])
    answers = model.predict_proba(inputs)
    assert roc_auc_score(inside, answers[np.arange(1200), labels]) > 0.99
    file = tmp_path_factory.mktemp("forest") / "forest.npz"
    np.savez(file, probabilities=answers, labels=labels, membership=inside)
    return file


@pytest.fixture(scope="module")
def finished(forest, tmp_path_factory):
    """A finished run of few attacks."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert audit(forest, folder, "--attack", "conf,correctness") == 0
    return folder


def test_a_leaking_forest_fails_its_limits(forest, tmp_path, capsys):
    assert audit(forest, tmp_path / "run", *LIMITS) == 1
    said = capsys.readouterr().err
    assert "auc" in said and "is above the limit 0.9" in said and "tpr_at_fpr_0.01" in said
    rows = {row.metric: row for row in load_rows(tmp_path / "run") if row.attack == "conf"}
    assert rows["auc"].value > 0.99 and rows["tpr_at_fpr_0.01"].value > 0.9
    tied = {row.metric: row for row in load_rows(tmp_path / "run") if row.attack == "correctness"}
    assert tied["tpr_at_fpr_0.01"].value is None and "tie with members" in tied["tpr_at_fpr_0.01"].note


def test_thirty_rows_of_each_kind_are_inconclusive(tmp_path, capsys):
    rng = np.random.default_rng(5)
    confidences = np.concatenate([rng.normal(0.55, 0.1, 30), rng.normal(0.5, 0.1, 30)]).clip(0.01, 0.99)
    save(tmp_path / "p.npz", confidences, np.arange(60) < 30)
    flags = ["--attack", "conf", "--set", "limits.auc=.75", "--set", "limits.attacker=no-shadows"]
    assert audit(tmp_path / "p.npz", tmp_path / "run", *flags) == 3
    said = capsys.readouterr().err
    assert "is inconclusive for the limit 0.75" in said and "rows would decide (now 60)" in said


def test_no_shadows_are_inconclusive_unless_the_limits_say_so(tmp_path, capsys):
    rng = np.random.default_rng(0)
    save(tmp_path / "p.npz", rng.uniform(0.5, 1, 4000), np.arange(4000) < 2000)
    assert audit(tmp_path / "p.npz", tmp_path / "run", "--set", "limits.auc=.6") == 3
    assert "no attack with shadow models was run" in capsys.readouterr().err
    flags = ["--set", "limits.auc=.6", "--set", "limits.attacker=no-shadows"]
    assert audit(tmp_path / "p.npz", tmp_path / "run", *flags) == 0


def test_the_gate_decides_from_finished_runs_and_writes_what_servers_read(forest, tmp_path, capsys):
    assert audit(forest, tmp_path / "run") == 0
    capsys.readouterr()
    policy = tmp_path / "policy.yaml"
    policy.write_text("name: release\nset_by: Privacy office\nset_on: 2026-11-01\nlimits: {auc: .9}\n")
    outputs = [
        "--summary",
        str(tmp_path / "s.md"),
        "--sarif",
        str(tmp_path / "s.sarif"),
        "--junit",
        str(tmp_path / "j.xml"),
    ]
    assert main(["gate", str(tmp_path / "run"), "--policy", str(policy), *outputs]) == 1
    assert "### Secateur: ABOVE" in capsys.readouterr().out == (tmp_path / "s.md").read_text()
    assert json.loads((tmp_path / "s.sarif").read_text())["runs"][0]["results"][0]["level"] == "error"
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("failures") == "1"
    policy.write_text("limits: {}\n")
    same = ["gate", str(tmp_path / "run"), "--policy", str(policy), "--baseline", str(tmp_path / "run")]
    assert main(same) == 0


@pytest.mark.parametrize("flag", ["--junit", "--summary", "--sarif"])
def test_an_output_that_cannot_be_written_is_refused_before_any_work(flag, forest, tmp_path, capsys):
    nowhere = str(tmp_path / "missing" / "file")
    if flag == "--junit":
        assert audit(forest, tmp_path / "run", "--junit", nowhere) == 2
        assert not (tmp_path / "run").exists()
    (tmp_path / "policy.yaml").write_text("limits: {auc: .9}\n")
    assert main(["gate", str(tmp_path), "--policy", str(tmp_path / "policy.yaml"), flag, nowhere]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_wrong_policy_or_run_is_one_sentence(tmp_path, capsys):
    (tmp_path / "policy.yaml").write_text("limits: {auk: .9}\n")
    (tmp_path / "run").mkdir()
    assert main(["gate", str(tmp_path / "run"), "--policy", str(tmp_path / "policy.yaml")]) == 2
    (tmp_path / "policy.yaml").write_text("limits: {auc: .9}\n")
    assert main(["gate", str(tmp_path / "run"), "--policy", str(tmp_path / "policy.yaml")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and "auk" in said[0] and "not the folder of a run" in said[1]


@pytest.mark.parametrize(("limit", "code", "word"), [(0, 1, "above the limit"), (200, 3, "ig took 5 of its")])
def test_an_inversion_is_held_to_limits(limit, code, word, tmp_path, capsys):
    flags = ["--iterations", "5", "--targets", "3", "--out", str(tmp_path / "run"), "--junit", str(tmp_path / "j.xml")]
    assert main(["invert", *flags, "--set", f"limits.psnr={limit}"]) == code
    assert "psnr" in capsys.readouterr().err
    assert word in (tmp_path / "run" / "report.html").read_text()
    assert ElementTree.parse(tmp_path / "j.xml").getroot().get("tests") == "1"


def test_a_federation_is_held_to_limits(tmp_path, capsys):
    flags = ["--clients", "4", "--per-round", "4", "--rounds", "2", "--batch-size", "8", "--membership", "yeom"]
    assert main(["federate", *flags, "--out", str(tmp_path / "run"), "--set", "limits.auc=.01"]) == 1
    assert "auc" in capsys.readouterr().err
    assert "above the limit" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.parametrize(
    "change",
    [
        *({"value": "x"}, {"value": [0.5]}, {"low": {}}, {"high": "inf"}, {"metric": 7}, {"metric": None}),
        *({"attack": []}, {"model": None}, {"seed": "a"}, {"group": 99}, {"group": -9}, {"value": 10**400}),
    ],
)
@pytest.mark.parametrize("forged", ["run", "baseline"])
def test_forged_rows_are_decided_or_refused_in_one_sentence(change, forged, finished, tmp_path, capsys):
    """They may lie about what was measured; they may not end the gate otherwise."""
    folder = shutil.copytree(finished, tmp_path / "forged")
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    for line in lines:
        if line["metric"] == "auc":
            line.update(change)
    (folder / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "policy.yaml").write_text("name: release\nset_on: 2026-11-01\nlimits: {auc: .9}\n")
    runs = [folder, "--baseline", finished] if forged == "run" else [finished, "--baseline", folder]
    written = ["--summary", tmp_path / "s.md", "--sarif", tmp_path / "s.sarif", "--junit", tmp_path / "j.xml"]
    code = main(["gate", *map(str, runs), "--policy", str(tmp_path / "policy.yaml"), *map(str, written)])
    said = capsys.readouterr().err
    assert code in (0, 1, 2, 3) and "Traceback" not in said
    if code == 2:
        assert said.count("\n") == 1 and "run: " in said and str(folder) in said and not (tmp_path / "s.md").exists()
    else:
        json.loads((tmp_path / "s.sarif").read_text())
        ElementTree.parse(tmp_path / "j.xml")
