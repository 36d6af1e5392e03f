"""Canaries: a private training in one run, with real Opacus; noise that is missing refutes the claimed epsilon."""

import pytest
import torch

from secateur.cli import main
from secateur.errors import WrongInput
from secateur.evaluation.limits import Outcome, check_claims
from secateur.experiments.exposure import count_right, draw_canaries
from secateur.metrics.epsilon import one_run_bound
from secateur.runs.folder import load_rows
from secateur.seeding import derive


def test_canaries_are_members_with_wrong_labels_and_fair_coins():
    rows, labels = torch.arange(1000, 3000), torch.arange(2000) % 10
    canaries = draw_canaries(rows, labels, 10, 1000, derive(0, "canaries"))
    assert len(set(canaries.rows.tolist())) == 1000 and set(canaries.rows.tolist()) <= set(rows.tolist())
    assert (canaries.labels != labels[canaries.rows - 1000]).all() and canaries.labels.unique().tolist() == [*range(10)]
    assert 440 < int(canaries.included.sum()) < 560
    with pytest.raises(WrongInput, match="canaries: 1001 is too many for 2000 members; allowed: at most 1000"):
        draw_canaries(rows, labels, 10, 1001, derive(0, "canaries"))


def test_guesses_are_the_two_outer_quarters():
    scores = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2])
    inside = torch.tensor([True, True, False, False, True, True, False, True])
    # 0.9 and 0.8 are guessed to be in: both are; 0.3 and 0.2 to be out: one is
    assert count_right(scores, inside) == (4, 3)
    assert count_right(scores, torch.tensor([True] * 4 + [False] * 4)) == (4, 4)


RUN = ["--defense", "dp-sgd-scratch:noise_multiplier=15:delta=1e-4", "--canaries", "80", "--pruner", "none"]
RUN += ["--attack", "conf", "--shadows", "1", "--set", "examples=800", "--set", "train.patience=null"]
RUN += ["--set", "train.learning_rate=.01", "--model", "mlp"]


def audit(out, epochs, *flags):
    return main(["audit", "--out", str(out), *RUN, "--set", f"train.epochs={epochs}", *flags])


def by_metric(out):
    return {row.metric: row for row in load_rows(out) if "canaries" in row.extra.get("original", "")}


def test_real_noise_keeps_its_claim(tmp_path):
    pytest.importorskip("opacus", reason="left out: the extra dp is not installed")
    assert audit(tmp_path, 2) == 0
    rows = by_metric(tmp_path)
    bound, claimed = rows["epsilon_lower"], rows["claimed_epsilon"]
    assert "80 canaries, 40 guesses, " in bound.note and "for one example, at 95 % confidence" in bound.note
    right = int(bound.note.split("guesses, ")[1].split()[0])
    assert bound.value == one_run_bound(80, 40, right, rows["claimed_delta"].value)
    (answer,) = check_claims(list(rows.values()))
    assert 0 < claimed.value < 5 and answer.outcome is Outcome.WITHIN and "not refuted" in answer.sentence


def test_a_training_that_forgets_its_noise_is_refuted(tmp_path, monkeypatch, capsys):
    optimiser = pytest.importorskip("opacus.optimizers.optimizer", reason="left out: the extra dp is not installed")
    monkeypatch.setattr(optimiser, "_generate_noise", lambda std, reference, **_: torch.zeros_like(reference))
    assert audit(tmp_path, 20, "--set", "train.learning_rate=.05") == 1
    said = capsys.readouterr().err
    assert "is refuted: the canaries' training shows at least" in said and "80 canaries" in said
    assert "a claimed epsilon is refuted" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--canaries", "20"], "canaries: need a private training; set the defense dp-sgd-scratch"),
        (["--canaries", "3", "--defense", "dp-sgd-scratch"], "canaries"),
        (["--canaries", "20", "--defense", "dp-sgd"], "canaries: need a private training"),
    ],
)
def test_canaries_need_a_private_training(flags, said, tmp_path, capsys):
    assert main(["audit", "--out", str(tmp_path), *flags]) == 2
    assert said in capsys.readouterr().err
