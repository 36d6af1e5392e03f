"""Tables of results/priprune.md about the attackers that know of withholding, from results/rows.

python results/withholding.py [results/rows/priprune-withholding.jsonl.xz]
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from scipy.stats import t

from secateur.evaluation.attack_strength import UNMET, name_unmet
from secateur.runs.archive import read_archive
from secateur.runs.rows import Row

ROWS = Path(__file__).parent / "rows" / "priprune-withholding.jsonl.xz"
ATTACKERS = {
    "sgi": "SGI",
    "sgi:follows=true": "remembers",
    "sgi:adaptive=support": "support",
    "sgi:adaptive=support:follows=true": "both",
    "sgi:magnitudes=true": "squares",
}
NOT_MET = "known attacker, not met"
Course = Mapping[tuple[int, int], float]  # by seed and round
Key = tuple[str, str, str | None, str]  # base pruning, defense, attacker, metric


def collect(rows: list[Row]) -> dict[Key, dict[tuple[int, int], float]]:
    """Return the values of each federation, attacker and metric by seed and round."""
    values: dict[Key, dict[tuple[int, int], float]] = defaultdict(dict)
    for row in rows:
        parts = (row.attack or "").split(":")
        name = ":".join(part for part in parts if not part.startswith(("iterations=", "learning_rate=")))
        if row.value is not None:
            key = str(row.pruner), str(row.defense).partition(":acc")[0], ATTACKERS.get(name), row.metric
            values[key][row.seed, row.extra["round"]] = row.value
    return values


def over_seeds(course: Course, last: bool = False) -> tuple[float, float]:
    """Return the mean over seeds of a course's mean, or of its last value, and half of Student's 95 % interval."""
    seeds: dict[int, list[float]] = defaultdict(list)
    for (seed, _), value in sorted(course.items()):
        seeds[seed].append(value)
    means = [values[-1] if last else mean(values) for values in seeds.values()]
    half = float(t.ppf(0.975, len(means) - 1)) * stdev(means) / len(means) ** 0.5 if len(means) > 1 else math.inf
    return mean(means), half


def show(value: float, half: float, digits: int = 3) -> str:
    """Return a value with its interval; of one seed there is none."""
    return f"{value:.{digits}f}" + (f" ± {half:.{digits}f}" if half < math.inf else "")


def show_leakage(course: Course, among: Course) -> str:
    """Return the mean of a course with its interval, and its seeds where they are fewer than those of another."""
    seeds, all_seeds = ({seed for seed, _ in part} for part in (course, among))
    few = f" ({len(seeds)} of {len(all_seeds)} seeds)" if len(seeds) < len(all_seeds) else ""
    return f"{show(*over_seeds(course))}{few}" if course else ""


def make_table(path: Path = ROWS) -> str:
    """Return one line a federation: accuracy, leakage by attacker, and paired differences."""
    rows = read_archive(path).rows
    values = collect(rows)
    attacks: dict[tuple[str, str], set[str]] = defaultdict(set)
    for row in rows:
        if row.attack:
            attacks[str(row.pruner), str(row.defense).partition(":acc")[0]].add(row.attack)
    heads = [f"AMI: {name}" for name in ATTACKERS.values()] + [f"recognisable, %: {name}" for name in ("SGI", "both")]
    titles = ["base", "defense", "accuracy, %", "withheld, %", *heads, "AMI above no defense, both", NOT_MET]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for base, defense in dict.fromkeys(key[:2] for key in values):
        accuracy, half = over_seeds(values[base, defense, None, "test_accuracy"], last=True)
        withheld = values.get((base, defense, None, "withheld_of_all"))
        line = [base, defense, show(100 * accuracy, 100 * half, 1)]
        line += [f"{100 * over_seeds(withheld, last=True)[0]:.1f}" if withheld else ""]
        courses = {name: values.get((base, defense, name, "ami_256"), {}) for name in ATTACKERS.values()}
        line += [show_leakage(course, courses["SGI"]) for course in courses.values()]
        for name in ("SGI", "both"):
            share, half = over_seeds(values[base, defense, name, "recognisable"])
            line.append(show(100 * share, 100 * half, 0))
        both, plain = values[base, defense, "both", "ami_256"], values[base, "none", "both", "ami_256"]
        paired = {key: value - plain[key] for key, value in both.items()}
        line.append(show(*over_seeds(paired)) if defense != "none" else "")
        line.append(name_unmet(defense, attacks[base, defense], base).removeprefix(UNMET))
        lines.append(f"| {' | '.join(line)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(make_table(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS))
