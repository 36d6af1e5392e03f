"""Tables of samia_ppb about an attacker that does not know how the target was pruned (Figs. 12, 13, Table 1)."""

from __future__ import annotations

from operator import sub

from secateur.metrics.membership import Estimate
from secateur.studies.claims import Finding, equals, judge
from secateur.studies.measured import Found, Measure, Model, combine, mean, mean_of
from secateur.studies.samia_numbers import TABLE_1
from secateur.studies.tables import Cells, Line

LITTLE = 0.05  # of the attack accuracy: a loss that the paper may call not too much


def unknown_sparsity(found: Found) -> tuple[list[Line], list[Finding]]:
    """Figs. 12 and 13: a matrix of the target's and the shadows' sparsity for every pruner."""
    lines: list[Line] = []
    kept: dict[str, Estimate | None] = {}
    gained: dict[str, Estimate | None] = {}
    for models in _families(found):
        for target in models:
            row = {shadow: _knowing(found, target, shadow) for shadow in models}
            cells = {f"shadows {m.sparsity:g}, attack_accuracy": mean(row[m]) for m in models}
            lines.append(Line({"pruner": models[-1].pruner, "target's sparsity": f"{target.sparsity:g}"}, {**cells}))
            for shadow in models:
                if shadow != target:
                    case = f"{models[-1].pruner} {target.sparsity:g} by shadows {shadow.sparsity:g}"
                    kept[case] = combine(_spared, row[target], row[shadow])
                    gained[case] = combine(sub, row[shadow], row[target])
    claim = "the attack accuracy is not affected too much by another sparsity of the shadows"
    return lines, [
        judge(f"{claim} (loses less than {100 * LITTLE:g} % of itself; shown is what is left of that)", kept),
        judge("in some cases another sparsity of the shadows even raises it", gained, "some"),
    ]


def unknown(found: Found) -> tuple[list[Line], list[Finding]]:
    """Table 1: the attack accuracy lost in random experiments."""
    lines, losses, left = [], [], []
    for seed, number in sorted({(row.seed, row.extra["experiment"]) for row in found.rows if row.attack}):
        known, guessed = _experiment(found, seed, number)
        loss = combine(_loss, known[1], guessed[1])
        assert loss is not None
        losses.append(loss.value)
        left.append(guessed[1][seed].value)
        labels = {"experiment": f"{seed}.{number}", "target": known[0], "shadows": guessed[0]}
        cells = {"known attack_accuracy": mean(known[1]), "unknown attack_accuracy": mean(guessed[1]), "loss": loss}
        lines.append(Line(labels, {**cells}))
    average, setting = mean_of(losses), (found.rows[0].dataset, found.rows[0].model)
    paper = TABLE_1.get(setting)
    told = "" if paper is None else f"{100 * paper:.2f}%"
    all_cells: Cells = {"unknown attack_accuracy": mean_of(left), "loss": average}
    lines.append(Line({"experiment": "mean", "target": "", "shadows": ""}, all_cells, told))
    above = {"mean accuracy above guessing": mean_of([value - 0.5 for value in left])}
    findings = [judge("without knowing pruner and sparsity the attack is still effective", above)]
    if paper is not None:
        findings.append(equals("the loss of attack accuracy is the paper's", average, paper))
    return lines, findings


def _families(found: Found) -> list[list[Model]]:
    """Each pruner's models from the original up."""
    pruners = dict.fromkeys(model.pruner for model in found.pruned)
    own = [[model for model in found.pruned if model.pruner == name] for name in pruners]
    return [[models[0].source, *sorted(models, key=lambda model: model.sparsity)] for models in own]


def _knowing(found: Found, target: Model, shadow: Model) -> Measure:
    """SAMIA's accuracy on a target, learnt from shadows of another compression."""
    guess = {"attacker_pruner": shadow.pruner, "attacker_sparsity": shadow.sparsity}
    return found.of(target, "attack_accuracy", "samia", **guess)


def _loss(known: float, unknown: float) -> float:
    """The share of the attack accuracy that not knowing costs (samia_ppb 5.2.5)."""
    return (known - unknown) / known


def _spared(known: float, unknown: float) -> float:
    return LITTLE - _loss(known, unknown)


def _experiment(found: Found, seed: int, number: int) -> tuple[tuple[str, Measure], tuple[str, Measure]]:
    """Shadows like the target, then shadows as drawn; with the same drawn twice both are the same."""
    rows = [row for row in found.rows if row.metric == "attack_accuracy" and row.value is not None]
    own = [row for row in rows if (row.seed, row.extra.get("experiment")) == (seed, number)]
    sides = []
    for row in (own[0], own[-1]):
        title = f"{row.extra['attacker_pruner']} {row.extra['attacker_sparsity']:g}"
        sides.append((title, {seed: Estimate(row.value or 0.0, row.low or 0.0, row.high or 1.0)}))
    return sides[0], sides[1]
