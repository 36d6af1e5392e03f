"""Audits of digits, small enough for every test run: who sees what, and what the rows say."""

import json
import weakref

import numpy as np
import pytest
import torch

from secateur.cli import main
from secateur.config import Audit, read
from secateur.data.load import load
from secateur.evaluation.attack_strength import read_unmet
from secateur.experiments import pipeline
from secateur.experiments.audit import parts_of
from secateur.runs.folder import load_figures, load_rows

TINY = ["--set", "train.epochs=4", "--set", "finetune.epochs=2", "--set", "train.patience=null"]
FEW = ["--set", "examples=400"]


def audit(out, *arguments, tiny=TINY):
    return main(["audit", "--out", str(out), *tiny, *map(str, arguments)])


def found(folder, metric, **fields):
    return [
        row
        for row in load_rows(folder)
        if row.metric == metric and all((vars(row) | row.extra).get(k) == v for k, v in fields.items())
    ]


def test_no_row_is_on_both_sides_and_no_shadow_sees_the_victims_data():
    data = load("digits")
    parts = parts_of(read(Audit, None, {"in_out": 4}), data, seed=0)
    victim = parts.pop("victim")
    own = {*victim.train.tolist(), *victim.validation.tolist(), *victim.test.tolist()}
    for role, part in parts.items():
        assert not set(part.train.tolist()) & set(part.test.tolist())
        if role.startswith("shadow"):
            assert not own & {*part.train.tolist(), *part.validation.tolist(), *part.test.tolist()}
        else:
            assert set(part.train.tolist()) | set(part.test.tolist()) == own - set(victim.validation.tolist())


def test_gaps_figures_and_guarantees_are_recorded(tmp_path):
    flags = ["--pruner", "l1-unstructured", "--defense", "basic,dp-sgd", "--shadows", 1, "--attack", "conf", *FEW]
    assert audit(tmp_path, *flags) == 0
    gap = found(tmp_path, "generalisation_gap", pruner="l1-unstructured", defense="basic")[0]
    train, test = (
        found(tmp_path, f"{s}_accuracy", pruner="l1-unstructured", defense="basic")[0] for s in ("train", "test")
    )
    assert gap.value == pytest.approx(train.value - test.value, abs=1e-9)
    (epsilon,) = found(tmp_path, "epsilon")
    assert epsilon.defense == "dp-sgd" and "fine-tuning only" in epsilon.note and epsilon.value > 0
    kinds = {(figure["kind"], figure.get("quantity")) for figure in load_figures(tmp_path)}
    assert {
        ("roc", None),
        ("histogram", "confidence"),
        ("histogram", "sensitivity"),
        ("classes", "confidence"),
    } <= kinds
    histogram = next(f for f in load_figures(tmp_path) if f["kind"] == "histogram")
    assert sum(histogram["members"]) == pytest.approx(1)


def test_an_adaptive_attacker_and_two_defenses_at_once(tmp_path):
    flags = [
        "--pruner",
        "l1-unstructured",
        "--defense",
        "ppb+adv",
        "--adaptive",
        "--shadows",
        1,
        "--attack",
        "conf",
        *FEW,
    ]
    assert audit(tmp_path, *flags) == 0
    assert found(tmp_path, "auc", defense="ppb+adv", adaptive=True)


def test_what_a_defense_did_not_meet_is_said_in_rows_terminal_and_page(tmp_path, capsys):
    flags = ["--pruner", "l1-unstructured", "--defense", "basic,ppb", "--shadows", 2, "--attack", "conf,rmia", *FEW]
    assert audit(tmp_path, *flags) == 0
    strongest = "lira or rmia on 16 in-out models (--in-out 16)"
    missing = {"basic": strongest, "ppb": f"{strongest} that have the same defense (--adaptive)"}
    for row in found(tmp_path, "auc"):
        assert read_unmet(row.note) == f"did not meet {missing[row.defense]}"
    assert not any(read_unmet(row.note) for row in load_rows(tmp_path) if row.metric != "auc")
    printed, page = " ".join(capsys.readouterr().out.split()), (tmp_path / "report.html").read_text()
    for name, attacker in missing.items():
        sentence = f"{name} did not meet the strongest attacker known: {attacker}."
        assert printed.count(sentence) == 1 and page.count(sentence) == 1
        assert f"did not meet {attacker}</li>" in page  # the note of the AUC, in the defense's lines
    assert audit(tmp_path, *flags, "--in-out", 16) == 0
    assert {row.defense for row in found(tmp_path, "auc") if read_unmet(row.note)} == {"ppb"}
    assert audit(tmp_path, *flags, "--in-out", 16, "--adaptive") == 0
    assert not any(read_unmet(row.note) for row in load_rows(tmp_path))


