"""Tables of samia_ppb about attacks on pruned models and originals (Figs. 7 to 13, Table 1), and about defenses.

In Figs. 12, 13 and Table 1 the attacker does not know how the target was pruned. Figs. 16 to 19 are about defenses:
their cost in accuracy, and the remaining attack accuracy. The paper omits points below 75 % of Basic's prediction
accuracy or above Basic's attack accuracy. Here those points are shown and marked. A defense is judged by its point of
least attack accuracy among those with at least 75 % of Basic's prediction accuracy. The victim's outcome picks that
point, which flatters a defense. Points above Basic's attack accuracy count too: without them every defense would look
good.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import sub
from statistics import fmean

from secateur.catalogue import methods, name_of
from secateur.metrics.estimates import Measure, combine, correlation, mean, mean_of
from secateur.metrics.membership import Estimate
from secateur.report.summary import group_by
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.samia.behaviour import CLOSE
from secateur.studies.table import SUPPORTED, Cases, Cells, Finding, TableLine, Tabulated, equals, find_printed, judge

ATTACKS = ("samia", "conf")
PAIRINGS = (  # the attack on the pruned model and on the original, and the measure
    ("SAMIA on pruned and Conf on original, as the paper pairs them", "samia", "conf", "attack_accuracy"),
    ("SAMIA on both", "samia", "samia", "attack_accuracy"),
    ("LiRA on both, AUC", "lira", "lira", "auc"),
    ("RMIA on both, AUC", "rmia", "rmia", "auc"),
)
GAPS = ("confidence_gap", "sensitivity_gap_size", "generalisation_gap")
LITTLE = 0.05  # of the attack accuracy: a loss that the paper may call not too much
USEFUL = 0.75  # of Basic's prediction accuracy
TOO_INACCURATE, TOO_LEAKY = "below 75 % of Basic's accuracy", "above Basic's attack accuracy"
GUESSING = 0.5
LARGEST_R = 1 - 1e-12  # Fisher's z of 1 is infinite
AROUND = 0.03  # "around 50 %": at most this much above
ATTACK = ("attack_accuracy", "samia")
LOOSE, STRICT = ("l1-unstructured", "slimming"), ("l1-structured", "l2-structured")


def risk_by_accuracy(results: AuditResults) -> Tabulated:
    """Return Fig. 7: attack accuracy against prediction accuracy."""
    drop = {model: results.less(model.source, model, "test_accuracy") for model in results.pruned}
    near = [model for model, change in drop.items() if change is not None and change.value <= CLOSE]
    worse = [model for model, change in drop.items() if change is not None and change.value > 0]
    lines = sorted(_risk_lines(results), key=lambda line: -line.cells["test_accuracy"].value)  # type: ignore[union-attr]
    similar = f"at a prediction accuracy within {100 * CLOSE:g} points of the original's, most pruned models leak more"
    findings = _judge_pairings(results, "similar", similar, near)
    leaks = "most models that predict worse than the original still leak more"
    findings += _judge_pairings(results, "worse", leaks, worse)
    leaky, other = ("l1-unstructured", "slimming"), ("l1-structured", "l2-structured")
    unlike = _compare_pruners(results, leaky, other)
    least = _compare_pruners(results, (*leaky, "l2-structured"), ("l1-structured",))
    return lines, [*findings, *results.judge("risk", unlike=unlike, least=least)]


def risk_by_sparsity(results: AuditResults) -> Tabulated:
    """Return Fig. 8: attack accuracy against sparsity."""
    least = min((model.sparsity for model in results.pruned), default=0.0)
    low = [model for model in results.pruned if model.sparsity == least]
    claim = f"at a low sparsity ({least:g}) pruning always raises the risk"
    return _risk_lines(results), _judge_pairings(results, "always", claim, low, every=True)


def gaps(results: AuditResults) -> Tabulated:
    """Return Fig. 9: the gaps against attack accuracy."""
    lines = []
    for model in results.keys:
        cells: Cells = {name: results.mean(model, name) for name in (*GAPS, "sensitivity_gap")}
        cells |= {f"samia {name}": results.mean(model, name, "samia") for name in ("attack_accuracy", "auc")}
        lines.append(TableLine({"model": model.title}, cells))
    findings = []
    for name in GAPS:
        findings += results.judge("gaps", {"gap": _words(name), "metric": name})
    highest = max((model.sparsity for model in results.pruned), default=0.0)
    for name in GAPS:
        words = {"gap": _words(name)}
        findings += results.judge("correlations", words, correlates=_correlate(results, results.keys, name))
        low = [model for model in results.keys if model.sparsity < highest]
        findings += results.judge("correlations_low", words, low=_correlate(results, low, name))
    return lines, findings + results.judge("gap_ranks", first=_lead_of_confidence(results))


def _correlate(results: AuditResults, models: Iterable[VictimKey], gap: str) -> Cases:
    """Return r of a gap and SAMIA's accuracy over models, within each seed, averaged over seeds by Fisher's z.

    With one seed Fisher's interval is over models.
    """
    by_seed = _correlate_seeds(results, models, gap)
    if len(by_seed) < 2:
        return {"r over the models of one seed": next(iter(by_seed.values()), None)}
    z = mean_of([math.atanh(max(-LARGEST_R, min(LARGEST_R, r.value))) for r in by_seed.values()])
    return {"r over models within a seed": Estimate(math.tanh(z.value), math.tanh(z.low), math.tanh(z.high))}


def _correlate_seeds(results: AuditResults, models: Iterable[VictimKey], gap: str) -> Measure:
    """Return r of a gap and SAMIA's accuracy over models, by seed; a seed needs four models."""
    points: dict[int, list[tuple[float, float]]] = {}
    for model in models:
        attacked = results.of(model, *ATTACK)
        for seed, size in results.of(model, gap).items():
            if seed in attacked:
                points.setdefault(seed, []).append((size.value, attacked[seed].value))
    return {seed: r for seed, pairs in points.items() if len(pairs) > 3 and (r := correlation(pairs))}


