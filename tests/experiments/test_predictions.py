"""Saved predictions: what is refused, and which attacks they can answer."""

import numpy as np
import pytest

from secateur.cli import main
from secateur.runs.folder import load_rows


def table(seed, rows=120):
    rng = np.random.default_rng(seed)
    labels, membership = rng.integers(0, 3, rows), np.arange(rows) < rows // 2
    logits = rng.normal(size=(rows, 3)) + np.eye(3)[labels] * np.where(membership, 3.0, 1.0)[:, None]
    answers = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return {"probabilities": answers, "labels": labels, "membership": membership}


def audit(file, out, *flags):
    return main(["audit", "--predictions", str(file), "--out", str(out), "--attack", "correctness", *flags])


def changed(name, change):
    arrays = table(0)
    return arrays | {name: change(arrays[name])}


WRONG = {
    "no rows": ({name: array[:0] for name, array in table(0).items()}, "have no rows"),
    "text": (changed("labels", lambda labels: labels.astype(str)), "labels must hold finite numbers"),
    "negative": (changed("probabilities", lambda p: p + np.array([1.0, -1.0, 0.0])), "from 0 to 1"),
    "not finite": (changed("probabilities", lambda p: p * np.nan), "probabilities must hold finite numbers"),
    "half labels": (changed("labels", lambda labels: labels + 0.5), "whole numbers from 0 to 2"),
    "label too large": (changed("labels", lambda labels: labels + 1), "whole numbers from 0 to 2"),
    "membership of two": (changed("membership", lambda m: m * 2), "members (1) and non-members (0)"),
    "a column": (changed("labels", lambda labels: labels[:, None]), "shapes do not fit"),
    "nothing": ({}, "the file holds nothing"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_one_sentence(name, tmp_path, capsys):
    arrays, sentence = WRONG[name]
    np.savez(tmp_path / "p.npz", **arrays)
    assert audit(tmp_path / "p.npz", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["missing.npz", "missing.csv", "missing.txt"])
def test_a_file_that_is_not_there_is_one_sentence(name, tmp_path, capsys):
    assert audit(tmp_path / name, tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert "predictions: " in said and name in said and said.count("\n") == 1


@pytest.mark.parametrize("lines", ["", "p0,p1,label,membership\n", "p0,p1,label,membership\n1,2\n", "p0,p1\n.5,.5\n"])
def test_a_wrong_csv_is_one_sentence(lines, tmp_path, capsys):
    (tmp_path / "p.csv").write_text(lines)
    assert audit(tmp_path / "p.csv", tmp_path / "run") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_attacks_run_where_the_saved_rows_answer_all_that_they_ask(tmp_path):
    shadow = {f"shadow_{name}": array for name, array in table(1).items()}
    np.savez(tmp_path / "p.npz", **table(0), **shadow)
    asked = "conf,correctness,nn-cls:epochs=2,blindmi,label-only,samia:epochs=2"
    assert audit(tmp_path / "p.npz", tmp_path / "run", "--attack", asked) == 0
    rows = {row.attack: row for row in load_rows(tmp_path / "run") if row.metric == "auc"}
    assert {name for name, row in rows.items() if row.value is not None} == {"conf", "correctness", "nn-cls:epochs=2"}
    assert all("new questions" in row.note for row in rows.values() if row.value is None)


def test_without_shadows_and_without_a_choice_what_needs_none_is_run(tmp_path, capsys):
    np.savez(tmp_path / "p.npz", **table(0))
    bare = ["audit", "--predictions", str(tmp_path / "p.npz"), "--out", str(tmp_path / "run")]
    assert main([*bare, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("with correctness\n")
    assert main(bare) == 0
    assert {row.attack: row.value is not None for row in load_rows(tmp_path / "run") if row.metric == "auc"} == {
        "correctness": True
    }
    assert main([*bare, "--attack", "conf"]) == 0
    assert "conf: needs shadow models' predictions; give shadow_" in " ".join(capsys.readouterr().out.split())
    np.savez(tmp_path / "p.npz", **table(0), **{f"shadow_{name}": array for name, array in table(1).items()})
    assert main([*bare, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("with conf, mentr\n")