def test_dp_sgd_with_another_defense_is_refused_with_the_reason(tmp_path, capsys):
    assert audit(tmp_path / "run", "--defense", "ppb+dp-sgd") == 2
    assert "sum over examples" in capsys.readouterr().err
    assert audit(tmp_path / "run", "--defense", "ppb+basic") == 2


def test_the_protocols_run(tmp_path):
    flags = ["--pruner", "l1-unstructured", "--sparsity", ".5,.9", "--shadows", 2, "--attack", "conf", *FEW]
    assert audit(tmp_path, *flags, "--protocol", "unknown-sparsity") == 0
    rows = found(tmp_path, "attack_accuracy")
    assert len(rows) == 9 and sum(row.extra["known"] for row in rows) == 3
    assert audit(tmp_path, *flags, "--protocol", "select") == 0  # of the models that are there already
    chosen = {row.extra["attacker_sparsity"] for row in found(tmp_path, "auc", protocol="select")}
    assert len(chosen) == 1 and chosen <= {0.5, 0.9}  # one attacker makes one choice, whoever the victim is
    assert audit(tmp_path, *flags, "--protocol", "unknown", "--set", "experiments=2") == 0
    assert {row.extra["experiment"] for row in found(tmp_path, "auc")} == {0, 1}


def test_online_attacks_take_the_in_out_models_and_others_the_shadows(tmp_path):
    flags = ["--pruner", "none", "--attack", "conf,lira", "--shadows", 2, *FEW]
    assert audit(tmp_path, *flags) == 0
    assert "offline" in found(tmp_path, "auc", attack="lira")[0].note
    assert audit(tmp_path, *flags, "--in-out", 4) == 0
    assert "offline" not in (found(tmp_path, "auc", attack="lira")[0].note or "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that somebody trained before, and their data: members first."""
    folder = tmp_path_factory.mktemp("given")
    data = load("digits")
    order = torch.randperm(len(data.inputs), generator=torch.Generator().manual_seed(3))[:1000]
    inputs, labels = data.inputs[order].numpy(), data.labels[order].numpy()
    np.savez(folder / "own.npz", inputs=inputs, labels=labels, train_size=600)
    out = folder / "model.safetensors"
    flags = ["--data", str(folder / "own.npz"), "--rows", "all", "--sparsity", "0", "--out", str(out)]
    assert main(["prune", *flags, *TINY]) == 0
    return folder


def test_a_model_that_is_already_trained(trained, tmp_path):
    given = ["--data", trained / "own.npz", "--weights", trained / "model.safetensors", "--shadows", 1]
    assert audit(tmp_path / "a", *given, "--pruner", "none", "--attack", "conf,correctness") == 0
    assert len(found(tmp_path / "a", "auc")) == 2
    assert found(tmp_path / "a", "train_accuracy")[0].value > 0.5
    assert audit(tmp_path / "c", *given, "--pruner", "none", tiny=[]) == 0  # nothing chosen: what needs no shadows
    assert found(tmp_path / "c", "auc", attack="conf")[0].value > 0.5  # a ranking needs no shadows
    undecided = found(tmp_path / "c", "balanced_accuracy", attack="conf")[0]
    assert undecided.value is None and "shadow" in undecided.note
    ranked = [row.attack for row in found(tmp_path / "c", "auc") if row.value is not None]
    assert ranked == ["conf", "xent", "entropy", "mentr", "top1-conf", "correctness", "blindmi"]
    assert audit(tmp_path / "d", *given, "--pruner", "none", "--attack", "samia,conf", tiny=[]) == 0
    silent = found(tmp_path / "d", "auc", attack="samia")[0]
    assert silent.value is None and "train" in silent.note


def test_the_attacker_of_a_given_model_trains_in_out_models_unless_the_user_chose(trained, tmp_path, capsys):
    flags = ["--data", trained / "own.npz", "--weights", trained / "model.safetensors", "--pruner", "none"]
    assert audit(tmp_path / "a", *flags, "--attack", "conf,lira", "--set", "train.epochs=2") == 0
    in_out = {path.name for path in (tmp_path / "a" / "artifacts").glob("train-*")}
    assert len(in_out) == 8
    assert "offline" not in (found(tmp_path / "a", "auc", attack="lira")[0].note or "")
    (shadows,) = found(tmp_path / "a", "valid", check="shadows")
    assert shadows.note.count("8 shadow models, each trained on ") == 1
    (asked,) = found(tmp_path / "a", "nonmembers")
    assert asked.value == 360  # a tenth of 400 stops the training, and no row is given to disjoint shadows
    capsys.readouterr()
    assert audit(tmp_path / "b", *flags, "--dry-run") == 0
    planned = capsys.readouterr().out
    assert "with 0 shadow models and 8 in-out models\n" in planned and "with conf, lira, rmia, samia\n" in planned
    assert audit(tmp_path / "b", *flags, "--shadows", 1, "--dry-run") == 0
    chosen = capsys.readouterr().out
    assert "with 1 shadow models\n" in chosen and "with conf, samia\n" in chosen  # one is too few for lira


def test_a_limit_that_is_passed_gives_exit_code_1_and_says_so(tmp_path, capsys):
    flags = ["--pruner", "l1-unstructured", "--attack", "conf", "--shadows", 1, *FEW]
    report = tmp_path / "junit.xml"
    assert audit(tmp_path / "run", *flags, "--set", "limits.auc=0.1", "--junit", report) == 1
    assert "is above the limit 0.1" in capsys.readouterr().err
    assert 'failures="1"' in report.read_text()
    assert audit(tmp_path / "run", *flags, "--set", "limits.auc=0.99", "--junit", report) == 3
    assert "shadows do not resemble the victim" in capsys.readouterr().err
    assert 'failures="0" errors="1"' in report.read_text()


def test_a_limit_that_is_shown_to_hold_gives_exit_code_0(tmp_path):
    flags = ["--pruner", "none", "--attack", "conf,lira", "--shadows", 2, "--set", "train.epochs=12", "--seeds", 1]
    report = tmp_path / "junit.xml"
    assert audit(tmp_path / "run", *flags, "--set", "limits.auc=0.9", "--junit", report) == 0
    assert 'failures="0" errors="0"' in report.read_text()


def test_the_paired_drop_and_change_are_those_of_the_models(tmp_path):
    flags = ["--pruner", "l1-unstructured", "--sparsity", 0.9, "--attack", "conf", "--shadows", 1, *FEW]
    assert audit(tmp_path, *flags) == 0
    before, after = (found(tmp_path, "test_accuracy", pruner=name)[0].value for name in ("none", "l1-unstructured"))
    (drop,) = found(tmp_path, "accuracy_drop")
    assert drop.value == pytest.approx(before - after, abs=1e-9) and drop.low < drop.value < drop.high
    before, after = (found(tmp_path, "auc", pruner=name)[0].value for name in ("none", "l1-unstructured"))
    (change,) = found(tmp_path, "auc_change")
    assert change.value == pytest.approx(after - before, abs=1e-9) and change.pruner == "l1-unstructured"
    head, *lines = (tmp_path / "records.csv").read_text().splitlines()
    assert head.startswith("model,seed,id,label,group,member,conf score,") and len(lines) == 2 * 180


def test_a_dry_run_does_nothing(tmp_path, capsys):
    assert audit(tmp_path / "run", "--dry-run") == 0
    assert "prune and fine-tune slimming 0.7" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_saved_predictions_are_audited_without_a_model(tmp_path, capsys):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 3, 400)
    membership = np.arange(400) < 200
    logits = rng.normal(size=(400, 3)) + np.eye(3)[labels] * np.where(membership, 3.0, 1.0)[:, None]
    table = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    shadow = {"shadow_probabilities": table, "shadow_labels": labels, "shadow_membership": membership}
    np.savez(tmp_path / "p.npz", probabilities=table, labels=labels, membership=membership, **shadow)
    flags = ["--attack", "conf,correctness,blindmi", "--predictions"]
    assert audit(tmp_path / "a", *flags, tmp_path / "p.npz") == 0
    assert found(tmp_path / "a", "auc", attack="conf")[0].value > 0.75
    assert "new questions" in found(tmp_path / "a", "auc", attack="blindmi")[0].note
    lines = [",".join(map(str, [*p, y, int(m)])) for p, y, m in zip(table, labels, membership, strict=True)]
    (tmp_path / "p.csv").write_text("p0,p1,p2,label,membership\n" + "\n".join(lines))
    assert audit(tmp_path / "b", *flags, tmp_path / "p.csv") == 0
    same = [found(tmp_path / x, "auc", attack="correctness")[0].value for x in "ab"]
    assert same[0] == pytest.approx(same[1])
    ranks = [found(tmp_path / x, "auc", attack="conf")[0].value for x in "ab"]
    assert ranks[0] == pytest.approx(ranks[1])  # a shadow adds a threshold and does not change the ranking
    decided, undecided = (found(tmp_path / x, "balanced_accuracy", attack="conf")[0] for x in "ab")
    assert decided.value > 0.7 and undecided.value is None and "shadow" in undecided.note
    capsys.readouterr()
    np.savez(tmp_path / "bad.npz", probabilities=table * 2, labels=labels, membership=membership)
    assert audit(tmp_path / "c", *flags, tmp_path / "bad.npz") == 2
    assert "sum to one" in capsys.readouterr().err
    np.savez(tmp_path / "all.npz", probabilities=table, labels=labels, membership=np.ones(400))
    assert audit(tmp_path / "c", *flags, tmp_path / "all.npz") == 2


