"""Tables of samia_ppb on models without attacks: predictions on members and non-members, and accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from secateur.metrics.estimates import mean_of
from secateur.metrics.membership import Estimate
from secateur.report.summary import group_by
from secateur.studies.results import AuditResults, VictimKey
from secateur.studies.table import Cells, TableLine, Tabulated, sparkline

GAPS = {"confidence": "confidence_gap", "sensitivity": "sensitivity_gap_size"}  # the sign of the latter has no meaning
UNITS = {"confidence": "points", "sensitivity": ""}
CLOSE = 0.02  # of accuracy: for "close", "comparable" or "similar", where the paper gives no number


def histograms(results: AuditResults) -> Tabulated:
    """Return Fig. 1: the means of members and non-members, their gaps and histograms."""
    return _histogram_lines(results), [
        finding for name in GAPS for finding in results.judge("histograms", _words(name))
    ]


def histograms_defended(results: AuditResults) -> Tabulated:
    """Return Fig. 14: Fig. 1 with PPB; Basic is Fig. 1's pruned model."""
    findings = [finding for name in GAPS for finding in results.judge("histograms_defended", _words(name))]
    return _histogram_lines(results), findings


def by_class(results: AuditResults) -> Tabulated:
    """Return Fig. 4: the means of members and non-members by class."""
    findings = []
    for name in GAPS:
        classes = {model: _divergences(results, name, model) for model in results.keys}
        larger = {
            f"{model.title}{_name_unit(classes[model])}": _class_change(classes[model], classes[model.source])
            for model in results.pruned
        }
        spreads = {model.title: _spread(classes[model]) for model in results.pruned}
        findings += results.judge("classes", _words(name), larger=larger, differs=spreads)
    return _class_lines(results), findings


def by_class_defended(results: AuditResults) -> Tabulated:
    """Return Fig. 15: the means of members and non-members by class, with PPB."""
    findings = []
    for name in GAPS:
        smaller, nearer = {}, {}
        for ppb in (model for model in results.pruned if model.defended):
            original, before, after = (_divergences(results, name, model) for model in (ppb.source, ppb.basic, ppb))
            case = f"{ppb.title}{_name_unit(after)}"
            smaller[case] = _class_change(before, after)
            nearer[case] = _class_change(_distances(before, original), _distances(after, original))
        findings += results.judge("classes_defended", _words(name), smaller=smaller, nearer=nearer)
    return _class_lines(results), findings


def utility(results: AuditResults) -> Tabulated:
    """Return Fig. 6: prediction accuracy by pruner and sparsity."""
    changes = {model.title: results.less(model, model.source, "test_accuracy") for model in results.pruned}
    lines = []
    for model in results.keys:
        cells: Cells = {"test_accuracy": results.mean(model, "test_accuracy")}
        cells |= {"change from the original": changes[model.title]} if model in results.pruned else {}
        lines.append(TableLine({"model": model.title}, cells))
    ends = _ends(results.pruned)
    low = {model.title: changes[model.title] for model, _ in ends}
    falls = {model.pruner: results.less(model, high, "test_accuracy") for model, high in ends if model != high}
    loose = {
        f"{model.title} over {other.title}": results.less(model, other, "test_accuracy")
        for model in results.pruned
        for other in results.pruned
        if model.pruner == "l1-unstructured" != other.pruner and model.sparsity == other.sparsity
    }
    return lines, results.judge("utility", close=low, falls=falls, better=changes, loose=loose)


def _ends(models: Sequence[VictimKey]) -> list[tuple[VictimKey, VictimKey]]:
    """Return, per pruner, the models of the lowest and the highest sparsity."""
    pruners = group_by(models, lambda model: model.pruner).values()
    by_sparsity = [sorted(group, key=lambda model: model.sparsity) for group in pruners]
    return [(group[0], group[-1]) for group in by_sparsity]


def _words(quantity: str) -> dict[str, str]:
    """Return the words of a claim about confidence or sensitivity."""
    return {"name": quantity, "unit": UNITS[quantity], "gap": GAPS[quantity]}


