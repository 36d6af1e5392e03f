"""Table of the matrix: a line a defense and network, and the sentences that the intervals allow."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.metrics.membership import Estimate
from secateur.report.heatmap import COLUMNS, MatrixCell, MatrixRow, build_heatmaps
from secateur.report.matrix_sentences import write_sentences
from secateur.runs.rows import Row
from secateur.studies.table import Cells, TableLine, Tabulated

UNMET, OUTSIDE, FEW = "a stronger attacker is known and was not met", "outside the federation", "fewer seeds"


def matrix(rows: Sequence[Row]) -> Tabulated:
    """Return the matrix of every network; there are no claims of a paper to judge."""
    lines = []
    for heatmap in build_heatmaps(rows):
        for row in heatmap.rows:
            cells: Cells = {x.title: _cell(row.cells[x.key]) for x in COLUMNS if x.key in row.cells}
            lines.append(TableLine({"defense": row.name}, cells, mark=_mark(row), part=heatmap.network))
        title = f"What the intervals allow to say of {heatmap.network}"
        lines += [TableLine({"sentence": sentence}, {}, part=title) for sentence in write_sentences(heatmap)]
    return lines, []


def _mark(row: MatrixRow) -> str:
    """Return the columns in which a stronger attacker was not met, the ground is another, or seeds are missing."""
    chosen = {
        UNMET: [key for key, cell in row.cells.items() if cell.measure and cell.unmet],
        OUTSIDE: [key for key, cell in row.cells.items() if cell.measure and cell.outside],
        FEW: [f"{key} ({len(x.measure)} of {x.seeds})" for key, x in row.cells.items() if 0 < len(x.measure) < x.seeds],
    }
    return "; ".join(f"{text}: {', '.join(keys)}" for text, keys in chosen.items() if keys)


def _cell(cell: MatrixCell) -> Estimate | str:
    """Return the value of a cell: an accuracy as a share, another value in the unit of its column."""
    estimate, scale = cell.estimate, 1.0 if cell.column.key == "accuracy" else cell.column.scale
    if estimate is None:
        return "refused" if cell.reasons else ""
    value, low, high, note = estimate
    return Estimate(scale * value, scale * low, scale * high, note)