def _lead_of_confidence(results: AuditResults) -> Cases:
    """Return r of the confidence gap and SAMIA's accuracy less that of each other gap; needs several seeds."""
    first, *others = (_correlate_seeds(results, results.keys, gap) for gap in GAPS)
    several = len(first) > 1
    return {f"over the {_words(x)}": combine(sub, first, r) for x, r in zip(GAPS[1:], others, strict=True) if several}


def compare_attacks(results: AuditResults) -> Tabulated:
    """Return Figs. 10 and 11: every attack on every pruned model, beside the same attack and Conf on the original."""
    lines = []
    for model in results.keys:
        for attack in results.attacks:
            names = ("attack_accuracy", "auc", "tpr_at_fpr_0.01")
            cells: Cells = {name: results.mean(model, name, attack) for name in names}
            if model in results.pruned:
                for title, before in (("this attack", attack), ("Conf", "conf")):
                    change = _pairing(results, model, attack, before, "attack_accuracy")
                    cells[f"change from {title} on the original"] = change
            labels = {"model": model.title, "attack": attack}
            lines.append(TableLine(labels, cells, _authors(results, model, attack)))
    findings = []
    for measure in ("attack_accuracy", "auc"):
        leads = {model.title: _lead(results, model, measure) for model in results.pruned}
        words = {"measure": _words(measure), "unit": "points" if measure == "attack_accuracy" else ""}
        findings += results.judge("attacks", words, leads=leads)
    leaks = "pruned models leak more than the original"
    return lines, findings + _judge_pairings(results, "more", leaks, results.pruned)


def vary_sparsity(results: AuditResults) -> Tabulated:
    """Return Figs. 12 and 13: a matrix of the target's and the shadows' sparsity for every pruner."""
    lines: list[TableLine] = []
    kept: Cases = {}
    gained: Cases = {}
    for models in _families(results):
        for target in models:
            row = {shadow: _by_shadows(results, target, shadow) for shadow in models}
            cells: Cells = {f"shadows {m.sparsity:g}, attack_accuracy": mean(row[m]) for m in models}
            labels = {"pruner": models[-1].pruner, "target's sparsity": f"{target.sparsity:g}"}
            lines.append(TableLine(labels, cells))
            for shadow in models:
                if shadow != target:
                    case = f"{models[-1].pruner} {target.sparsity:g} by shadows {shadow.sparsity:g}"
                    kept[case] = combine(_spare, row[target], row[shadow])
                    gained[case] = combine(sub, row[shadow], row[target])
    return lines, results.judge("unknown_sparsity", kept=kept, gained=gained)


