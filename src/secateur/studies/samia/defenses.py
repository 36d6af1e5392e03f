"""Tables of samia_ppb on defenses (Figs. 16 to 19): their cost in accuracy, and the remaining attack accuracy.

The paper omits points below 75 % of Basic's prediction accuracy or above Basic's attack accuracy. Here those points are
shown and marked. A defense is judged by its point of least attack accuracy among those with at least 75 % of Basic's
prediction accuracy. Points above Basic's attack accuracy count too: without them every defense would look good.
"""

from __future__ import annotations

from collections.abc import Iterable

from secateur.catalogue import name_of
from secateur.metrics.estimates import combine
from secateur.metrics.membership import Estimate
from secateur.studies.claims import Cases, judge_claims
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.table import Cells, TableLine, Tabulated

USEFUL = 0.75  # of Basic's prediction accuracy
TOO_INACCURATE, TOO_LEAKY = "below 75 % of Basic's accuracy", "above Basic's attack accuracy"
GUESSING = 0.5
AROUND = 0.03  # "around 50 %": at most this much above
ATTACK = ("attack_accuracy", "samia")
LOOSE, STRICT = ("l1-unstructured", "slimming"), ("l1-structured", "l2-structured")


def face_plain(results: AuditResults) -> Tabulated:
    """Return Figs. 16 and 17: the attacker's shadow models are fine-tuned with Basic."""
    ppb = {pruner: _best(results, pruner, "ppb") for pruner in _pruners(results)}
    return _lines(results), judge_claims(
        "samia",
        "non_adaptive",
        near={pruner: _room(results, model, "attack_accuracy") for pruner, model in ppb.items()},
        ranked={pruner: _room(results, model, "auc") for pruner, model in ppb.items()},
        cost={p: _less(results, model, _basic(results, p), "test_accuracy", None) for p, model in ppb.items()},
        adv=_protects(results, "adv", LOOSE),
        lower=_rivals(results, "adv", "ppb", STRICT),
        dp=_rivals(results, "dp-sgd", "ppb"),
    )


def face_adaptive(results: AuditResults) -> Tabulated:
    """Return Figs. 18 and 19: the attacker's shadow models are fine-tuned with the victim's defense."""
    accuracy = _protects(results, "ppb", _pruners(results))
    findings = judge_claims(
        "samia", "adaptive", lowers=accuracy, auc=_protects(results, "ppb", _pruners(results), "auc")
    )
    for rival, key in (("ADV", "adv"), ("DP", "dp-sgd")):
        findings += judge_claims("samia", "adaptive", {"rival": rival}, best=_rivals(results, key, "ppb", STRICT))
    for defense, key in (("PPB", "ppb"), ("ADV", "adv")):
        findings += judge_claims("samia", "adaptive", {"defense": defense}, two=_rivals(results, "dp-sgd", key, LOOSE))
    return _lines(results), findings


def marks(results: AuditResults, model: VictimKey) -> list[str]:
    """Return the reasons why the paper omits a point from its figure."""
    basic = model._replace(defense="basic")
    useful, leaks = (
        [results.mean(victim, *metric) for victim in (model, basic)] for metric in (("test_accuracy", None), ATTACK)
    )
    reasons = []
    if useful[0] and useful[1] and useful[0].value < USEFUL * useful[1].value:
        reasons.append(TOO_INACCURATE)
    if leaks[0] and leaks[1] and leaks[0].value > leaks[1].value:
        reasons.append(TOO_LEAKY)
    return reasons


def _lines(results: AuditResults) -> list[TableLine]:
    lines = []
    for model in results.keys:
        cells: Cells = {"test_accuracy": results.mean(model, "test_accuracy")}
        for attack in results.attacks:
            cells |= {f"{attack} {name}": results.mean(model, name, attack) for name in ("attack_accuracy", "auc")}
        if (epsilon := results.mean(model, "epsilon")) is not None:
            cells["epsilon of fine-tuning"] = f"{epsilon.value:.3g}"
        left_out = "; ".join(marks(results, model)) if model in results.pruned else ""
        lines.append(
            TableLine({"model": model.title}, cells, mark=f"left out by the paper: {left_out}" if left_out else "")
        )
    return lines


def _pruners(results: AuditResults) -> list[str]:
    return list(dict.fromkeys(model.pruner for model in results.pruned))


def _best(results: AuditResults, pruner: str, defense: str) -> VictimKey:
    """Return a defense's useful model of least attack accuracy; Basic's model if none is useful."""
    defended = [model for model in results.pruned if model.pruner == pruner and name_of(model.defense) == defense]
    useful = [model for model in defended if TOO_INACCURATE not in marks(results, model)]
    known = [(estimate.value, model) for model in useful if (estimate := results.mean(model, *ATTACK)) is not None]
    return min(known, key=lambda scored: scored[0])[1] if known else _basic(results, pruner)


def _basic(results: AuditResults, pruner: str) -> VictimKey:
    return next(model for model in results.pruned if model.pruner == pruner)._replace(defense="basic")


def _room(results: AuditResults, model: VictimKey, metric: str) -> Estimate | None:
    """Return how far SAMIA is below the upper limit for guessing."""
    return combine(lambda value: GUESSING + AROUND - value, results.of(model, metric, "samia"))


def _less(
    results: AuditResults, model: VictimKey, other: VictimKey, metric: str, attack: str | None = "samia"
) -> Estimate | None:
    """Return the measure of one model minus that of another."""
    if model == other:
        return Estimate(0.0, 0.0, 0.0)
    return results.less(model, other, metric, attack)


def _protects(results: AuditResults, defense: str, pruners: Iterable[str], metric: str = "attack_accuracy") -> Cases:
    """Return, per pruner, the attack's measure on Basic minus that on the defense."""
    return {
        pruner: _less(results, _basic(results, pruner), _best(results, pruner, defense), metric)
        for pruner in pruners
        if pruner in _pruners(results)
    }


def _rivals(results: AuditResults, rival: str, defense: str, pruners: Iterable[str] = (*LOOSE, *STRICT)) -> Cases:
    """Return, per pruner, the attack accuracy on the rival defense minus that on the defense."""
    return {
        pruner: _less(results, _best(results, pruner, rival), _best(results, pruner, defense), "attack_accuracy")
        for pruner in pruners
        if pruner in _pruners(results)
    }
