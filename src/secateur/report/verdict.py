"""Verdicts of the page, in sentences: of an audit, and of attacks on updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from secateur.report import summary
from secateur.report.inversion import name_attack, name_defense
from secateur.report.summary import SummaryLine, find_original, group_by, model_key, name_model, select_strongest
from secateur.report.table import format_measure

NEAR = 0.02  # an accuracy loss against the original that many would accept
GUESSING = 0.5


@dataclass(frozen=True)
class Badge:
    """Verdict in a few words, and its colour: good, bad or doubtful."""

    text: str
    colour: str


def write_verdict(table: Sequence[SummaryLine]) -> list[str]:
    """Return sentences about one setting: the original, and the pruned models that leak most and least."""
    best = select_strongest(table)
    if not best:
        return ["No attack was run: the leakage of these models is unknown."]
    shipped, sentences = _select_shipped(best), []
    if any(line.pruned for line in best):
        for line in (original for original in best if not original.pruned):
            attack = f"the strongest attack on the {name_model(line.labels)}"
            sentences.append(f"Before pruning, {attack} reaches {_describe_leak(line)}.")
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


def choose_update_badge(lines: Sequence[SummaryLine]) -> Badge:
    """Judge whether a picture is recognisable, or more are nearest to their own truths than chance allows.

    An attack that failed on targets measured nothing there, which is no sign of safety.
    """
    scored = [line for line in lines if "recognisable" in line.cells]
    if lines and all(map(_has_failed, lines)):
        return Badge("Nothing was measured", "doubtful")
    if not scored:
        return Badge("Look at the pictures", "doubtful")
    if any(map(_shows_pictures, scored)):
        return Badge("Training pictures can be recovered", "bad")
    if any(line.value("failed") for line in scored):
        return Badge("No picture was recognised where attacks did not fail", "doubtful")
    return Badge("No picture was recognised", "good")


def write_update_verdict(lines: Sequence[SummaryLine]) -> list[str]:
    """Return sentences about the pictures and labels that the attacks recovered."""
    known = [line for line in lines if line.value("psnr") is not None]
    if not known:
        unseen = ["There is no truth to compare with: look at the pictures."] if lines else []
        return [*unseen, *_describe_failures(lines)]
    failures = _describe_failures(known)
    known = [line for line in known if not _has_failed(line)]
    if not known:
        return failures
    best = max(known, key=lambda line: (line.rank("recognisable"), line.rank("psnr_max")))
    recovered = f"recovers most: {_format(best, 'recognisable')} of its pictures are recognisable"
    if not best.value("recognisable"):
        recovered = "comes nearest: no picture is recognisable"
    sentences = [
        f"{name_attack(best.labels)} {recovered}. Their PSNR is {_format(best, 'psnr_median')} in the median, from "
        f"{_format(best, 'psnr_min')} to {_format(best, 'psnr_max')}; a grey picture has {_format(best, 'psnr_grey')}."
    ]
    sentences += _describe_nearest(known)
    if any(line.value("label_accuracy") is not None for line in known):
        most = max(known, key=lambda line: line.rank("label_accuracy"))
        sentences.append(f"{name_attack(most.labels)} finds {_format(most, 'label_accuracy')} of the labels.")
    sentences += _describe_adaptive_shows_pictures(known) + failures
    if all(line.labels.get("stage") == "untrained" for line in lines):
        sentences.append("The model was untrained, where updates reveal most.")
    return sentences


def _describe_nearest(lines: Iterable[SummaryLine]) -> list[str]:
    """Return a sentence if no picture is recognisable, but more than chance are nearest to their own truths."""
    hidden = [line for line in lines if not line.value("recognisable") and _above_chance(line)]
    if not hidden:
        return []
    most = max(hidden, key=lambda line: line.rank("identified"))
    share, chance = _format(most, "identified"), _format(most, "identified_chance")
    return [f"{name_attack(most.labels)}: {share} of its pictures are nearest to their own truth; chance: {chance}."]


def _describe_failures(lines: Iterable[SummaryLine]) -> list[str]:
    """Return a sentence for each attack that failed on targets, where nothing was measured."""
    sentences = []
    for line in lines:
        if share := line.value("failed"):
            targets = "every target" if _has_failed(line) else f"{share:.0%} of its targets"
            reason = "no picture was returned, or all trials diverged"
            sentences.append(f"{name_attack(line.labels)} failed on {targets} ({reason}): nothing was measured there.")
    return sentences


def _describe_adaptive_shows_pictures(lines: Iterable[SummaryLine]) -> list[str]:
    """Return a sentence for each defense that stands against the plain attacker and not against an adaptive one."""
    defended = (line for line in lines if line.labels.get("defense") not in (None, "none"))
    groups = group_by(defended, lambda line: (summary.name_setting(line.labels), name_defense(line.labels)))
    sentences = []
    for (_, defense), group in groups.items():
        plain = [line for line in group if not line.labels["adaptive"]]
        adaptive = [str(line.labels["attack"]) for line in group if line.labels["adaptive"] and _shows_pictures(line)]
        if plain and adaptive and not any(map(_shows_pictures, plain)):
            outcome = f"{', '.join(adaptive)} {'recovers' if len(adaptive) == 1 else 'recover'} pictures"
            sentences.append(f"{defense} stands only against the plain attacker: {outcome}.")
    return sentences


def _has_failed(line: SummaryLine) -> bool:
    """Return True if the attack failed on every target."""
    return line.rank("failed") >= 1


def _shows_pictures(line: SummaryLine) -> bool:
    """Return True if a picture is recognisable, or more than chance are nearest to their own truths."""
    return bool(line.value("recognisable")) or _above_chance(line)


def _above_chance(line: SummaryLine) -> bool:
    """Return True if the low end of the share that is nearest to its own truth is above chance; both must be known."""
    cell, chance = line.cells.get("identified"), line.value("identified_chance")
    low = None if cell is None else cell.value if cell.low is None else cell.low
    return low is not None and chance is not None and low > chance


def _format(line: SummaryLine, metric: str) -> str:
    return format_measure(line.cells.get(metric), metric, interval=False)
