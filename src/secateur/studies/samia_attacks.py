"""Tables of samia_ppb about attacks on pruned models and originals (Figs. 7 to 11)."""

from __future__ import annotations

from collections.abc import Iterable
from operator import sub

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, judge
from secateur.studies.measured import Found, Model, combine, correlation, mean
from secateur.studies.samia_behaviour import CLOSE
from secateur.studies.samia_numbers import AUTHORS_CODE
from secateur.studies.tables import Cells, Line

ATTACKS = ("samia", "conf")
PAIRINGS = (  # the attack on the pruned model and on the original, and the measure
    ("SAMIA on pruned and Conf on original, as the paper pairs them", "samia", "conf", "attack_accuracy"),
    ("SAMIA on both", "samia", "samia", "attack_accuracy"),
    ("SAMIA on both, AUC", "samia", "samia", "auc"),
    ("Conf on both", "conf", "conf", "attack_accuracy"),
    ("Conf on both, AUC", "conf", "conf", "auc"),
)
GAPS = ("confidence_gap", "sensitivity_gap_size", "generalisation_gap")
STRONG = 0.5  # a correlation that the paper may call strong
Cases = dict[str, Estimate | None]


def risk_by_accuracy(found: Found) -> tuple[list[Line], list[Finding]]:
    """Fig. 7: attack accuracy against prediction accuracy."""
    drop = {
        model: combine(sub, *(found.of(m, "test_accuracy") for m in (model.source, model))) for model in found.pruned
    }
    near = [model for model, change in drop.items() if change is not None and change.value <= CLOSE]
    worse = [model for model, change in drop.items() if change is not None and change.value > 0]
    lines = sorted(_risk_lines(found), key=lambda line: -line.cells["test_accuracy"].value)  # type: ignore[union-attr]
    similar = f"at a prediction accuracy within {100 * CLOSE:g} points of the original's, most pruned models leak more"
    findings = _paired(found, similar, near)
    findings += _paired(found, "most models that predict worse than the original still leak more", worse)
    leaky, other = ("l1-unstructured", "slimming"), ("l1-structured", "l2-structured")
    claim = "L1 unstructured and slimming leak more than L1 and L2 structured at similar accuracy"
    findings.append(judge(f"{claim} (SAMIA)", _against(found, leaky, other)))
    claim = "L1 structured leaks least of the four at similar accuracy"
    findings.append(judge(f"{claim} (SAMIA)", _against(found, (*leaky, "l2-structured"), ("l1-structured",))))
    return lines, findings


def risk_by_sparsity(found: Found) -> tuple[list[Line], list[Finding]]:
    """Fig. 8: attack accuracy against sparsity."""
    least = min((model.sparsity for model in found.pruned), default=0.0)
    low = [model for model in found.pruned if model.sparsity == least]
    claim = f"at a low sparsity ({least:g}) pruning always raises the risk"
    return _risk_lines(found), _paired(found, claim, low, every=True)


def gaps(found: Found) -> tuple[list[Line], list[Finding]]:
    """Fig. 9: the gaps against attack accuracy."""
    lines = []
    for model in found.models:
        cells: Cells = {name: mean(found.of(model, name)) for name in (*GAPS, "sensitivity_gap")}
        cells |= {f"samia {name}": mean(found.of(model, name, "samia")) for name in ("attack_accuracy", "auc")}
        lines.append(Line({"model": model.title}, cells))
    findings = []
    for name in GAPS:
        rises = {m.title: combine(sub, found.of(m, name), found.of(m.source, name)) for m in found.pruned}
        findings.append(judge(f"pruning increases the {_words(name)} in most settings", rises, unit=""))
    for name in GAPS:
        for measure in ("attack_accuracy", "auc"):
            points = [(line.cells[name], line.cells[f"samia {measure}"]) for line in lines]
            known = [(x.value, y.value) for x, y in points if isinstance(x, Estimate) and isinstance(y, Estimate)]
            claim = f"the {_words(name)} and SAMIA's {_words(measure)} are strongly correlated (r above {STRONG:g})"
            findings.append(judge(claim, {"r": correlation(known)}, bound=STRONG, unit=""))
    return lines, findings


