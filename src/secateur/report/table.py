"""Table builder of the page and of the terminal: columns make cells from lines; names and formats of the measures."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from secateur.metrics.membership import TOO_FEW
from secateur.report.summary import SummaryCell, SummaryLine

if TYPE_CHECKING:
    from rich.table import Table as RichTable

ATTACK = {
    "auc": "AUC",
    "attack_accuracy": "attack accuracy",
    "balanced_accuracy": "balanced accuracy",
    "advantage": "advantage",
    "tpr_at_fpr_0.1": "TPR at 10 % FPR",
    "tpr_at_fpr_0.01": "TPR at 1 % FPR",
    "tpr_at_fpr_0.001": "TPR at 0.1 % FPR",
}
MODEL = {
    "test_accuracy": "test accuracy",
    "train_accuracy": "train accuracy",
    "generalisation_gap": "generalisation gap",
    "confidence_gap": "confidence gap",
    "sensitivity_gap": "sensitivity gap",
    "sensitivity_gap_size": "sensitivity gap, size",
    "epsilon": "ε proved",
}
COST = {
    "nonzero_parameters": "non-zero parameters",
    "conv_weights_masked": "conv weights, masked",
    "conv_weights_removed": "conv weights, removed",
} | {
    f"{name}_{form}": f"{title}, {form}"
    for name, title in {"parameters": "parameters", "flops": "FLOPs", "bytes": "bytes", "seconds": "latency"}.items()
    for form in ("masked", "removed", "compressed")
}
RECOVERY = {
    "recognisable": "recognisable",
    "psnr": "PSNR",
    "psnr_median": "PSNR, median",
    "psnr_min": "PSNR, lowest",
    "psnr_max": "PSNR, highest",
    "psnr_grey": "PSNR of grey",
    "ssim": "SSIM",
    "lpips": "LPIPS",
    "cw_ssim": "CW-SSIM",
    "identified": "nearest to its own truth",
    "label_accuracy": "labels right",
    "returned": "pictures returned",
}
BESIDE = {
    "recognisable_squares": "recognisable by squared error",
    "recognisable_denoised": "after a denoiser",
    "recognisable_lpips": "by LPIPS",
    "updates": "updates",
    "pictures": "pictures",
    "mse": "MSE",
    "nmi_256": "NMI, 256 levels",
    "nmi_256_chance": "NMI by chance",
    "ami_256": "AMI, 256 levels",
    "diverged": "diverged",
    "failed": "targets failed",
    "attack_loss": "attack's loss",
    "residual_ratio": "residual / gradient",
    "seconds": "seconds",
}
FEDERATED = {
    "client_accuracy": "average client's accuracy",
    "client_advantage": "average client's advantage",
    "server_accuracy": "server accuracy",
    "server_advantage": "server advantage",
    "lost_clients": "clients lost",
    "bytes_up": "MB up",
    "bytes_down": "MB down",
    "client_bytes_up": "MB up a client",
    "client_bytes_down": "MB down a client",
}
STUDIED = {
    "ratio": "bytes, share of dense",
    "paper_ratio": "share of dense, as the paper counts",
    "defense_seconds": "seconds of the defense",
    "user_seconds": "seconds of defense and gradients",
    "epoch_seconds": "seconds an epoch",
    "residual_mean": "residual's norm",
    "never_sent": "entries never sent",
}
TITLES = ATTACK | MODEL | COST | RECOVERY | BESIDE
SHARES = frozenset(
    {"test_accuracy", "train_accuracy", "conv_weights_masked", "conv_weights_removed"}
    | {"recognisable", "identified", "identified_chance", "label_accuracy", "returned", "failed"}
    | {"recognisable_squares", "recognisable_denoised", "recognisable_lpips"}
    | {"client_accuracy", "client_advantage", "server_accuracy", "server_advantage"}
    | set(ATTACK)
) - {"auc", "advantage"}
COUNTS = ("diverged", "updates", "pictures")
MEGABYTES = ("bytes_up", "bytes_down", "client_bytes_up", "client_bytes_down")
WORST = "worst_group_"  # the prefix of measures of the worst group
DECIBELS = "psnr"  # the prefix of measures in dB
MOST_LINES = 300  # of a table; all measurements are in results.jsonl
NAME_WIDTH = 16  # characters of a name that a narrow terminal does not split


@dataclass(frozen=True)
class TableCell:
    """One cell: its text, the lines of small print below it, and the number that the column is sorted by."""

    text: str
    small: tuple[str, ...] = ()
    value: float | None = None
    measured: bool = False  # True: the cell is a measurement, sorted by `value`; a missing one stays last
    note: str | None = None  # a footnote of the page


@dataclass(frozen=True)
class Column:
    """One column: its heading, and the function that makes the cell of a line."""

    heading: str
    build: Callable[[Any], TableCell | str]
    number: bool = False


@dataclass(frozen=True)
class ReportTable:
    """A table of a page or of a terminal."""

    caption: str
    columns: Sequence[Column]
    lines: Sequence[Sequence[TableCell]]
    id: str = ""
    wide: bool = False
    bold: frozenset[int] = frozenset()  # numbers of the lines in bold
    total: int = 0  # lines that there are
    chosen: str = ""  # why these lines are shown, where there are more

    @property
    def left_out(self) -> str:
        """The sentence on lines that are not shown; empty if all are."""
        if self.total <= len(self.lines):
            return ""
        return f"{len(self.lines)} of {self.total:,} lines are shown, {self.chosen}; all are in results.jsonl."

    @property
    def notes(self) -> list[str]:
        """The footnotes of the cells."""
        return [cell.note for line in self.lines for cell in line if cell.note]


def build_table(
    caption: str,
    lines: Iterable[Any],
    columns: Iterable[Column],
    *,
    id: str = "",
    wide: bool = False,
    is_bold: Callable[[Any], bool] = lambda line: False,
    rank: tuple[str, Callable[[Any], float]] | None = None,
) -> ReportTable:
    """Build a table: one line for each of `lines`, one cell for each of `columns`.

    Args:
        caption: the name of the table for readers who hear the page.
        lines: lines of a summary, or other records that the columns can read.
        columns: see `label_column` and `measure_column`.
        id: the table's id on the page.
        wide: True if the table has many columns; it is printed in smaller type.
        is_bold: True for lines in bold.
        rank: a measure in words, and a line's value of it: of too many lines the highest are shown, else the first.
    """
    columns, every = list(columns), list(lines)
    chosen, lines = "the first", every[:MOST_LINES]
    if rank is not None and len(every) > MOST_LINES:
        chosen, value = f"those of the highest {rank[0]}", rank[1]
        highest = heapq.nlargest(MOST_LINES, range(len(every)), key=lambda number: value(every[number]))
        lines = [every[number] for number in sorted(highest)]
    built = [[_to_cell(column.build(line)) for column in columns] for line in lines]
    bold = frozenset(number for number, line in enumerate(lines) if is_bold(line))
    return ReportTable(caption, columns, built, id, wide, bold, len(every), chosen)


def _to_cell(cell: TableCell | str) -> TableCell:
    return cell if isinstance(cell, TableCell) else TableCell(cell)


def label_column(name: str, heading: str | None = None, number: bool = False) -> Column:
    """Return the column of a label; lines without it have a dash."""

    def build(line: SummaryLine) -> str:
        value = line.labels.get(name)
        return "-" if value is None else str(value)

    return Column(heading or name, build, number)


def measure_column(metric: str, heading: str | None = None, interval: bool = True) -> Column:
    """Return the column of a measure; its heading is the measure's title unless another one is set."""
    return Column(heading or name_measure(metric), lambda line: build_measure(line, metric, interval), number=True)


