"""Sentences about the matrix that the intervals over its seeds allow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import sub

from secateur.metrics.estimates import Measure, combine
from secateur.metrics.membership import Estimate
from secateur.report.heatmap import BY_KEY, FIRST, NONE, Heatmap, MatrixRow

HIDE, INFORMED = "hide from the plain attacker", "strongest"
IMITATED = " through reference models under the defense than through others"
LESS = f"{HIDE}, and less from the strongest one, who sees more"
LOST = f"{HIDE} and are not shown to hide from the strongest one, who sees more"


def write_sentences(heatmap: Heatmap) -> list[str]:
    """Return sentences about the rows whose intervals over the seeds lie apart from those they are held against.

    A single seed allows none.
    """
    if len(heatmap.seeds) < 2:
        return []
    others = [row for row in heatmap.rows if row.name not in (NONE, FIRST)]

    def compare(row: MatrixRow, column: str) -> Estimate | None:
        return _less(heatmap.measure_base(row, column), row.measure(column))

    def compare_attackers(row: MatrixRow, column: str) -> Estimate | None:
        informed, plain = (row.cells.get(name) for name in (INFORMED, "inversion"))  # of the same pictures
        return _less(informed.measure, plain.measure) if informed and plain else None

    def compare_references(row: MatrixRow, column: str) -> Estimate | None:
        known = row.cells[column].by_attack if column in row.cells else {}
        pairs = ((measure, *(attack or "").partition(", ")[::2]) for attack, measure in known.items())
        return next((_less(measure, known.get(plain, {})) for measure, plain, kind in pairs if kind), None)

    def negate(row: MatrixRow, column: str) -> Estimate | None:
        return _less(row.measure(column), heatmap.measure_base(row, column))

    seen = [row for row in others if _apart(compare(row, "inversion")) and _apart(compare_attackers(row, ""))]
    lost = [row for row in seen if not _apart(compare(row, "strongest"))]
    kept = [row for row in seen if row not in lost]
    return [
        *_say("give the plain attacker less than no defense does", "inversion", others, compare),
        *_say(LOST, INFORMED, lost, compare_attackers, beside=False),
        *_say(LESS, INFORMED, kept, compare_attackers, beside=False),
        *_say("give even the strongest attacker met less than no defense does", INFORMED, others, compare),
        *_say("give the active server less", "active", others, compare),
        *_say("lower the AUC of membership on updates", "updates", others, compare),
        *_say("lower the AUC of RMIA on the final model", "final-rmia", others, compare),
        *_say(f"show RMIA more{IMITATED}", "final-rmia", others, compare_references, beside=False),
        *_say("raise the AUC of RMIA on the final model", "final-rmia", others, negate),
        *_say("lower the AUC of LiRA on the final model", "final-lira", others, compare),
        *_say(f"show LiRA more{IMITATED}", "final-lira", others, compare_references, beside=False),
        *_say("cost accuracy", "accuracy", others, compare),
    ]


def _say(
    words: str,
    key: str,
    rows: Sequence[MatrixRow],
    change: Callable[[MatrixRow, str], Estimate | None],
    beside: bool = True,
) -> list[str]:
    """Return one sentence on the rows whose change lies apart from 0; none if no row's does.

    `beside` names the row that another is compared with, where it is not that without a defense. A dagger marks a row
    for which a stronger attacker is known that was not met.
    """
    column, texts = BY_KEY[key], []
    for row in rows:
        if (by := change(row, key)) is not None and _apart(by):
            size = [f"{column.format(by)} {column.unit}", column.format_interval(by)]
            base = row.name_base(key)
            size += [f"beside {base}"] if beside and base != NONE else []
            mark = "†" if key in row.cells and row.cells[key].unmet else ""
            texts.append(f"{row.name}{mark} (by {', '.join(filter(None, size))})")
    return [f"These {words}: {', '.join(texts)}."] if texts else []


def _less(one: Measure, other: Measure) -> Estimate | None:
    """Return one measure less another over the seeds that both have; None unless these are several."""
    return combine(sub, one, other) if len(one.keys() & other.keys()) > 1 else None


def is_lower(one: Measure, other: Measure) -> bool:
    """Return True if one measure is below another on the same seeds, with its whole interval."""
    return _apart(_less(other, one))


def _apart(change: Estimate | None) -> bool:
    """Return True if a change is above 0 with its whole interval."""
    return change is not None and change.low > 0