def test_the_original_and_the_pruned_model_meet_the_same_attacks(tmp_path, capsys):
    assert audit(tmp_path, "--pruner", "l1-unstructured", "--attack", "conf,mentr", "--shadows", 1, "--json", *FEW) == 0
    rows = json.loads(capsys.readouterr().out)
    pairs = {(row["pruner"], row["attack"]) for row in rows if row["metric"] == "auc"}
    assert pairs == {(p, a) for p in ("none", "l1-unstructured") for a in ("conf", "mentr")}


def test_a_users_network_that_was_edited_is_trained_anew(tmp_path, monkeypatch):
    import importlib
    import sys

    monkeypatch.chdir(tmp_path)
    layers = "nn.Flatten(), nn.Linear(64, 16), nn.{}(), nn.Linear(16, 10)"
    source = f"from torch import nn\ndef net(): return nn.Sequential({layers})\n"
    flags = ["--model", "edited_net:net", "--pruner", "none", "--attack", "correctness", "--shadows", 1, *FEW]
    artifacts = []
    for activation in ("ReLU", "Tanh"):
        (tmp_path / "edited_net.py").write_text(source.format(activation))
        sys.modules.pop("edited_net", None)
        importlib.invalidate_caches()
        assert audit(tmp_path / "run", *flags) == 0
        artifacts.append({path.name for path in (tmp_path / "run" / "artifacts").glob("train-*")})
    assert len(artifacts[1]) == 2 * len(artifacts[0])


