"""The table of a study, as Markdown for people and as rows for programs, and verdicts on a paper's claims.

Claims are data: a paper's claims.json has the words, need, bound and unit of every claim, by table and name. It also
has the two keys of the results that a claim compares (`Results.judge`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from scipy.stats import binom

from secateur.metrics.membership import Estimate
from secateur.runs.artifacts import SCHEMA
from secateur.studies import read_data

SUPPORTED, NOT_SUPPORTED, UNDECIDED = "supported", "not supported", "undecided"
TAIL = 0.025  # the share of 95 % intervals that lie above their own centre by chance
Need = Literal["most", "every", "some"]
Cases = dict[str, Estimate | None]  # by the name of a case; None: not measured


@dataclass(frozen=True)
class Finding:
    """A claim of the paper, the measurements that concern it, and the verdict."""

    claim: str
    measured: str
    verdict: str
    key: str = ""  # table.name in the paper's claims.json, or the name of a claim that code judges


def judge(
    claim: str,
    cases: Mapping[str, Estimate | None],
    need: Need = "most",
    bound: float = 0.0,
    unit: str = "points",
    key: str = "",
) -> Finding:
    """Test the claim `case > bound` in most, every or some cases by the cases' intervals.

    A case counts for the claim if its interval lies entirely above the bound, and against the claim if no part does.
    Among many cases a few lie above by chance: `some` needs more of them than chance explains.
    """
    known = {name: case for name, case in cases.items() if case is not None}
    above = sum(case.low > bound for case in known.values())
    against = sum(case.high <= bound for case in known.values())
    return Finding(claim, _describe(known, above, against, unit), verdict(above, against, len(known), need), key)


def verdict(above: int, against: int, cases: int, need: Need = "most") -> str:
    """Return the verdict for these numbers of cases above the bound and against the claim.

    Example:
        >>> verdict(3, 1, 5), verdict(1, 1, 5), verdict(2, 1, 5, "some"), verdict(4, 1, 5, "every")
        ('supported', 'undecided', 'supported', 'not supported')
        >>> verdict(1, 0, 2, "some"), verdict(1, 0, 80, "some"), verdict(6, 0, 80, "some")
        ('supported', 'undecided', 'supported')
    """
    if not cases:
        return UNDECIDED
    by_chance = float(binom.sf(above - 1, cases, TAIL))  # that so many lie above though all are at the bound
    enough = {"most": above > cases / 2, "every": above == cases, "some": above > 0 and by_chance < 0.05}
    refuted = {"most": against >= cases / 2, "every": against > 0, "some": against == cases}
    return SUPPORTED if enough[need] else NOT_SUPPORTED if refuted[need] else UNDECIDED


def negate(estimate: Estimate) -> Estimate:
    """Return an estimate with the other sign, for a claim that a measure is low."""
    return Estimate(-estimate.value, -estimate.high, -estimate.low, estimate.note)


def equals(claim: str, measured: Estimate, paper: float, key: str = "") -> Finding:
    """Test whether our interval contains the paper's number."""
    text = f"{format_estimate(measured)} against the paper's {100 * paper:.2f}%"
    if not (math.isfinite(measured.low) and math.isfinite(measured.high)):
        return Finding(claim, text, UNDECIDED, key)
    return Finding(claim, text, SUPPORTED if measured.low <= paper <= measured.high else NOT_SUPPORTED, key)


def format_estimate(estimate: Estimate, unit: str = "%") -> str:
    """Format a number with its interval: in per cent, in percentage points (signed), or plain.

    Example:
        >>> format_estimate(Estimate(0.5, 0.4, 0.6)), format_estimate(Estimate(0.012, -0.01, 0.03), "points")
        ('50.0% [40.0, 60.0]', '+1.2 points [-1.0, +3.0]')
        >>> format_estimate(Estimate(0.2718, 0.26, 0.28), ""), format_estimate(Estimate(7995189.4, 7.9e6, 8e6), "")
        ('0.272 [0.260, 0.280]', '7,995,189 [7,900,000, 8,000,000]')
    """
    plain = ",.0f" if abs(estimate.value) >= 1000 else "z.3f"  # z: never -0.0, whose sign is rounding's
    scale, form = (1, plain) if unit == "" else (100, "z.1f") if unit == "%" else (100, "+z.1f")
    space = " " if unit == "points" else ""
    ends = [f"{scale * end:{form}}" for end in (estimate.low, estimate.high) if math.isfinite(end)]
    text = f"{scale * estimate.value:{form}}{space}{unit}"
    return f"{text} [{', '.join(ends)}]" if len(ends) == 2 and estimate.low < estimate.high else text


def _describe(cases: Mapping[str, Estimate], above: int, against: int, unit: str) -> str:
    if not cases:
        return "not measured here"
    if len(cases) == 1:
        ((name, case),) = cases.items()
        return f"{name}: {format_estimate(case, unit)}"
    centre = sum(case.value for case in cases.values()) / len(cases)
    average = format_estimate(Estimate(centre, -math.inf, math.inf), unit)
    counts = {"against": against, "undecided": len(cases) - above - against}
    others = "".join(f", {number} {word}" for word, number in counts.items() if number)
    return f"{above} of {len(cases)}{others}; mean {average}"


BLOCKS = "▁▂▃▄▅▆▇█"
CURVE = 20  # points of a curve in a line of text
Cells = dict[str, Estimate | str | None]  # by column


