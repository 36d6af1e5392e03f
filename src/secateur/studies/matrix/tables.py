"""Table of the matrix: a line a defense and network, and the sentences that the intervals allow."""

from __future__ import annotations

from collections.abc import Sequence

from secateur.metrics.membership import Estimate
from secateur.report.matrix import COLUMNS, MatrixCell, build_heatmaps
from secateur.runs.rows import Row
from secateur.studies.table import Cells, TableLine, Tabulated

UNMET = "a stronger attacker is known and was not met"


def matrix(rows: Sequence[Row]) -> Tabulated:
    """Return the matrix of every network; there are no claims of a paper to judge."""
    lines = []
    for heatmap in build_heatmaps(rows):
        for row in heatmap.rows:
            cells: Cells = {x.title: _cell(row.cells[x.key]) for x in COLUMNS if x.key in row.cells}
            mark = UNMET if any(cell.unmet for cell in row.cells.values()) else ""
            lines.append(TableLine({"defense": row.name}, cells, mark=mark, part=heatmap.network))
        title = f"What the intervals allow to say of {heatmap.network}"
        lines += [TableLine({"sentence": sentence}, {}, part=title) for sentence in heatmap.sentences]
    return lines, []


def _cell(cell: MatrixCell) -> Estimate | str:
    """Return the value of a cell: an accuracy as a share, another value in the unit of its column."""
    estimate, scale = cell.estimate, 1.0 if cell.column.key == "accuracy" else cell.column.scale
    if estimate is None:
        return "refused" if cell.reasons else ""
    value, low, high, note = estimate
    return Estimate(scale * value, scale * low, scale * high, note)
