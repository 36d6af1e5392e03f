"""Tables in a terminal of 80 columns."""

from audited import attack_rows, labels_of, model_rows

from secateur.evaluation.limits import Policy, check
from secateur.report.terminal import print_audit


def test_names_are_not_cut_up_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    rows = []
    for pruner in ("l1-unstructured", "l1-structured:groups=coupled"):
        labels = labels_of(pruner, 0.5, "ppb:strength=4.0")
        rows += model_rows(labels, 0, 0.9)
        rows += attack_rows(labels | {"attack": "samia", "adaptive": True}, 0, 0.6)
    print_audit(rows)
    told = capsys.readouterr().out
    words = told.split()
    for name in ("l1-unstructured", "l1-structured", "groups=coupled", "strength=4.0", "samia", "(adaptive)"):
        assert name in words, name
    assert max(map(len, told.splitlines())) <= 80


def test_the_terminal_answers_with_the_page_when_there_are_limits(capsys):
    labels = labels_of("l1-unstructured", 0.5, "basic")
    rows = [*model_rows(labels, 0, 0.9), *attack_rows(labels | {"attack": "conf", "adaptive": False}, 0, 0.9)]
    print_audit(rows, check(rows, Policy({"auc": 0.97})))
    told = capsys.readouterr().out
    assert "INCONCLUSIVE. " in told and "LEAKS" not in told
