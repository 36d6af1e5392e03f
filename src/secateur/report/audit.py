"""Plots of an audit on the page: views of panels that a reader chooses between."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from secateur.report import summary
from secateur.report.audit_plots import StyledCurve, classes, front_sentence, histogram, roc, tradeoff
from secateur.report.plotting import Panel
from secateur.report.sources import Record, gather
from secateur.report.summary import Key, SummaryLine, attack_key, model_key

QUANTITIES = ("confidence", "sensitivity", "accuracy")
Labels = Mapping[str, Any]


@dataclass(frozen=True)
class View:
    """Panels and text that the page shows for the choice `label`."""

    label: str
    panels: list[Panel]
    text: str = ""


def tradeoffs(table: Sequence[SummaryLine]) -> list[View]:
    """Return one trade-off view for each run, network and data set."""
    views = []
    for group in summary.by_setting(table):
        best = summary.strongest(group)
        if any(line.value("test_accuracy") is not None for line in best):
            name = setting(best[0].labels)
            views.append(View(name, [tradeoff(name, best)], front_sentence(best)))
    return views


def rocs(table: Sequence[SummaryLine], figures: Iterable[Labels]) -> list[View]:
    """Return one view for each model, pruned models first, with the ROC curves of all attacks on the model."""
    aucs = {attack_key(line.labels): line.value("auc") for line in summary.attacks(table)}
    models = _by_model(gather(figure for figure in figures if figure["kind"] == "roc"))
    names = dict.fromkeys(attack(record.labels) for records in models.values() for record in records)
    styles = {name: number for number, name in enumerate(names)}
    several = len({summary.setting_key(records[0].labels) for records in models.values()}) > 1
    views = []
    for records in sorted(models.values(), key=lambda records: not summary.is_pruned(records[0].labels)):
        curves = [
            StyledCurve(name, aucs.get(attack_key(record.labels)) or 0.0, record, styles[name])
            for record in records
            for name in [attack(record.labels)]
        ]
        label = _name(records[0].labels, several)
        views.append(View(label, [roc(label, curves)]))
    return views


def histograms(figures: Iterable[Labels]) -> list[View]:
    """Return one view for each pruned model beside its original: histograms of answers for members and non-members."""

    def draw(pair: Sequence[Record]) -> list[Panel]:
        means = [record.content[name] for record in pair for name in ("member_mean", "nonmember_mean")]
        top = max([record.content["edges"][-1] for record in pair] + means)
        return [histogram(summary.full_title(record.labels), record, top) for record in pair]

    return _beside_originals([figure for figure in figures if figure["kind"] == "histogram"], draw)


def class_means(figures: Iterable[Labels]) -> list[View]:
    """Return one view for each pruned model beside its original: the means of every class."""

    def draw(pair: Sequence[Record]) -> list[Panel]:
        every = [x for record in pair for x in record.content["members"] + record.content["nonmembers"]]
        top = max((x for x in every if x is not None), default=0.0) or 1.0
        return [classes(summary.full_title(record.labels), record, top) for record in pair]

    return _beside_originals([figure for figure in figures if figure["kind"] == "classes"], draw)


def setting(labels: Labels) -> str:
    """Name a network and its data, and the run if the page has several."""
    name = f"{labels['model']} on {labels['dataset']}"
    return f"{labels['run']}: {name}" if labels.get("run") else name


def attack(labels: Labels) -> str:
    """Name an attack, and the attacker's knowledge if the labels hold it."""
    known = {name: value for name, value in labels.items() if name not in (*summary.MODEL, "attack", "adaptive")}
    facts = [f"{name.removeprefix('attacker_')} {value}" for name, value in known.items() if value is not None]
    return ", ".join([str(labels["attack"]), *(["adaptive"] if labels["adaptive"] else []), *facts])


def _beside_originals(figures: Sequence[Labels], draw: Callable[[Sequence[Record]], list[Panel]]) -> list[View]:
    """Return each pruned model's view: for every quantity the original's panel, then the model's."""
    models = _by_model(gather(figures))
    every = [records[0].labels for records in models.values()]
    shown = [labels for labels in every if summary.is_pruned(labels)] or every
    several = len({summary.setting_key(labels) for labels in every}) > 1
    views = []
    for labels in shown:
        before = summary.original_of(labels, every) if summary.is_pruned(labels) else None
        sources = [models[model_key(model_labels)] for model_labels in (before, labels) if model_labels is not None]
        panels = []
        for quantity in QUANTITIES:
            pair = [record for records in sources for record in records if record.quantity == quantity]
            panels += draw(pair) if pair else []
        views.append(View(_name(labels, several), panels))
    return views


def _by_model(records: Iterable[Record]) -> dict[Key, list[Record]]:
    models: dict[Key, list[Record]] = {}
    for record in records:
        models.setdefault(model_key(record.labels), []).append(record)
    return models


def _name(labels: Labels, several: bool) -> str:
    title = summary.full_title(labels)
    return f"{setting(labels)}: {title}" if several else title