def build_measure(line: SummaryLine, metric: str, interval: bool = True) -> TableCell:
    """Return the cell of a measure, with its interval below it and its note."""
    cell = line.cells.get(metric) or SummaryCell(None, None, None)
    number, bracket, ends = format_measure(cell, metric, interval).partition(" [")
    return TableCell(number, (f"[{ends}",) if bracket else (), cell.value, measured=True, note=cell.note)


def to_rich(table: ReportTable, **style: Any) -> RichTable:
    """Return the table for a terminal: numbers whole and to the right, names folded only where they are long."""
    from rich.table import Table

    rich = Table(box=None, header_style="bold", caption=table.left_out or None, **style)
    for number, column in enumerate(table.columns):
        if column.number:
            rich.add_column(column.heading, justify="right", no_wrap=True)
        else:
            parts = [part for line in table.lines for part in line[number].text.split("\n")]
            longest = max(map(len, parts), default=0)
            rich.add_column(column.heading, overflow="fold", min_width=min(NAME_WIDTH, longest))
    for line in table.lines:
        rich.add_row(*(cell.text for cell in line))
    return rich


def name_measure(metric: str) -> str:
    """Return the title of a measure."""
    if metric.startswith(WORST):
        return f"{name_measure(metric.removeprefix(WORST))} of the worst group"
    return (TITLES | FEDERATED | STUDIED).get(metric, metric.replace("_", " "))