def _histogram_lines(results: AuditResults) -> list[TableLine]:
    lines = []
    for model in results.keys:
        for name in GAPS:
            drawn = results.figures_of(model, "histogram", name)
            cells: Cells = {
                side: mean_of([figure[field] for figure in drawn.values()])
                for side, field in (("members' mean", "member_mean"), ("non-members' mean", "nonmember_mean"))
            }
            cells["gap"] = results.mean(model, f"{name}_gap")
            first = next(iter(drawn.values()))
            cells |= {f"{side}, histogram": sparkline(first[side]) for side in ("members", "nonmembers")}
            lines.append(TableLine({"model": model.title, "quantity": name}, cells))
    return lines


def _class_lines(results: AuditResults) -> list[TableLine]:
    lines = []
    for name in GAPS:
        drawn = {model: results.figures_of(model, "classes", name) for model in results.keys}
        apart = {model: _divergences(results, name, model) for model in results.keys}
        for label in range(len(next(iter(drawn[results.keys[0]].values()))["members"])):
            cells: Cells = {}
            for model, figures in drawn.items():
                for side in ("members", "nonmembers"):
                    cells[f"{model.title}, {side}"] = _mean_known(values[side][label] for values in figures.values())
                cells[f"{model.title}, divergence"] = _mean_known(apart[model].get((seed, label)) for seed in figures)
            lines.append(TableLine({"quantity": name, "class": str(label)}, cells))
    return lines


def _mean_known(values: Iterable[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return mean_of(known) if known else None


Divergences = dict[tuple[int, int], float]  # by seed and class


def _divergences(results: AuditResults, name: str, model: VictimKey) -> Divergences:
    """Return members minus non-members by seed and class; for sensitivity the absolute value."""
    size = abs if name == "sensitivity" else float
    return {
        (seed, label): size(inside - outside)
        for seed, figure in results.figures_of(model, "classes", name).items()
        for label, (inside, outside) in enumerate(zip(figure["members"], figure["nonmembers"], strict=True))
        if inside is not None and outside is not None
    }


def _distances(first: Divergences, second: Divergences) -> Divergences:
    """Return the distance between two divergences, by seed and class."""
    return {key: abs(first[key] - second[key]) for key in first if key in second}


def _name_unit(divergences: Divergences) -> str:
    """Return the words for a case whose interval is not over seeds."""
    return " (over the classes of one seed)" if len(_split_seeds(divergences)) == 1 else ""


def _split_seeds(divergences: Divergences) -> dict[int, dict[int, float]]:
    """Return divergences by seed, then by class."""
    seeds: dict[int, dict[int, float]] = {}
    for (seed, label), value in divergences.items():
        seeds.setdefault(seed, {})[label] = value
    return seeds


def _class_change(larger: Divergences, smaller: Divergences) -> Estimate | None:
    """Return the change of a class's divergence: the mean over classes within a seed, over seeds.

    With one seed the interval is over its classes.
    """
    changes = _split_seeds({key: larger[key] - smaller[key] for key in larger if key in smaller})
    if len(changes) == 1:
        return mean_of([*next(iter(changes.values())).values()])
    return mean_of([fmean(classes.values()) for classes in changes.values()]) if changes else None


def _spread(divergences: Divergences) -> Estimate | None:
    """Return the divergence gap of two classes, which the other seeds select, by seed.

    The classes are those of largest and smallest mean divergence on all seeds but one, and are compared on that one.
    Within one seed, largest minus smallest is never negative, even without a true difference. The selections share
    seeds, so the variance over n seeds counts 1 / n + 1 / (n - 1) times, not 1 / n (Nadeau and Bengio 2003).
    """
    seeds, gaps = _split_seeds(divergences), []
    for seed, classes in seeds.items():
        others = [other for x, other in seeds.items() if x != seed]
        means = {x: fmean(y[x] for y in others) for x in classes if others and all(x in y for y in others)}
        if means:
            gaps.append(classes[max(means, key=means.__getitem__)] - classes[min(means, key=means.__getitem__)])
    if len(gaps) < 2:
        return None
    (centre, low, _, _), widening = mean_of(gaps), math.sqrt(1 + len(gaps) / (len(gaps) - 1))
    return Estimate(centre, centre - widening * (centre - low), centre + widening * (centre - low))
