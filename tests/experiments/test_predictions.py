"""Saved predictions: what is refused, and which attacks they can answer."""

import csv
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score, roc_curve

from secateur.cli import main
from secateur.data import prediction_files
from secateur.data.archives import map_npz
from secateur.evaluation import membership
from secateur.experiments import predictions
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


def test_without_shadows_and_without_a_choice_all_that_rank_are_run(tmp_path, capsys):
    np.savez(tmp_path / "p.npz", **table(0))
    bare = ["audit", "--predictions", str(tmp_path / "p.npz"), "--out", str(tmp_path / "run")]
    assert main([*bare, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("with conf, xent, entropy, mentr, top1-conf, correctness\n")
    assert main(bare) == 0
    rows = load_rows(tmp_path / "run")
    assert all(row.value > 0.5 for row in rows if row.metric == "auc")
    undecided = {row.attack: row.note for row in rows if row.metric == "balanced_accuracy" and row.value is None}
    assert undecided.keys() == {"conf", "xent", "entropy", "mentr", "top1-conf"} and "threshold" in undecided["conf"]
    assert main([*bare, "--attack", "nn"]) == 2
    assert "attack: nn needs shadow models' predictions; add shadow_" in capsys.readouterr().err
    np.savez(tmp_path / "p.npz", **table(0), **{f"shadow_{name}": array for name, array in table(1).items()})
    assert main([*bare, "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("with nn, conf, xent, entropy, mentr, top1-conf, correctness\n")


def shadowed(models=8, rows=240, trained=True, chance=None):
    """Answers of a victim and of shadow models to the same rows: every model is surer of the rows it was trained on.

    Rows differ in how hard they are by far more than in membership, so that only a comparison of models tells.
    """
    rng = np.random.default_rng(3)
    labels, hardness = rng.integers(0, 3, rows), rng.normal(scale=3.0, size=rows)
    inside = np.stack([rng.permutation(rows) < rows // 2 for _ in range(models + 1)])
    inside[1:] = np.argsort(rng.random((models, rows)), 0) < models // 2 if trained else False
    if chance is not None:  # each row trains each model by chance
        inside[1:] = rng.random((models, rows)) < chance
    surer = np.where(inside, 2.0, 0.0) + hardness + rng.normal(scale=0.3, size=inside.shape)
    logits = rng.normal(scale=0.1, size=(models + 1, rows, 3)) + np.eye(3)[labels] * surer[..., None]
    answers = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    victim = {"probabilities": answers[0], "labels": labels, "membership": inside[0]}
    return victim | {"shadow_probabilities": answers[1:], "shadow_membership": inside[1:]}


def measured(folder, metric="auc"):
    return {row.attack: row.value for row in load_rows(folder) if row.metric == metric}


@pytest.mark.parametrize("trained", [True, False], ids=["online", "offline"])
def test_many_shadow_models_on_the_same_rows_are_used(trained, tmp_path, few_epochs):
    np.savez(tmp_path / "p.npz", **shadowed(trained=trained))
    assert main(["audit", "--predictions", str(tmp_path / "p.npz"), "--out", str(tmp_path / "run")]) == 0
    auc = measured(tmp_path / "run")
    assert auc["lira"] > 0.95 and auc["rmia"] > auc["conf"] + 0.1  # hardness hides members from conf
    notes = {row.attack: row.note for row in load_rows(tmp_path / "run") if row.metric == "auc"}
    assert ("offline" in (notes["lira"] or "")) is not trained
    assert (measured(tmp_path / "run", "balanced_accuracy")["lira"] is None) is not trained
    assert ("nn" in auc) is trained
    (likeness,) = [row for row in load_rows(tmp_path / "run") if row.extra.get("check") == "shadows"]
    said = "8 shadow models, each trained on" if trained else "8 shadow models, trained on none of the rows: test"
    assert likeness.value == 1 and said in likeness.note


@pytest.mark.parametrize("mode", ["online", "offline"])
def test_shadows_of_random_membership_are_used_and_one_sided_examples_said(mode, tmp_path):
    arrays = shadowed(chance=0.3)
    trained = arrays["shadow_membership"].sum(0)
    assert trained.min() == 0 and trained.max() > 5 and len(set(trained)) > 4  # not half of the models
    arrays["shadow_membership"][:, 0] = True
    np.savez(tmp_path / "p.npz", **arrays)
    attacks = f"lira:mode={mode},rmia:mode={mode},conf"
    assert audit(tmp_path / "p.npz", tmp_path / "run", "--attack", attacks) == 0
    auc = {name.partition(":")[0]: value for name, value in measured(tmp_path / "run").items()}
    assert auc["lira"] > 0.95 and auc["rmia"] > auc["conf"] + 0.1
    note = next(row.note for row in load_rows(tmp_path / "run") if row.metric == "auc" and "lira" in row.attack)
    no_in = f"of 240 examples {(trained[1:] == 0).sum()} have no in model and 1 have no out model: "
    assert note.startswith(no_in if mode == "online" else "of 240 examples 1 have no out model: ")


def test_shadows_that_do_not_resemble_the_model_are_said(tmp_path, capsys):
    arrays = shadowed()
    arrays["shadow_probabilities"] = np.full_like(arrays["shadow_probabilities"], 1 / 3)
    np.savez(tmp_path / "p.npz", **arrays)
    limits = ["--set", "limits.auc=1", "--attack", "lira"]
    assert audit(tmp_path / "p.npz", tmp_path / "run", *limits) == 3
    assert "the shadows do not resemble the victim (8 shadow models" in " ".join(capsys.readouterr().err.split())


def test_settings_of_a_model_are_refused_and_the_run_file_repeats_the_run(tmp_path, capsys):
    np.savez(tmp_path / "p.npz", **table(0))
    assert audit(tmp_path / "p.npz", tmp_path / "run") == 0
    assert main(["audit", str(tmp_path / "run" / "config.yaml"), "--out", str(tmp_path / "again")]) == 0
    assert measured(tmp_path / "run") == measured(tmp_path / "again")
    assert "<h1>Leakage of the saved predictions</h1>" in (tmp_path / "run" / "report.html").read_text()
    for flags in (["--defense", "ppb"], ["--pruner", "snip"], ["--shadows", "9"]):
        assert audit(tmp_path / "p.npz", tmp_path / "other", *flags) == 2
        assert "saved predictions are audited as they are" in capsys.readouterr().err


def test_shadows_that_all_trained_on_the_same_rows_are_refused_for_lira(tmp_path, capsys):
    arrays = shadowed()
    np.savez(tmp_path / "p.npz", **arrays | {"shadow_membership": np.tile(arrays["membership"], (8, 1))})
    assert audit(tmp_path / "p.npz", tmp_path / "run", "--attack", "lira,conf") == 0
    notes = {row.attack: row.note for row in load_rows(tmp_path / "run") if row.metric == "auc" and row.value is None}
    assert notes.keys() == {"lira"} and "in one of the models and out of another" in notes["lira"]


def test_members_and_others_that_are_swapped_pass_no_limit(tmp_path, capsys):
    arrays = table(0)
    np.savez(tmp_path / "p.npz", **arrays | {"membership": ~arrays["membership"]})
    limits = ["--set", "limits.auc=.8", "--set", "limits.attacker=no-shadows", "--set", "limits.decide=value"]
    assert audit(tmp_path / "p.npz", tmp_path / "run", "--attack", "conf", *limits) == 3
    printed = capsys.readouterr()
    assert "members and others look swapped" in printed.err and "or the file's member column" in printed.err
    assert "INCONCLUSIVE. Nothing is known of leakage: members and others" in " ".join(printed.out.split())


def columns_of(arrays):
    named = {f"p{k}": arrays["probabilities"][:, k] for k in range(3)}
    named |= {"label": arrays["labels"], "membership": arrays["membership"].astype(int)}
    for s, (answers, inside) in enumerate(
        zip(arrays["shadow_probabilities"], arrays["shadow_membership"], strict=True)
    ):
        named |= {f"shadow{s}_p{k}": answers[:, k] for k in range(3)} | {f"shadow{s}_membership": inside.astype(int)}
    return named | {"group": np.where(np.arange(len(arrays["labels"])) % 2, "even", "odd")}


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_tables_with_shadows_give_the_same_rows_as_arrays(ending, tmp_path):
    arrays = shadowed()
    np.savez(tmp_path / "p.npz", **arrays)
    named, file = columns_of(arrays), tmp_path / f"p.{ending}"
    if ending == "csv":
        lines = [",".join(map(str, row)) for row in zip(*(column.tolist() for column in named.values()), strict=True)]
        file.write_text("\n".join([",".join(named), *lines]) + "\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table(named), file)
    for source in (tmp_path / "p.npz", file):
        flags = ["--attack", "conf,lira", "--out", str(tmp_path / source.suffix)]
        assert main(["audit", "--predictions", str(source), *flags]) == 0
    assert measured(tmp_path / ".npz") == measured(tmp_path / f".{ending}")
    lines = (tmp_path / f".{ending}" / "records.csv").read_text().splitlines()
    assert len(lines) == 241 and ",odd," in lines[1] and "lira rank" in lines[0]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"shadow_membership": np.ones((8, 10))}, "must be (S, N, K) and (S, N)"),
        ({"shadow_membership": np.full((8, 240), 2)}, "1 where the row trained the model"),
        ({"shadow_probabilities": np.ones((8, 240, 3))}, "rows sum to one"),
    ],
)
def test_shadows_that_do_not_fit_are_one_sentence(change, sentence, tmp_path, capsys):
    np.savez(tmp_path / "p.npz", **(shadowed() | change))
    assert audit(tmp_path / "p.npz", tmp_path / "run") == 2
    said = capsys.readouterr().err
    assert sentence in said and said.count("\n") == 1


def in_out_file(path, save=np.savez, rows=200, models=4):
    """Write answers of a model and of in-out shadow models; members and non-members are mixed."""
    rng, arrays = np.random.default_rng(5), table(5, rows)
    order = rng.permutation(rows)
    arrays = {name: array[order] for name, array in arrays.items()}
    inside = np.stack([rng.permutation(models) < models // 2 for _ in range(rows)], 1)
    logits = rng.normal(size=(models, rows, 3)) + np.eye(3)[arrays["labels"]] * np.where(inside, 3.0, 1.0)[..., None]
    shadows = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    save(path, **arrays, shadow_probabilities=shadows.astype(np.float32), shadow_membership=inside)
    return arrays


def list_measures(out):
    return {(r.attack, r.metric): (r.value, r.low, r.high) for r in load_rows(out) if r.attack and not r.timing}


def test_a_mapped_file_in_parts_gives_the_rows_of_the_whole(tmp_path, monkeypatch):
    arrays = in_out_file(tmp_path / "p.npz")
    in_out_file(tmp_path / "q.npz", np.savez_compressed)
    assert isinstance(map_npz(tmp_path / "p.npz")["shadow_probabilities"], np.memmap)
    assert not isinstance(map_npz(tmp_path / "q.npz")["shadow_probabilities"], np.memmap)
    attacks = ["--attack", "conf,mentr,lira,rmia,correctness"]
    assert audit(tmp_path / "q.npz", tmp_path / "whole", *attacks) == 0
    monkeypatch.setattr(predictions, "AT_ONCE", 7)
    monkeypatch.setattr(prediction_files, "AT_ONCE", 7)
    monkeypatch.setattr(membership, "AT_ONCE", 7)
    assert audit(tmp_path / "p.npz", tmp_path / "parts", *attacks) == 0
    assert list_measures(tmp_path / "parts") == list_measures(tmp_path / "whole")
    confidence = arrays["probabilities"][np.arange(200), arrays["labels"]]
    value, low, high = list_measures(tmp_path / "parts")["conf", "auc"]
    assert value == pytest.approx(roc_auc_score(arrays["membership"], confidence), abs=1e-9) and low < value < high
    false, true, _ = roc_curve(arrays["membership"], confidence, drop_intermediate=False)
    tpr, _, _ = list_measures(tmp_path / "parts")["conf", "tpr_at_fpr_0.1"]
    assert tpr == pytest.approx(true[false <= 0.1 + 1e-12].max(), abs=1e-12)
    lines = list(csv.DictReader((tmp_path / "parts" / "records.csv").open()))
    assert [line["member"] == "1" for line in lines] == arrays["membership"].tolist()
    assert [float(line["conf score"]) for line in lines] == pytest.approx(confidence.tolist(), rel=1e-5)


def test_every_attack_reads_the_file_once(tmp_path, monkeypatch):
    in_out_file(tmp_path / "p.npz")
    asked = Counter()
    build = predictions._box

    def counting(answers, marks):
        box = build(answers, marks)

        def predict(inputs):
            asked[answers.data_ptr()] += len(inputs)
            return box.predict(inputs)

        return replace(box, predict=predict)

    monkeypatch.setattr(predictions, "_box", counting)
    for attack in ("conf", "lira", "rmia"):
        asked.clear()
        assert audit(tmp_path / "p.npz", tmp_path / attack, "--attack", attack) == 0
        beside = 200 + 200 + 200  # the accuracy, correctness, and RMIA's population, here all rows
        assert len(asked) == 5 and max(asked.values()) <= 200 + beside
        assert max(sorted(asked.values())[:4]) <= 200 + 200 + 1  # the attack, the accuracy, and one row: the classes


@pytest.mark.parametrize("cut", [10, 200, 2000])
def test_a_damaged_file_that_would_be_mapped_is_one_sentence(tmp_path, capsys, cut):
    in_out_file(tmp_path / "p.npz")
    content = (tmp_path / "p.npz").read_bytes()
    (tmp_path / "p.npz").write_bytes(content[:20] + bytes(cut) + content[20 + cut :])
    assert audit(tmp_path / "p.npz", tmp_path / "run") == 2
    assert capsys.readouterr().err.count("\n") == 1
