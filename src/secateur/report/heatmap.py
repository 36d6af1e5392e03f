"""Heat map of the matrix: defenses by attackers, on one network.

All of it is made from rows: a cell has a row for each seed and attack, and a refused cell has a row with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from secateur.attacks.inversion.adaptive import settings_of_mode
from secateur.catalogue import methods, name_of
from secateur.evaluation.attack_strength import SMOOTH, list_unmet, read_mode
from secateur.metrics.estimates import Measure, mean, pick_highest
from secateur.metrics.membership import Estimate
from secateur.report.summary import group_by
from secateur.runs.rows import Row

CELL, REFUSED = "matrix_cell", "matrix_refused"  # metrics of the rows of a cell
GROUND = "matrix_ground"  # metric of a row with the settings that all cells of a run share
NONE, FIRST = "none", "none (first round)"  # the rows without a defense, in the federation and outside one
BASIC, TUNED = "basic", "on the final model"  # fine-tuning without a defense, and the group of fine-tuned rows
COPY = 60.0  # dB from which a picture counts as a copy
SHADOWED = "LiRA and RMIA learn from shadow clients of one turn; shadow federations and rmia:gamma=1 were not met"
SMOOTHED = f"of sgi and {SMOOTH} one did not run with all that the other knew of the defense"
SCALE = ("#fff7d6", "#fee391", "#fec44f", "#fe9929", "#bf4a02", "#7a2503")  # light to dark: safe for colour-blind eyes
MOST_NETWORKS, MOST_ROWS, MOST_LINES = 6, 60, 12  # of a page, of a heat map, of a cell
SHOWN = ("inversion", "strongest", "active")  # columns with pictures


@dataclass(frozen=True)
class MatrixColumn:
    """A column: an attacker with the range of its colours, or a cost, which has no colour."""

    key: str
    title: str
    about: str
    unit: str
    worst: tuple[float, float] | None = None  # values of the lightest and of the darkest colour
    scale: float = 1.0  # from the stored value to the unit
    digits: int = 3
    possible: tuple[float, float] = (-math.inf, math.inf)  # possible values

    def clip(self, measured: Estimate) -> Estimate:
        """Return an estimate whose interval ends where the possible values do."""
        least, most = self.possible
        low, high = (min(max(end, least), most) for end in (measured.low, measured.high))
        return Estimate(measured.value, low, high, measured.note)

    def format(self, measured: Estimate) -> str:
        """Return a value in the column's unit."""
        return f"{self.scale * measured.value:.{self.digits}f}"

    def format_interval(self, measured: Estimate) -> str:
        """Return an interval in the column's unit; empty if it is unknown or has no width."""
        if not (math.isfinite(measured.low) and math.isfinite(measured.high)) or measured.low == measured.high:
            return ""
        return " to ".join(f"{self.scale * end:.{self.digits}f}" for end in (measured.low, measured.high))

    def shade(self, value: float) -> int | None:
        """Return the number of the colour of a value; None for a cost."""
        if self.worst is None:
            return None
        low, high = self.worst
        return min(len(SCALE) - 1, max(0, int((value - low) / (high - low) * len(SCALE))))


AUC, PSNR = (0.5, 0.8), (12.0, 30.0)
SHARE, COPIED, POSITIVE = (0.0, 1.0), (-math.inf, COPY), (0.0, math.inf)
COLUMNS = (
    MatrixColumn(
        "final-rmia", "final model: RMIA", "membership by the final model's answers", "AUC", AUC, possible=SHARE
    ),
    MatrixColumn(
        "final-lira", "final model: LiRA", "membership by the final model's answers", "AUC", AUC, possible=SHARE
    ),
    MatrixColumn("updates", "updates: members", "membership by a client's last updates", "AUC", AUC, possible=SHARE),
    MatrixColumn("inversion", "inversion, plain", "pictures from an update by plain sgi", "dB", PSNR, 1, 1, COPIED),
    MatrixColumn(
        "strongest", "inversion, strongest", "the best inversion, also by who knows of it", "dB", PSNR, 1, 1, COPIED
    ),
    MatrixColumn("active", "active server", "pictures by a model that was tampered with", "dB", PSNR, 1, 1, COPIED),
    MatrixColumn("accuracy", "accuracy", "of the final model on non-members", "%", None, 100, 1, SHARE),
    MatrixColumn("bytes", "bytes", "of an update, or of a compressed final model", "MB", None, 1e-6, 2, POSITIVE),
    MatrixColumn(
        "seconds", "seconds", "of the federation, or of fine-tuning the final model", "s", None, 1, 1, POSITIVE
    ),
)
BY_KEY = {column.key: column for column in COLUMNS}