def order_measures(names: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return the measures in `names`: first those in `known`, in that order, then the others."""
    names = dict.fromkeys(names)
    first = [name for name in known if name in names]
    return first + [name for name in names if name not in first]


def format_measure(cell: SummaryCell | None, metric: str, interval: bool = True) -> str:
    """Format a number with its interval: shares in per cent, counts with separators or in millions.

    Example:
        >>> format_measure(SummaryCell(0.975, 0.955, 0.987), "test_accuracy")
        '97.5% [95.5, 98.7]'
        >>> format_measure(SummaryCell(25978, None, None), "bytes_masked")
        '25,978'
    """
    if cell is None or cell.value is None or (metric.startswith("tpr_at_fpr") and TOO_FEW in (cell.note or "")):
        return "-"  # a note says why; a share of so few rows would be read as a rate
    if metric in SHARES:
        return _format_ends(cell, interval, lambda x: f"{100 * x:.1f}", "%")
    if metric.startswith(DECIBELS):
        return _format_ends(cell, interval, "{:.1f}".format, " dB")
    if metric in MEGABYTES:
        return _format_ends(cell, interval, format_megabytes, "")
    if metric == "attack_loss":
        return f"{cell.value:.3g}"
    if metric == "seconds":
        return f"{cell.value:.1f} s"
    if metric in TITLES and metric not in (*COST, *COUNTS):
        return _format_ends(cell, interval, "{:.3f}".format, "")
    if metric.startswith("seconds"):
        return f"{1000 * cell.value:.2f} ms"
    return _format_count(cell.value) if float(cell.value).is_integer() else f"{cell.value:.3f}"


def _format_count(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.2f} {letter}"
    return f"{value:,.0f}"


def _format_ends(cell: SummaryCell, interval: bool, write: Callable[[float], str], unit: str) -> str:
    """Return the value with its unit, and its interval unless it has no width."""
    assert cell.value is not None
    value = f"{write(cell.value)}{unit}"
    if not interval or cell.low is None or cell.high is None or cell.low == cell.high:
        return value
    return f"{value} [{write(cell.low)}, {write(cell.high)}]"


def format_megabytes(value: float) -> str:
    """Return bytes in MB with readable digits, also for small numbers.

    Example:
        >>> format_megabytes(121_281_000), format_megabytes(4_230)
        ('121.28', '0.0042')
    """
    return f"{value / 1e6:.2f}" if value >= 1e5 or not value else f"{value / 1e6:.2g}"