def vary_pruning(results: AuditResults) -> Tabulated:
    """Return Table 1: the attack accuracy lost in random experiments."""
    lines: list[TableLine] = []
    losses: dict[int, list[float]] = {}
    left: dict[int, list[float]] = {}
    for seed, number in sorted({(row.seed, row.extra["experiment"]) for row in results.rows if row.attack}):
        known, guessed = _experiment(results, seed, number)
        loss = combine(_loss, known[1], guessed[1])
        assert loss is not None
        losses.setdefault(seed, []).append(loss.value)
        left.setdefault(seed, []).append(guessed[1][seed].value)
        labels = {"experiment": f"{seed}.{number}", "target": known[0], "shadows": guessed[0]}
        cells: Cells = {"known attack_accuracy": mean(known[1]), "unknown attack_accuracy": mean(guessed[1])}
        lines.append(TableLine(labels, cells | {"loss": loss}))
    row = results.rows[0]
    network = re.sub(r"-w\d+$", "-pool", row.model)  # of the full width
    paper, of = find_printed("samia", "table_1", row.dataset, network), "" if network == row.model else f" ({network})"
    average, after = _average_seeds(losses), _average_seeds(left)
    cells = {"unknown attack_accuracy": after, "loss": average}
    labels = {"experiment": "mean", "target": "", "shadows": ""}
    lines.append(TableLine(labels, cells, "" if paper is None else f"{100 * paper:.2f}%{of}"))
    numbers = " or ".join(str(n) for n in sorted({len(values) for values in left.values()}))
    unit = f"{numbers} experiments" + (" a seed" if len(left) > 1 else "; the interval is over them")
    above = Estimate(after.value - GUESSING, after.low - GUESSING, after.high - GUESSING)
    findings = results.judge("unknown", effective={f"mean accuracy above guessing, {unit}": above})
    if paper is not None:
        equal = equals("the loss of attack accuracy is the paper's", average, paper, "loss")
        findings.append(replace(equal, measured=f"{equal.measured}{of}, {unit}"))
    return lines, findings


def _average_seeds(values: Mapping[int, Sequence[float]]) -> Estimate:
    """Return the mean over experiments within a seed, over seeds; with one seed the interval is over experiments."""
    if len(values) == 1:
        return mean_of(*values.values())
    return mean_of([fmean(some) for some in values.values()])


def _risk_lines(results: AuditResults) -> list[TableLine]:
    """Return a line for each model: its accuracy, the attacks, and their change from the original."""
    lines = []
    for model in results.keys:
        cells: Cells = {"test_accuracy": results.mean(model, "test_accuracy")}
        for attack in ATTACKS:
            cells |= {f"{attack} {name}": results.mean(model, name, attack) for name in ("attack_accuracy", "auc")}
        if model in results.pruned:
            pairs = {"SAMIA from Conf on the original": ("samia", "conf")}
            pairs |= {f"{attack} on both": (attack, attack) for attack in ATTACKS}
            for title, pair in pairs.items():
                cells[f"change, {title}"] = _pairing(results, model, *pair, "attack_accuracy")
        paper = "; ".join(filter(None, (_authors(results, model, attack) for attack in ATTACKS)))
        lines.append(TableLine({"model": model.title}, cells, paper))
    return lines


def _pairing(results: AuditResults, model: VictimKey, after: str, before: str, metric: str) -> Estimate | None:
    """Return an attack's metric on the pruned model less another's on the original."""
    return combine(sub, results.of(model, metric, after), results.of(model.source, metric, before))


def _judge_pairings(
    results: AuditResults, key: str, claim: str, models: Iterable[VictimKey], every: bool = False
) -> list[Finding]:
    """Judge a claim under each pairing of attacks; only the same attack on both shows the effect of pruning."""
    models = list(models)
    paired, same, *others = [
        judge(
            f"{claim} ({title})",
            {model.title: _pairing(results, model, after, before, metric) for model in models},
            "every" if every else "most",
            unit="" if metric == "auc" else "points",
            key=key,
        )
        for title, after, before, metric in PAIRINGS
    ]
    if paired.verdict == SUPPORTED != same.verdict:
        paired = replace(paired, measured=f"{paired.measured}; by the paper's pairing only")
    return [paired, same, *others]


def _compare_pruners(results: AuditResults, leaky: Iterable[str], other: Iterable[str]) -> Cases:
    """Return SAMIA's accuracy on models of some pruners less that of others of about equal prediction accuracy."""
    cases: Cases = {}
    for one in (model for model in results.pruned if model.pruner in leaky):
        for two in (model for model in results.pruned if model.pruner in other):
            apart = results.less(one, two, "test_accuracy")
            if apart is not None and abs(apart.value) <= CLOSE:
                cases[f"{one.title} over {two.title}"] = results.less(one, two, "attack_accuracy", "samia")
    return cases