@dataclass(frozen=True)
class MatrixCell:
    """A cell: the strongest of its attacks over the seeds, or the reasons why there is no measurement."""

    column: MatrixColumn
    rows: Sequence[Row]
    seeds: int = 0  # of the heat map

    @cached_property
    def by_attack(self) -> dict[str | None, Measure]:
        """The measurements by attack and seed."""
        known: dict[str | None, Measure] = {}
        for row in self.rows:
            if row.metric == CELL and row.value is not None:
                low, high = (-math.inf if row.low is None else row.low, math.inf if row.high is None else row.high)
                known.setdefault(name_attacker(row), {})[row.seed] = Estimate(row.value, low, high)
        return known

    @cached_property
    def attack(self) -> str | None:
        """The attack of the highest mean, among those of most seeds."""
        return pick_highest(self.by_attack)

    @property
    def measure(self) -> Measure:
        """The measurements of the strongest attack, by seed."""
        return self.by_attack.get(self.attack, {})

    @cached_property
    def estimate(self) -> Estimate | None:
        """The mean over the seeds with its interval."""
        average = mean(self.measure)
        return None if average is None else self.column.clip(average)

    @cached_property
    def greys(self) -> dict[int, float]:
        """The PSNR of a grey picture on the pictures of the cell, by seed."""
        rows = (row for row in self.rows if row.metric == CELL and name_attacker(row) == self.attack)
        return {row.seed: row.extra["psnr_grey"] for row in rows if "psnr_grey" in row.extra}

    @property
    def text(self) -> str:
        """The value."""
        return "" if self.estimate is None else self.column.format(self.estimate)

    @property
    def interval(self) -> str:
        """The interval in words, with the number of seeds if others have more; one seed's is over its examples."""
        if self.estimate is None:
            return ""
        few = f"{len(self.measure)} of {self.seeds} seeds" if len(self.measure) < self.seeds else ""
        return ", ".join(filter(None, (self.column.format_interval(self.estimate), few)))

    @property
    def shade(self) -> int | None:
        """The number of the colour."""
        return None if self.estimate is None else self.column.shade(self.estimate.value)

    @property
    def reasons(self) -> list[str]:
        """The reasons of seeds without a measurement."""
        texts = (f"{row.note} (said by {row.extra.get('by')})" for row in self.rows if row.metric == REFUSED)
        return list(dict.fromkeys(texts))[:MOST_LINES] if not self.measure else []

    @property
    def marks(self) -> list[str]:
        """The attackers that were not met, or the place of an attack outside the ground."""
        notes = [row.extra.get(name) for row in self.rows for name in ("unmet", "outside")]
        notes.append(self.lack)
        return list(dict.fromkeys(str(note) for note in notes if note))[:MOST_LINES]

    @property
    def unmet(self) -> bool:
        """True if a stronger attacker is known that was not met."""
        return bool(self.lack) or any(row.extra.get("unmet") for row in self.rows)

    @property
    def outside(self) -> bool:
        """True if the attack ran outside the federation, which has other pictures or another training."""
        return any(row.extra.get("outside") for row in self.rows)

    @property
    def lack(self) -> str:
        """The attackers that newer rows met, and these did not on every seed; empty if none."""
        name = str(self.rows[0].extra.get("row"))
        submodels = name != NONE and name_of(name) in methods("submodel")
        if self.column.key == "strongest":
            unneeded = {"reapply"} if submodels else set()  # it knows of the step of Adam by itself
            return "" if all(self._met_both(seed, unneeded) for seed in self.measure) else SMOOTHED
        if self.column.key == "active":
            modes = list(dict.fromkeys(mode for seed in self.measure for mode in self._list_unasked(seed)))
            return f"it did not run with {', '.join(map(settings_of_mode, modes))} on every seed" if modes else ""
        shadowed = {row.seed for row in self.rows if "shadows" in row.extra}
        return SHADOWED if submodels and self.column.key == "updates" and not self.measure.keys() <= shadowed else ""

    def _met_both(self, seed: int, unneeded: set[str]) -> bool:
        """Return True if ig-smooth and sgi knew as much on a seed, but for modes that ig-smooth needs not."""
        attacks = [row.attack for row in self.rows if row.seed == seed and row.attack]
        smooth = {read_mode(attack) for attack in attacks if name_of(attack) == SMOOTH}
        others = {read_mode(attack) for attack in attacks if name_of(attack) != SMOOTH}
        return bool(smooth and others) and others - unneeded <= smooth <= others

    def _list_unasked(self, seed: int) -> list[str]:
        """Return the modes of the active server that work against the defense, and did not run on a seed."""
        attacks = [row.attack for row in self.rows if row.seed == seed and row.attack]
        return list_unmet(str(self.rows[0].defense), attacks, able=True)

    def list_rows(self) -> list[tuple[str, str, str]]:
        """Return a line for each attack: its name, its mean, and its values by seed with other scores."""
        lines = []
        for attack, measure in list(self.by_attack.items())[:MOST_LINES]:
            average = mean(measure)
            assert average is not None
            average = self.column.clip(average)
            interval = self.column.format_interval(average)
            same = {row.seed: row for row in self.rows if row.metric == CELL and name_attacker(row) == attack}
            seeds = sorted(same)[:MOST_LINES]
            numbers = [f"{self.column.format(measure[x])} (seed {x}{_describe(same[x])})" for x in seeds]
            text = f"{self.column.format(average)}{f' [{interval}]' if interval else ''}"
            lines.append((attack or "", text, ", ".join(numbers)))
        return lines