def test_private_from_the_start_attacks_shadows_of_the_same_structure(tmp_path):
    tiny = ["--set", "train.epochs=1", "--set", "finetune.epochs=1"]
    flags = ["--pruner", "l1-unstructured", "--defense", "dp-sgd-scratch", "--adaptive", "--shadows", 1]
    assert audit(tmp_path, *flags, "--attack", "conf", *FEW, tiny=tiny) == 0
    assert {row.extra["original"] for row in found(tmp_path, "auc")} == {"dp-sgd-scratch"}


def test_other_members_are_other_measurements(trained, tmp_path):
    def rows(train_size, out):
        with np.load(trained / "own.npz") as arrays:
            part = {name: arrays[name][:900] for name in ("inputs", "labels")}
            np.savez(tmp_path / "own.npz", **part, train_size=train_size)
        given = ["--data", tmp_path / "own.npz", "--weights", trained / "model.safetensors", "--pruner", "none"]
        assert audit(out, *given, "--attack", "correctness", tiny=[]) == 0
        return [row.value for row in load_rows(out) if not row.timing]

    first = rows(300, tmp_path / "run")
    assert rows(600, tmp_path / "run") == rows(600, tmp_path / "fresh") != first


def test_seeds_together_give_what_each_gives_alone(tmp_path):
    flags = ["--pruner", "l1-unstructured", "--attack", "conf", "--shadows", 1, *FEW]
    assert audit(tmp_path / "both", *flags, "--seeds", 2) == 0
    assert audit(tmp_path / "one", *flags, "--set", "seeds=[1]") == 0
    alone = [row for row in load_rows(tmp_path / "one") if not row.timing]
    assert [row for row in load_rows(tmp_path / "both") if row.seed == 1 and not row.timing] == alone


def test_models_that_train_one_by_one_copy_their_rows_one_by_one(tmp_path, monkeypatch):
    """Five seeds' victims and shadows of a CIFAR would be 6 GB."""
    task, alive = pipeline.ModelJob.task, []

    def watched(*given):
        assert all(rows() is None for rows in alive)
        made = task(*given)
        alive.append(weakref.ref(made.train.inputs))
        return made

    monkeypatch.setattr(pipeline.ModelJob, "task", watched)
    flags = ["--pruner", "l1-unstructured", "--attack", "correctness", "--shadows", 1, "--seeds", 2, *FEW]
    assert audit(tmp_path / "run", *flags) == 0
    assert len(alive) == 8
