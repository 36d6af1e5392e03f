"""The evidence pack: one record in several forms, with a published schema."""

import json
import shutil
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from secateur.cli import main
from secateur.config import PolicyFile
from secateur.errors import WrongInput
from secateur.report.evidence import BROWSERS, EvidencePack, build_pack, write_pack
from secateur.runs.folder import open_run
from secateur.runs.rows import Row

SCHEMA = Path(__file__).parents[2] / "docs" / "evidence.schema.json"
POLICY = PolicyFile.model_validate({"set_by": "Privacy office", "limits": {"auc": 0.6, "attacker": "no-shadows"}})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished audit of saved predictions that leak."""
    folder = tmp_path_factory.mktemp("evidence")
    rng = np.random.default_rng(0)
    inside, labels = np.arange(600) < 300, np.arange(600) % 2
    right = np.clip(rng.normal(np.where(inside, 0.85, 0.7), 0.1), 0.01, 0.99)
    answers = np.stack([np.where(labels == k, right, 1 - right) for k in (0, 1)], 1)
    np.savez(folder / "p.npz", probabilities=answers, labels=labels, membership=inside)
    assert main(["audit", "--predictions", str(folder / "p.npz"), "--out", str(folder / "run")]) == 0
    return folder / "run"


def test_the_pack_decides_and_names_the_strongest_attack_by_measure(run):
    pack = build_pack(run, POLICY, today=date(2026, 11, 16))
    assert pack.outcome == "above" and pack.created == "2026-11-16" and pack.policy["set_by"] == "Privacy office"
    auc = next(item for item in pack.worst if item.measure == "auc")
    assert auc.attack in ("conf", "mentr") and auc.low > 0.7 and auc.covers == "rows of one training"
    assert pack.subject["members asked about"] == 300 and len(pack.subject["sha256 of predictions"]) == 64
    assert {a.name: a.models for a in pack.adversaries}["conf"] == 0


def test_the_pack_says_what_was_not_tested_and_why(run):
    text = "\n".join(build_pack(run).not_tested)
    for wanted in ("lira", "shadow models", "one seed", "differ by themselves", "property inference"):
        assert wanted in text
    assert all(": " in sentence for sentence in build_pack(run).not_tested)  # each with its reason
    assert "blindmi, label-only, samia: ask the model new questions" in text


def test_the_command_is_the_one_that_was_typed(run):
    command = build_pack(run).provenance["command"]
    assert command == f"secateur audit --predictions {run.parent / 'p.npz'} --out {run}"


def write_run(folder, rows, settings):
    """Write the folder of a finished run with these rows."""
    with open_run(folder, "audit", settings, seeds=[0]) as opened:
        opened.add(rows)
    return folder


def leak(attack="lira", **labels):
    common = {"model": "m", "dataset": "d", "pruner": "none", "sparsity": 0.0, "defense": "none", "seed": 0}
    common |= {"attack": attack, "metric": "auc", "value": 0.7, "low": 0.6, "high": 0.8}
    return Row(**(common | labels))


@pytest.mark.parametrize(
    ("settings", "attack", "models"),
    [
        ({"shadows": 5, "in_out": 0}, "lira", 5),
        ({"shadows": 0, "in_out": 8}, "samia", 8),
        ({"shadows": 5, "in_out": 8}, "lira", 8),
        ({"shadows": 5, "in_out": 8}, "samia", 5),
        ({"shadows": 5, "predictions": "p.npz"}, "lira", 3),
    ],
)
def test_an_attackers_models_are_counted(settings, attack, models, tmp_path):
    note = "the shadows resemble the victim (3 shadow models, each trained on 9 rows: ...)"
    likeness = leak(None, metric="valid", value=1.0, note=note, extra={"check": "shadows"})
    pack = build_pack(write_run(tmp_path / "run", [leak(attack), likeness], settings))
    assert [a.models for a in pack.adversaries] == [models]


def test_before_compression_is_shown_only_where_something_was_compressed(tmp_path):
    assert build_pack(write_run(tmp_path / "a", [leak()], {})).before == []
    pack = build_pack(write_run(tmp_path / "b", [leak(), leak(pruner="snip", sparsity=0.5, value=0.75)], {}))
    assert [(x.value, y.value) for x, y in zip(pack.before, pack.worst, strict=True)] == [(0.7, 0.75)]


def test_without_a_policy_nothing_is_decided(run):
    pack = build_pack(run)
    assert pack.outcome == "undecided" and pack.checks == [] and "nothing is decided" in pack.sentence


def test_every_form_says_the_same(run):
    files = write_pack(run, ["html", "md", "json", "model-card"], POLICY)
    assert [file.name for file in files] == ["evidence.html", "evidence.md", "evidence.json", "model-card.md"]
    for file in files:
        text = file.read_text()
        assert "not tested" in text.lower() or file.suffix == ".json"
        assert "FAIL" in text and ("TPR at 1 % FPR" in text or "tpr_at_fpr_0.01" in text)
    assert "<svg" in files[0].read_text() and "<script" not in files[0].read_text()


def test_json_follows_the_published_schema(run):
    (file,) = write_pack(run, ["json"], POLICY)
    TypeAdapter(EvidencePack).validate_python(json.loads(file.read_text()))
    assert json.loads(SCHEMA.read_text()) == TypeAdapter(EvidencePack).json_schema(), (
        "docs/evidence.schema.json is old; write TypeAdapter(EvidencePack).json_schema() there"
    )


@pytest.mark.skipif(not any(map(shutil.which, BROWSERS)), reason="no browser")
def test_the_pdf_has_two_to_four_pages(run):
    (file,) = write_pack(run, ["pdf"], POLICY)
    content = file.read_bytes()
    assert content.startswith(b"%PDF") and 2 <= content.count(b"/Type /Page\n") + content.count(b"/Type /Page ") <= 4


def test_an_unknown_form_is_one_sentence(run):
    with pytest.raises(WrongInput, match="'docx' is not known; allowed: html"):
        write_pack(run, ["docx"])