@dataclass(frozen=True)
class TableLine:
    """A line of a table: its labels, the measured cells, the paper's numbers, and a remark for the reader."""

    labels: dict[str, str]
    cells: Cells
    paper: str = ""
    mark: str = ""
    part: str = ""  # a part's title: each part has a table of its own under this title


@dataclass(frozen=True)
class StudyTable:
    """The result of a study."""

    title: str
    settings: dict[str, Any]  # the study's name and scale, data, model, shadows, seeds, ...
    lines: Sequence[TableLine]
    findings: Sequence[Finding] = field(default_factory=list)
    intervals: str = ""  # describes the bracketed intervals; empty: they are over examples or seeds
    caution: str = ""  # how a line or an attacker was picked

    def markdown(self) -> str:
        """Return the text of table.md, with columns aligned for reading in a terminal."""
        about = ", ".join(f"{name} {_plain(value)}" for name, value in self.settings.items() if name != "study")
        parts = [f"# {self.settings['study']}: {self.title}", f"{about}. {self._caution()}"]
        for title in dict.fromkeys(line.part for line in self.lines):
            parts += [f"## {title}"] if title else []
            parts.append(_lines([line for line in self.lines if line.part == title]))
        if self.findings:
            body = [[finding.claim, finding.measured, f"**{finding.verdict}**"] for finding in self.findings]
            parts.append(_grid(["what the paper says", "measured", "verdict"], body))
        return "\n\n".join(parts) + "\n"

    def _caution(self) -> str:
        """Return a sentence on how far the intervals and verdicts can be trusted."""
        if self.intervals:
            text = self.intervals
        elif len(self.settings["seeds"]) == 1:
            text = "Intervals (95 %) are over the examples of one seed; another seed may differ by more."
        else:
            text = "Values are means over seeds, with Student's 95 % intervals over them."
        tiny = "This scale shows that the study runs, not what is true." if self.settings["scale"] == "tiny" else ""
        return " ".join(filter(None, (text, self.caution, tiny)))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield one flat object per measured number, then one per claim."""
        common = {"schema": SCHEMA} | self.settings
        for line in self.lines:
            for name, cell in line.cells.items():
                if isinstance(cell, Estimate):
                    row = {"metric": name, "value": _finite(cell.value), "low": _finite(cell.low)}
                    row |= {"high": _finite(cell.high), "note": cell.note}
                    yield common | line.labels | row | {"paper": line.paper or None, "mark": line.mark or None}
        for finding in self.findings:
            claimed = {"claim": finding.claim, "measured": finding.measured, "verdict": finding.verdict}
            yield common | {"metric": "claim", "value": None} | claimed

    def jsonl(self) -> str:
        """Return the rows as JSON lines."""
        return "".join(json.dumps(row, allow_nan=False) + "\n" for row in self.rows())


Tabulated = tuple[list[TableLine], list[Finding]]


def find_printed(paper: str, *labels: str | float) -> Any:
    """Return what a paper prints at these labels, such as a table, a row and a column; None if it prints nothing.

    Example:
        >>> find_printed("dgp", "table_3", "resnet18", "dgp"), find_printed("dgp", "table_2_accuracy", 0.05, 0.75)
        (52.216, 0.934)
    """
    value = read_data(paper, "printed")
    for label in labels:
        value = value.get(label if isinstance(label, str) else f"{label:g}") if isinstance(value, dict) else None
    return value


def curve(values: Sequence[float]) -> str:
    """Return a course of values as one line of text, with about CURVE of them."""
    return sparkline(values[:: max(1, len(values) // CURVE)])


def sparkline(shares: Sequence[float]) -> str:
    """Return a histogram as one line of text.

    Example:
        >>> sparkline([0.0, 0.25, 0.5, 1.0])
        '▁▃▅█'
    """
    top = max(shares, default=0.0) or 1.0
    return "".join(BLOCKS[math.ceil(share / top * (len(BLOCKS) - 1))] for share in shares)


def unit_of(column: str) -> str:
    """Return the unit of a column: "%" for accuracies, losses and advantages, "points" for changes, else ""."""
    if column.startswith("change"):
        return "points"
    return "%" if column.endswith(("accuracy", "loss", "advantage")) else ""


def _lines(lines: Sequence[TableLine]) -> str:
    """Return lines as one table; columns that are empty in all lines are omitted."""
    columns = dict.fromkeys(name for line in lines for name, cell in (line.labels | line.cells).items() if cell)
    extra = [name for name in ("paper", "mark") if any(getattr(line, name) for line in lines)]
    body = [
        [_text(name, (line.labels | line.cells).get(name)) for name in columns]
        + [getattr(line, name) for name in extra]
        for line in lines
    ]
    return _grid([name.replace("_", " ") for name in columns] + extra, body)


def _text(column: str, cell: Estimate | str | None) -> str:
    return format_estimate(cell, unit_of(column)) if isinstance(cell, Estimate) else cell or ""


def _grid(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    rows = [[cell.replace("|", "\\|") for cell in row] for row in (head, *body)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = [" | ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in rows]
    rule = " | ".join("-" * max(width, 3) for width in widths)
    return "\n".join(f"| {text} |" for text in (texts[0], rule, *texts[1:]))


def _plain(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
