"""Tables of results/recommend.md: the recommended recipe beside hand-picked ones, on rows that chose nothing.

python results/recommend.py results/rows/recommend-location.jsonl.xz ...

Prints one table an archive, a line a seed and recipe, and what the recommended one is beside each hand-picked one.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

from secateur.evaluation.selection import AUC, BYTES, COMPARED, DROP, TPR
from secateur.report.recommend import name_recipe
from secateur.runs.archive import read_archive
from secateur.runs.rows import Row

MEASURES = (DROP, AUC, TPR, BYTES)


def group(rows: list[Row]) -> dict[tuple[int, int], dict[str, Row]]:
    """Return the measures of each recipe, by seed and number; hand-picked ones have numbers below 0."""
    recipes: dict[tuple[int, int], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        if row.metric.startswith(COMPARED):
            recipes[row.seed, row.extra["recipe"]][row.metric.removeprefix(COMPARED)] = row
    return recipes


def write(row: Row | None) -> str:
    """Return a measure with its interval."""
    if row is None or row.value is None:
        return "-"
    ends = "" if row.low in (None, row.high) else f" [{row.low:.3f}, {row.high:.3f}]"
    return f"{row.value:.3f}{ends}"


def value(recipe: dict[str, Row], measure: str) -> float:
    """Return a measure's value; a missing one is the worst."""
    row = recipe.get(measure)
    return float("inf") if row is None or row.value is None else row.value


def judge(recommended: dict[str, Row], rival: dict[str, Row]) -> str:
    """Return what the recommended recipe is beside a hand-picked one: by values, and beyond the intervals."""
    words = []
    for measure, name in ((DROP, "accuracy"), (AUC, "AUC"), (TPR, "TPR")):
        one, other = recommended.get(measure), rival.get(measure)
        if one is None or other is None or None in (one.high, one.low, other.high, other.low):
            continue
        better, worse = one.high < other.low, one.low > other.high  # type: ignore[operator]
        near = "no worse" if value(recommended, measure) <= value(rival, measure) else "worse within intervals"
        words.append(f"{name} {'better' if better else 'worse' if worse else near}")
    return ", ".join(words)


def main(paths: list[Path]) -> None:
    """Print the table of each archive."""
    for path in paths:
        archive = read_archive(path)
        recipes = group(archive.rows)
        print(f"\n{path.name}: {archive.provenance.get('command')}; commit {archive.provenance.get('commit')}\n")
        print("| seed | recipe | accuracy drop | AUC | TPR at 1 % | bytes | the recommended one is |")
        print("|---|---|---|---|---|---|---|")
        for (seed, number), measures in sorted(recipes.items(), key=lambda item: (item[0][0], -item[0][1])):
            row = next(iter(measures.values()))
            labels = {name: getattr(row, name) for name in ("pruner", "sparsity", "defense")}
            best = next(other for (s, n), other in recipes.items() if s == seed and n >= 0)
            verdict = "**recommended**" if number >= 0 else judge(best, measures)
            cells = " | ".join(write(measures.get(name)) for name in MEASURES)
            print(f"| {seed} | {name_recipe(labels)} | {cells} | {verdict} |")


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
