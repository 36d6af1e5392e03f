from xml.etree import ElementTree

from secateur.evaluation.limits import check, junit
from secateur.runs.rows import Row


def row(**fields):
    common = {"model": "m", "dataset": "d", "pruner": "snip", "sparsity": 0.7, "defense": "basic", "adaptive": False}
    return Row(**(common | {"attack": "conf", "seed": 0} | fields))


def test_the_low_end_decides_and_originals_are_not_held_to_it():
    rows = [
        row(metric="auc", value=0.65, low=0.59, high=0.7),
        row(metric="auc", value=0.65, low=0.61, high=0.7, attack="mentr"),
        row(metric="auc", value=0.99, low=0.98, high=1.0, pruner="none"),
        row(metric="auc", value=None, attack="nn"),
    ]
    checks = check(rows, {"auc": 0.6})
    assert [each.passed for each in checks] == [True, False]
    assert (
        checks[1].sentence == "snip 0.7, basic, under mentr, seed 0: auc 0.650 (at least 0.610) is above the limit 0.6"
    )


def test_the_accuracy_drop_is_measured_from_the_models_own_original():
    originals = [
        row(metric="test_accuracy", value=0.90, low=0.88, high=0.92, pruner="none", attack=None),
        row(
            metric="test_accuracy", value=0.70, low=0.68, high=0.72, pruner="none", attack=None, extra={"original": "s"}
        ),
    ]
    pruned = row(metric="test_accuracy", value=0.80, low=0.79, high=0.81, attack=None)
    slim = row(metric="test_accuracy", value=0.69, low=0.67, high=0.71, attack=None, extra={"original": "s"})
    first, second = check([*originals, pruned, slim], {"accuracy_drop": 0.02})
    assert (round(first.value, 3), round(first.low, 3), first.passed) == (0.1, 0.07, False)
    assert (round(second.value, 3), second.passed) == (0.01, True)


def test_what_a_ci_server_reads():
    suite = ElementTree.fromstring(
        junit(check([row(metric="auc", value=0.7, low=0.65, high=0.8)], {"auc": 0.6})).encode()
    )
    assert (suite.get("tests"), suite.get("failures")) == ("1", "1")
    assert "is above the limit" in suite[0][0].get("message")


def test_silence_is_not_a_pass():
    unmeasured = row(metric="auc", value=None)
    (only,) = check([unmeasured], {"auc": 0.9})
    assert not only.passed and "was not measured" in only.sentence
    (drop,) = check([row(metric="auc", value=0.5, low=0.4, high=0.6)], {"accuracy_drop": 0.02})
    assert not drop.passed


def test_an_original_that_is_audited_alone_is_held_to_the_limits():
    (only,) = check([row(metric="auc", value=0.9, low=0.8, high=0.95, pruner="none")], {"auc": 0.6})
    assert not only.passed