def compared(found: Found) -> tuple[list[Line], list[Finding]]:
    """Figs. 10 and 11: every attack on every pruned model, beside the same attack and Conf on the original."""
    lines = []
    for model in found.models:
        for attack in found.attacks:
            own = found.of(model, "attack_accuracy", attack)
            cells: Cells = {"attack_accuracy": mean(own)}
            cells |= {name: mean(found.of(model, name, attack)) for name in ("auc", "tpr_at_fpr_0.01")}
            if model in found.pruned:
                for title, before in (("this attack", attack), ("Conf", "conf")):
                    original = found.of(model.source, "attack_accuracy", before)
                    cells[f"change from {title} on the original"] = combine(sub, own, original)
            numbers = ("attack_accuracy", "auc")
            lines.append(Line({"model": model.title, "attack": attack}, cells, _authors(found, model, attack, numbers)))
    findings = []
    for measure in ("attack_accuracy", "auc"):
        leads = {model.title: _lead(found, model, measure) for model in found.pruned}
        unit = "points" if measure == "attack_accuracy" else ""
        findings.append(judge(f"SAMIA has the highest {_words(measure)} in most cases", leads, unit=unit))
    return lines, findings + _paired(found, "pruned models leak more than the original", found.pruned)


def _risk_lines(found: Found) -> list[Line]:
    lines = []
    for model in found.models:
        cells: Cells = {"test_accuracy": mean(found.of(model, "test_accuracy"))}
        for attack in ATTACKS:
            cells |= {f"{attack} {name}": mean(found.of(model, name, attack)) for name in ("attack_accuracy", "auc")}
        if model in found.pruned:
            pairs = {"SAMIA from Conf on the original": ("samia", "conf")}
            pairs |= {f"{attack} on both": (attack, attack) for attack in ATTACKS}
            for title, pair in pairs.items():
                cells[f"change, {title}"] = _pairing(found, model, *pair, "attack_accuracy")
        told = "; ".join(filter(None, (_authors(found, model, a, ("attack_accuracy", "auc")) for a in ATTACKS)))
        lines.append(Line({"model": model.title}, cells, told))
    return lines


def _pairing(found: Found, model: Model, after: str, before: str, metric: str) -> Estimate | None:
    return combine(sub, found.of(model, metric, after), found.of(model.source, metric, before))


def _paired(found: Found, claim: str, models: Iterable[Model], every: bool = False) -> list[Finding]:
    """One claim under each pairing of attacks; only the same attack on both says what pruning does."""
    models = list(models)
    return [
        judge(
            f"{claim} ({title})",
            {model.title: _pairing(found, model, after, before, metric) for model in models},
            "every" if every else "most",
            unit="" if metric == "auc" else "points",
        )
        for title, after, before, metric in PAIRINGS
    ]


def _against(found: Found, leaky: Iterable[str], other: Iterable[str]) -> Cases:
    """SAMIA's accuracy on models of some pruners less that of others, wherever they predict about equally well."""
    accuracy = {model: found.of(model, "test_accuracy") for model in found.pruned}
    cases: Cases = {}
    for one in (model for model in found.pruned if model.pruner in leaky):
        for two in (model for model in found.pruned if model.pruner in other):
            apart = combine(sub, accuracy[one], accuracy[two])
            if apart is not None and abs(apart.value) <= CLOSE:
                pair = (found.of(model, "attack_accuracy", "samia") for model in (one, two))
                cases[f"{one.title} over {two.title}"] = combine(sub, *pair)
    return cases


def _lead(found: Found, model: Model, measure: str) -> Estimate | None:
    """SAMIA less the best of the other attacks."""
    others = [found.of(model, measure, attack) for attack in found.attacks if attack != "samia"]
    best = max(others, key=lambda other: estimate.value if (estimate := mean(other)) else 0.0, default={})
    return combine(sub, found.of(model, measure, "samia"), best)


def _authors(found: Found, model: Model, attack: str, metrics: Iterable[str]) -> str:
    """What the authors' code gave in the same setting, one seed, where that is known."""
    place = (found.rows[0].dataset, model.pruner, model.sparsity, model.defense)
    known = [(metric, AUTHORS_CODE.get((*place, attack, metric))) for metric in metrics]
    told = [f"{attack} {value:.3f} ({_words(metric)})" for metric, value in known if value is not None]
    return f"authors' code: {', '.join(told)}" if told else ""


def _words(metric: str) -> str:
    return "AUC" if metric == "auc" else metric.replace("_", " ").replace("gap size", "gap (size)")