def name_attacker(row: Row) -> str | None:
    """Return the attack of a measurement, with its reference models where there are several kinds."""
    references = row.extra.get("references")
    return f"{row.attack}, {references}" if references else row.attack


def _describe(row: Row) -> str:
    """Return the other scores of a measurement in words."""
    words = {"recognisable": "recognisable", "tpr": "TPR at 1 % FPR"}
    known = {name: value for name in words if isinstance(value := row.extra.get(name), float)}
    return "".join(f", {words[name]} {100 * value:.0f} %" for name, value in known.items())


@dataclass(frozen=True)
class MatrixRow:
    """A row: a defense on one network."""

    name: str
    group: str
    network: str
    cells: dict[str, MatrixCell]
    greys: Mapping[str, dict[int, float]] = field(default_factory=dict)  # of the row none, by column and seed

    def name_base(self, column: str) -> str:
        """Return the row that a column is compared with.

        A defense of fine-tuning is held against fine-tuning that has none. Pictures of a first round outside a
        federation are held against those without a defense there.
        """
        defense = next(iter(self.cells.values())).rows[0].defense
        if self.group == TUNED and defense not in (None, NONE, BASIC):
            return BASIC
        return FIRST if column in SHOWN and column in self.cells and self.cells[column].outside else NONE

    @property
    def id(self) -> str:
        """The row's id on the page."""
        return re.sub(r"[^\w]+", "-", f"{self.network}-{self.name}")

    def measure(self, column: str) -> Measure:
        """Return the measurements of a column by seed, to compare rows; empty where there are none.

        Pictures of another row may be other pictures. Their PSNR is moved by the difference of the grey pictures' PSNR.
        """
        if column not in self.cells:
            return {}
        cell, base = self.cells[column], self.greys.get(column, {})
        return {
            seed: _move(measured, base[seed] - cell.greys[seed]) if seed in base and seed in cell.greys else measured
            for seed, measured in cell.measure.items()
        }


@dataclass(frozen=True)
class Heatmap:
    """The matrix on one network."""

    network: str
    groups: dict[str, list[MatrixRow]]

    @property
    def rows(self) -> list[MatrixRow]:
        """All rows."""
        return [row for rows in self.groups.values() for row in rows]

    @cached_property
    def seeds(self) -> list[int]:
        """The seeds of all cells."""
        return sorted({seed for row in self.rows for key in row.cells for seed in row.measure(key)})

    def measure_base(self, row: MatrixRow, column: str) -> Measure:
        """Return the measurements that a column of a row is compared with; empty if there are none.

        A row that lacks ig-smooth is compared without it. Else it would seem to hide from it.
        """
        name = row.name_base(column)
        base = next((other for other in self.rows if other.name == name), None)
        if base is None or column not in base.cells:
            return {}
        if column == "strongest" and column in row.cells and row.cells[column].lack:
            cell = base.cells[column]
            others = [one for one in cell.rows if name_of(one.attack or "") != SMOOTH]
            base = replace(base, cells={**base.cells, column: replace(cell, rows=others)})
        return base.measure(column)


def _move(psnr: Estimate, by: float) -> Estimate:
    """Return a PSNR moved by some dB; a copy stays one."""
    if psnr.value >= COPY or not by:
        return psnr
    value, low, high = (min(number + by, COPY) for number in psnr[:3])
    return Estimate(value, low, high, psnr.note)


def is_cell(row: Row) -> bool:
    """Return True if a row belongs to a cell of the matrix."""
    return row.metric in (CELL, REFUSED)


def build_heatmaps(rows: Iterable[Row]) -> list[Heatmap]:
    """Return the matrix of each network; rows of several runs are joined, a repeated one counts once."""
    kept = [row for row in rows if is_cell(row)]
    maps = []
    for network, same in list(group_by(kept, lambda row: row.model).items())[:MOST_NETWORKS]:
        groups: dict[str, list[MatrixRow]] = {}
        seeds = len({row.seed for row in same if row.metric == CELL})
        bare = group_by((row for row in same if row.extra.get("row") == NONE), lambda row: row.extra.get("column"))
        greys = {key: MatrixCell(BY_KEY[key], some).greys for key, some in bare.items() if key in BY_KEY}
        named = group_by(same, lambda row: (str(row.extra.get("acts_on")), str(row.extra.get("row"))))
        for (group, name), cells in list(named.items())[:MOST_ROWS]:
            by_column = group_by(cells, lambda row: row.extra.get("column"))
            built = {key: MatrixCell(BY_KEY[key], by_column[key], seeds) for key in BY_KEY if key in by_column}
            groups.setdefault(group, []).append(MatrixRow(name, group, network, built, greys))
        maps.append(Heatmap(network, groups))
    return maps
