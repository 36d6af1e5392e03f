"""Verdict on an audit in sentences, and the badge of every verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from secateur.evaluation.attack_strength import UNMET, read_unmet
from secateur.report import summary
from secateur.report.summary import SummaryLine, find_original, model_key, name_deed, name_model, select_strongest
from secateur.report.table import format_measure
from secateur.runs.rows import Row

NEAR = 0.02  # an accuracy loss against the original that many would accept
GUESSING = 0.5
BARE = ("none", "given", "None")  # in the place of a defense


@dataclass(frozen=True)
class Badge:
    """Verdict in a few words, and its colour: good, bad or doubtful."""

    text: str
    colour: str


def write_verdict(table: Sequence[SummaryLine]) -> list[str]:
    """Return sentences about one setting: the original, and the compressed models that leak most and least."""
    best = select_strongest(table)
    if not best:
        return ["No attack was run: the leakage of these models is unknown."]
    shipped, sentences = _select_shipped(best), []
    if any(line.pruned for line in best):
        deed = name_deed((line.labels["pruner"], line.labels["sparsity"]) for line in best)
        for line in (original for original in best if not original.pruned):
            attack = f"the strongest attack on the {name_model(line.labels)}"
            sentences.append(f"Before {deed}, {attack} reaches {_describe_leak(line)}.")
    most, least, near = max(shipped, key=_auc), min(shipped, key=_auc), _select_accurate(table, shipped)
    if len(shipped) > 1:
        sentences.append(f"{_name_model(most)} leaks most: {_describe_leak(most)}.")
        sentences.append(f"{_name_model(least)} leaks least: {_describe_leak(least)}.")
    if near and (choice := min(near, key=_auc)) is not least:
        sentences.append(
            f"Among those that lose at most {100 * NEAR:g} points of the original's accuracy, "
            f"{_name_model(choice)} leaks least: {_describe_leak(choice)}."
        )
    return sentences


def describe_unmet(rows: Iterable[Row], name: Callable[[Row], str]) -> list[str]:
    """Return a sentence for each attacker known to be stronger, with the defenses that did not meet it.

    Args:
        rows: with the missing attackers in their notes.
        name: returns the name of a row's defense or federation; a model without one is `none` or `given`.
    """
    missed = summary.group_by((row for row in rows if read_unmet(row.note)), lambda row: read_unmet(row.note))
    return [
        f"{_join_subjects(same, name)} {UNMET}the strongest attacker known: {unmet.removeprefix(UNMET)}."
        for unmet, same in missed.items()
    ]


def _join_subjects(rows: Iterable[Row], name: Callable[[Row], str]) -> str:
    """Return the names of defenses, each with its run if the page has several."""
    named = ((f"{row.extra['run']}: " if row.extra.get("run") else "", name(row)) for row in rows)
    joined = summary.join_distinct(run + ("the model" if defense in BARE else defense) for run, defense in named)
    return f"The{joined[3:]}" if joined.startswith("the model") else joined


def _select_shipped(best: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the pruned models, or all models if nothing was pruned."""
    return [line for line in best if line.pruned] or list(best)


def _select_accurate(table: Sequence[SummaryLine], shipped: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the pruned models that are about as accurate as their originals."""
    originals = {model_key(line.labels): line for line in summary.select_models(table) if not line.pruned}
    near = []
    for line in shipped:
        labels = find_original(line.labels, [original.labels for original in originals.values()])
        before = originals[model_key(labels)].value("test_accuracy") if labels else None
        after = line.value("test_accuracy")
        if line.pruned and before is not None and after is not None and before - after <= NEAR:
            near.append(line)
    return near


def _auc(line: SummaryLine) -> float:
    return line.rank("auc")


def _describe_leak(line: SummaryLine) -> str:
    leak = f"AUC {format_measure(line.cells['auc'], 'auc')} under {line.labels['attack']}"
    accuracy = line.cells.get("test_accuracy")
    return f"{leak}, at a test accuracy of {format_measure(accuracy, 'test_accuracy')}" if accuracy else leak


def _name_model(line: SummaryLine) -> str:
    return f"{line.title} ({line.labels['defense']})"