def _words(metric: str) -> str:
    """Return the words of a claim for a measure or a gap."""
    return "AUC (not the paper's measure)" if metric == "auc" else metric.replace("_", " ").replace("size", "(size)")


def _lead(results: AuditResults, model: VictimKey, measure: str) -> Estimate | None:
    """Return SAMIA's measure less that of the best other attack of the paper."""
    rivals = [x for x in results.attacks if x != "samia" and methods("attack")[x].paper == "samia_ppb"]
    others = [results.of(model, measure, attack) for attack in rivals]
    best = max(others, key=lambda other: estimate.value if (estimate := mean(other)) else 0.0, default={})
    return combine(sub, results.of(model, measure, "samia"), best)


def _authors(results: AuditResults, model: VictimKey, attack: str) -> str:
    """Return the numbers of the authors' code in the same setting, of one seed, if known."""
    setting = (results.rows[0].dataset, model.pruner, model.sparsity, model.defense, attack)
    known = {metric: find_printed("samia", "authors_code", *setting, metric) for metric in ("attack_accuracy", "auc")}
    words = {"attack_accuracy": "attack accuracy", "auc": "AUC"}
    numbers = [f"{attack} {value:.3f} ({words[metric]})" for metric, value in known.items() if value is not None]
    return f"authors' code: {', '.join(numbers)}" if numbers else ""


def _families(results: AuditResults) -> list[list[VictimKey]]:
    """Return the models of each pruner by sparsity, the original first."""
    families = group_by(results.pruned, lambda model: model.pruner).values()
    return [[models[0].source, *sorted(models, key=lambda model: model.sparsity)] for models in families]


def _by_shadows(results: AuditResults, target: VictimKey, shadow: VictimKey) -> Measure:
    """Return SAMIA's accuracy on a target, learnt from shadows of another compression."""
    guess = {"attacker_pruner": shadow.pruner, "attacker_sparsity": shadow.sparsity}
    return results.of(target, "attack_accuracy", "samia", **guess)


def _spare(known: float, unknown: float) -> float:
    """Return how far the loss is below `LITTLE`."""
    return LITTLE - _loss(known, unknown)


def _loss(known: float, unknown: float) -> float:
    """Return the share of the attack accuracy that is lost by not knowing (samia_ppb 5.2.5)."""
    return (known - unknown) / known


def _experiment(results: AuditResults, seed: int, number: int) -> tuple[tuple[str, Measure], tuple[str, Measure]]:
    """Return the title and accuracy by shadows like the target, then by shadows as drawn; both may be the same."""
    rows = [row for row in results.rows if row.metric == "attack_accuracy" and row.value is not None]
    drawn = [row for row in rows if (row.seed, row.extra.get("experiment")) == (seed, number)]
    sides = []
    for row in (drawn[0], drawn[-1]):
        title = f"{row.extra['attacker_pruner']} {row.extra['attacker_sparsity']:g}"
        sides.append((title, {seed: Estimate(row.value or 0.0, row.low or 0.0, row.high or 1.0)}))
    return sides[0], sides[1]


def face_plain(results: AuditResults) -> Tabulated:
    """Return Figs. 16 and 17: the attacker's shadow models are fine-tuned with Basic."""
    return _defense_lines(results), _judge_plain(results)


def _judge_plain(results: AuditResults) -> list[Finding]:
    """Judge the claims of Figs. 16 and 17."""
    ppb = {pruner: _best(results, pruner, "ppb") for pruner in _pruners(results)}
    return results.judge(
        "non_adaptive",
        near={pruner: _room(results, model, "attack_accuracy") for pruner, model in ppb.items()},
        ranked={pruner: _room(results, model, "auc") for pruner, model in ppb.items()},
        cost={p: _less(results, model, _basic(results, p), "test_accuracy", None) for p, model in ppb.items()},
        adv=_rivals(results, "basic", "adv", LOOSE),
        lower=_rivals(results, "adv", "ppb", STRICT),
        dp=_rivals(results, "dp-sgd", "ppb"),
        trade={
            f"{pruner}, against {rival}": case
            for rival in ("adv", "dp-sgd")
            for pruner, case in _rivals(results, rival, "ppb", balance=True).items()
        },
    )


