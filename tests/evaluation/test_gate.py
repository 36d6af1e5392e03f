import json
from datetime import date

import pytest

from secateur.config import PolicyFile
from secateur.evaluation.gate import compare_with_baseline, decide, render_markdown, sarif
from secateur.evaluation.limits import Outcome
from secateur.runs.rows import Row

ABOVE, INCONCLUSIVE, WITHIN = Outcome.ABOVE, Outcome.INCONCLUSIVE, Outcome.WITHIN


def auc(value, spread=0.02, **fields):
    common = {"model": "m", "dataset": "d", "pruner": "snip", "sparsity": 0.7, "defense": "basic", "attack": "lira"}
    row = {"seed": 0, "metric": "auc", "value": value, "low": value - spread, "high": value + spread}
    return Row(**(common | row | fields))


def policy(**fields):
    return PolicyFile.model_validate({"limits": {"auc": 0.7}} | fields)


@pytest.mark.parametrize(("value", "wanted"), [(0.6, WITHIN), (0.69, INCONCLUSIVE), (0.8, ABOVE)])
def test_the_gate_decides_by_the_policy(value, wanted):
    gate = decide({"run": [auc(value)]}, policy())
    assert gate.outcome is wanted and gate.sentence.startswith({"above": "FAIL"}.get(wanted, wanted.upper()[:6]))


def test_worse_than_the_last_release_by_more_than_the_interval_fails():
    # The difference of two intervals of +-.02 is +-.0283 wide.
    assert compare_with_baseline([auc(0.65)], [auc(0.60)], ["auc"])[0].outcome is ABOVE
    assert compare_with_baseline([auc(0.62)], [auc(0.60)], ["auc"])[0].outcome is WITHIN
    gate = decide({"run": [auc(0.65)]}, policy(), baseline=[auc(0.60)])
    assert gate.outcome is ABOVE and [item.outcome for item in gate.checks["run"]] == [WITHIN, ABOVE]
    assert compare_with_baseline([auc(0.65)], [], ["auc"])[0].outcome is INCONCLUSIVE


def test_the_strongest_attack_of_each_release_is_compared():
    now = [auc(0.55, attack="conf"), auc(0.66)]
    before = [auc(0.65, attack="conf"), auc(0.52)]
    assert compare_with_baseline(now, before, ["auc"])[0].outcome is WITHIN


CONF = {"attack": "conf"}


def shadows(number):
    note = f"the shadows resemble the victim ({number} shadow models, each trained on 90 rows: ...)"
    return auc(1.0, attack=None, metric="valid", note=note, extra={"check": "shadows"})


@pytest.mark.parametrize(
    ("now", "before", "wanted", "said"),
    [
        # what was weaker before cannot show that the model became worse, unless an attack of both does
        ([auc(0.52, **CONF), auc(0.65)], [auc(0.51, **CONF)], INCONCLUSIVE, "of this run, not the last release: lira"),
        ([auc(0.60, **CONF), auc(0.65)], [auc(0.51, **CONF)], ABOVE, ""),
        ([auc(0.51, **CONF), auc(0.52)], [auc(0.51, **CONF)], WITHIN, ""),  # stronger attackers find no more now
        ([auc(0.52)], [auc(0.51, **CONF)], INCONCLUSIVE, "last release, not this run: conf"),
        # what is weaker now cannot show that the model is no worse
        ([auc(0.51, **CONF)], [auc(0.52, **CONF), auc(0.60)], INCONCLUSIVE, "last release, not this run: lira"),
        ([auc(0.70, **CONF)], [auc(0.52, **CONF), auc(0.60)], ABOVE, ""),
        ([auc(0.60)], [auc(0.60), auc(0.52, attack="entropy")], WITHIN, ""),  # a weak attack less changes nothing
        ([auc(0.60), shadows(2)], [auc(0.60), shadows(8)], INCONCLUSIVE, "had 2 shadow models, in the last release 8"),
        ([auc(0.70), shadows(8)], [auc(0.60), shadows(2)], INCONCLUSIVE, "had 8 shadow models, in the last release 2"),
        ([auc(0.60), shadows(8)], [auc(0.60), shadows(2)], WITHIN, ""),
        ([auc(0.60)], [auc(0.60, adaptive=True)], INCONCLUSIVE, "not this run: lira (adaptive)"),
    ],
)
def test_a_baseline_of_other_attackers_is_said_and_inconclusive_where_it_matters(now, before, wanted, said):
    (check,) = compare_with_baseline(now, before, ["auc"])
    assert check.outcome is wanted and said in check.reason
    text = render_markdown(decide({"run": now}, policy(limits={}), baseline=before))
    assert "attackers of " in text or "shadow models" in text


def test_other_data_than_those_of_the_last_release_are_said():
    gate = decide({"run": [auc(0.6)]}, policy(), baseline=[auc(0.6, dataset="other")])
    assert gate.outcome is WITHIN and "- run: the data are d, those of the last release other" in render_markdown(gate)


def test_a_policy_past_its_review_or_without_limits_decides_nothing():
    late = decide({"run": [auc(0.6)]}, policy(review_by="2026-01-01"), today=date(2026, 1, 2))
    assert late.outcome is INCONCLUSIVE and "reviewed by 2026-01-01" in render_markdown(late)
    assert decide({"run": [auc(0.9)]}, policy(review_by="2026-01-01"), today=date(2026, 1, 2)).outcome is ABOVE
    empty = decide({"run": [auc(0.6)]}, policy(limits={}))
    assert empty.outcome is INCONCLUSIVE and empty.reasons == ["the policy has no limits"]


def test_the_summary_and_sarif_say_the_same():
    gate = decide({"runs/a": [auc(0.8), auc(0.6, sparsity=0.5)]}, policy(set_by="Privacy office", set_on="2026-11-01"))
    text = render_markdown(gate)
    assert "### Secateur: ABOVE" in text and "| 0.800 [0.780, 0.820] (lira) | 0.7 | FAIL |" in text
    assert "set by Privacy office, on 2026-11-01" in text
    document = json.loads(sarif(gate, "0.2.0"))
    results = document["runs"][0]["results"]
    assert document["version"] == "2.1.0" and [result["level"] for result in results] == ["error", "none"]
    assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "runs/a/results.jsonl"


def test_the_summary_says_whether_intervals_cover_trainings():
    one, three = ([auc(0.6 + 0.001 * seed, seed=seed) for seed in range(number)] for number in (1, 3))
    assert "rows of one training; another training may differ." in render_markdown(decide({"run": one}, policy()))
    assert "Intervals cover rows and trainings." in render_markdown(decide({"run": three}, policy()))
