"""Verdict of an audit, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from secateur.report.measures import shown
from secateur.report.summary import SummaryLine, full_title, model_key, models, original_of, strongest

NEAR = 0.02  # an accuracy loss against the original that many would accept
GUESSING = 0.5


@dataclass(frozen=True)
class Badge:
    """Verdict in a few words, and its colour: good, bad or doubtful."""

    text: str
    colour: str


def badge(table: Sequence[SummaryLine], broken: Sequence[str] | None = None) -> Badge:
    """Return PASS or FAIL if there are limits, else the answer if any attack on a shipped model beats guessing."""
    if broken is not None:
        return Badge("FAIL", "bad") if broken else Badge("PASS", "good")
    best = strongest(table)
    if not best:
        return Badge("No attack was run", "doubtful")
    leaking = any(leaks(line) for line in _shipped(best))
    return Badge("Members can be told apart", "doubtful") if leaking else Badge("No leak found", "good")


def verdict(table: Sequence[SummaryLine]) -> list[str]:
    """Return sentences about one setting: the leakage of the pruned models, and the model that leaks least."""
    best = strongest(table)
    if not best:
        return ["No attack was run, so nothing is known of what these models give away."]
    shipped = _shipped(best)
    sentences = [_answer(shipped)]
    if any(line.pruned for line in best):
        for line in (original for original in best if not original.pruned):
            attack = f"the strongest attack on the {full_title(line.labels)}"
            sentences.append(f"Before pruning, {attack} reaches {_leak(line)}.")
    most, least, near = max(shipped, key=_auc), min(shipped, key=_auc), _near(table, shipped)
    if len(shipped) > 1:
        sentences.append(f"{_name(most)} gives away most: {_leak(most)}.")
        sentences.append(f"{_name(least)} gives away least: {_leak(least)}.")
    if near and (choice := min(near, key=_auc)) is not least:
        sentences.append(
            f"Among those that lose at most {100 * NEAR:g} points of the original's accuracy, "
            f"{_name(choice)} gives away least: {_leak(choice)}."
        )
    return sentences


def leaks(line: SummaryLine) -> bool:
    """Return True if an attack is better than guessing, by the low end of its interval."""
    cell = line.cells["auc"]
    low = cell.value if cell.low is None else cell.low
    return low is not None and low > GUESSING


def _answer(shipped: Sequence[SummaryLine]) -> str:
    count, what = sum(map(leaks, shipped)), "pruned model" if shipped[0].labels["sparsity"] else "model"
    total = f"the {len(shipped)} {what}s" if len(shipped) > 1 else f"the {what}"
    if not count:
        return f"No attack that was run does better than guessing on {total}; a stronger one might."
    of = f"{count} of {total}" if len(shipped) > 1 else total
    return f"An attacker tells members of {of} from others better than by guessing."


def _shipped(best: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the pruned models, or all models if nothing was pruned."""
    return [line for line in best if line.pruned] or list(best)


def _near(table: Sequence[SummaryLine], shipped: Sequence[SummaryLine]) -> list[SummaryLine]:
    """Return the pruned models that are about as accurate as their originals."""
    originals = {model_key(line.labels): line for line in models(table) if not line.pruned}
    near = []
    for line in shipped:
        labels = original_of(line.labels, [original.labels for original in originals.values()])
        before = originals[model_key(labels)].value("test_accuracy") if labels else None
        after = line.value("test_accuracy")
        if line.pruned and before is not None and after is not None and before - after <= NEAR:
            near.append(line)
    return near


def _auc(line: SummaryLine) -> float:
    return line.value("auc") or 0.0


def _leak(line: SummaryLine) -> str:
    leak = f"AUC {shown(line.cells['auc'], 'auc')} under {line.labels['attack']}"
    accuracy = line.cells.get("test_accuracy")
    return f"{leak}, at a test accuracy of {shown(accuracy, 'test_accuracy')}" if accuracy else leak


def _name(line: SummaryLine) -> str:
    return f"{line.title} ({line.labels['defense']})"