def face_adaptive(results: AuditResults) -> Tabulated:
    """Return Figs. 18 and 19: the attacker's shadow models are fine-tuned with the victim's defense."""
    pruners = _pruners(results)
    lowers, auc = (_rivals(results, "basic", "ppb", pruners, metric) for metric in ("attack_accuracy", "auc"))
    findings = results.judge("adaptive", lowers=lowers, auc=auc)
    for rival, key in (("ADV", "adv"), ("DP", "dp-sgd")):
        findings += results.judge("best", {"rival": rival}, best=_rivals(results, key, "ppb", STRICT))
    for defense, key in (("PPB", "ppb"), ("ADV", "adv")):
        findings += results.judge("two_best", {"defense": defense}, two=_rivals(results, "dp-sgd", key, LOOSE))
    for defense, key in (("PPB", "ppb"), ("ADV", "adv"), ("DP", "dp-sgd")):
        measured = [pruner for pruner in pruners if {"basic", key} <= _list_measured(results, pruner)]
        lowers = {pruner: _lowers_strongest(results, pruner, key) for pruner in measured}
        findings += results.judge("strongest", {"defense": defense}, lowers=lowers)
    if results.strongest:  # here the attackers of Figs. 16 and 17 are those who know of the defense
        findings += _judge_plain(results)
    return _defense_lines(results), findings


def marks(results: AuditResults, model: VictimKey) -> list[str]:
    """Return the reasons why the paper omits a point from its figure."""
    useful, leaks = (
        [results.mean(victim, *metric) for victim in (model, model.basic)]
        for metric in (("test_accuracy", None), ATTACK)
    )
    reasons = []
    if useful[0] and useful[1] and useful[0].value < USEFUL * useful[1].value:
        reasons.append(TOO_INACCURATE)
    if leaks[0] and leaks[1] and leaks[0].value > leaks[1].value:
        reasons.append(TOO_LEAKY)
    return reasons


def _defense_lines(results: AuditResults) -> list[TableLine]:
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
    defended = [x for x in results.pruned if x.defended and (x.pruner, name_of(x.defense)) == (pruner, defense)]
    useful = [model for model in defended if TOO_INACCURATE not in marks(results, model)]
    known = [(estimate.value, model) for model in useful if (estimate := results.mean(model, *ATTACK)) is not None]
    return min(known, key=lambda scored: scored[0])[1] if known else _basic(results, pruner)


def _list_measured(results: AuditResults, pruner: str) -> set[str]:
    """Return the defenses whose pruned models the attack has met."""
    attacked = (x for x in results.pruned if x.pruner == pruner and results.mean(x, *ATTACK) is not None)
    return {name_of(model.defense) for model in attacked}


def _basic(results: AuditResults, pruner: str) -> VictimKey:
    return next(model for model in results.pruned if model.pruner == pruner).basic


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


def _lowers_strongest(results: AuditResults, pruner: str, defense: str) -> Estimate | None:
    """Return how far a defense lowers the AUC of the attack that is best on it, whichever that is on Basic.

    None if no model of the defense is useful: Basic's model would be held against itself.
    """
    basic, defended = _basic(results, pruner), _best(results, pruner, defense)
    if defended == basic:
        return None
    attacks = dict.fromkeys(row.attack for row in results.rows if row.metric == "auc" and row.attack)

    def find_best(model: VictimKey) -> Measure:
        by_attack = [results.of(model, "auc", attack) for attack in attacks]
        return max(by_attack, key=lambda auc: estimate.value if (estimate := mean(auc)) else 0.0)

    return combine(sub, find_best(basic), find_best(defended))


def _rivals(
    results: AuditResults,
    rival: str,
    defense: str,
    pruners: Iterable[str] = (*LOOSE, *STRICT),
    metric: str = "attack_accuracy",
    balance: bool = False,
) -> Cases:
    """Return, per pruner, the attack's measure on the rival defense, or on Basic, minus that on the defense.

    With `balance` what the defense costs in prediction accuracy, against the rival, is taken off.
    """
    cases: Cases = {}
    for pruner in pruners:
        if pruner in _pruners(results) and {rival, defense} <= _list_measured(results, pruner):
            pair = _best(results, pruner, rival), _best(results, pruner, defense)
            cases[pruner] = _balance(results, *pair) if balance else _less(results, *pair, metric)
    return cases


def _balance(results: AuditResults, rival: VictimKey, defended: VictimKey) -> Estimate | None:
    """Return a model's prediction accuracy less attack accuracy, minus that of its rival."""
    metrics = (("test_accuracy", None), ATTACK)
    measures = [results.of(model, *metric) for model in (defended, rival) for metric in metrics]
    return combine(
        lambda one, attack_on_one, two, attack_on_two: one - attack_on_one - (two - attack_on_two), *measures
    )
