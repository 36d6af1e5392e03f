"""Writes the tables of results/recommend.md: recommended recipes beside hand-picked ones, on rows that chose nothing.

    python results/recommend.py           # writes the blocks between <!-- rows: NAME --> and <!-- end -->
    python results/recommend.py --check   # fails if a block is not what the rows give

The limits are those of the run files recommend-NAME.yaml. A recipe dominates another by values if it is nowhere worse
in accuracy, AUC and bytes, and in one of them better; beyond the intervals if one is better by whole intervals.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from secateur.evaluation.selection import (
    AUC,
    BYTES,
    COMPARED,
    DROP,
    NAMES,
    OBJECTIVES,
    PREFIX,
    PSNR,
    RECOGNISABLE,
    SPENT,
    TPR,
    Assessment,
    beats,
    choose,
    find_gain,
    find_strongest,
    select_front,
)
from secateur.experiments.recipe_search import TOLERANCE, WHOLE
from secateur.metrics.estimates import mean_of
from secateur.metrics.membership import Estimate
from secateur.report.recommend import assess, read_recipes
from secateur.runs.archive import read_archive
from secateur.runs.rows import Row

HERE = Path(__file__).parent
PAGE = HERE / "recommend.md"
OURS = ("mixed-distil", "relaxed-loss")
DATA = {"cifar10": "CIFAR-10", "location": "Location-30", "digits": "digits"}
ARCHIVES = {"digits": ("digits", "digits-2")}  # others have one of their own name
JUDGED = ((DROP, "accuracy"), (AUC, "AUC"), (TPR, "TPR at 1 %"))
BLOCK = re.compile(r"(<!-- rows: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Seed:
    """One search: the recommended recipe and the hand-picked ones, as measured on rows that chose nothing."""

    seed: int
    recommended: Assessment
    known: Sequence[Assessment]
    rows: Sequence[Row]

    @property
    def papers(self) -> list[Assessment]:
        """The hand-picked recipes by methods of the papers."""
        return [item for item in self.known if not is_ours(item)]


def read_rows(name: str) -> list[Row]:
    """Return the rows of a data set, or of another search."""
    paths = [HERE / "rows" / f"recommend-{part}.jsonl.xz" for part in ARCHIVES.get(name, (name,))]
    return [row for path in paths for row in read_archive(path).rows]


def read_seeds(name: str) -> list[Seed]:
    """Return the searches of a data set."""
    rows, seeds = read_rows(name), []
    for seed in sorted({row.seed for row in rows}):
        same = [row for row in rows if row.seed == seed]
        items = [assess(line) for line in read_recipes(same, COMPARED)]
        (best,) = [item for item in items if item.number >= 0]
        known = sorted((item for item in items if item.number < 0), key=lambda item: -item.number)
        seeds.append(Seed(seed, best, known, same))
    return seeds


def read_limit(name: str) -> float:
    """Return the limit on the accuracy drop that a run file sets."""
    return float(yaml.safe_load((HERE / f"recommend-{name}.yaml").read_text())["limits"][DROP])


def is_ours(item: Assessment) -> bool:
    """Return True if a recipe has a defense of our own."""
    return any(name in item.title for name in OURS)


def write_number(value: float) -> str:
    """Return a number without the zero before its point."""
    return re.sub(r"^(-?)0\.", r"\1.", f"{value:.3f}").replace("-.000", ".000")


def write(value: Estimate | None) -> str:
    """Return a measure with its interval."""
    if value is None:
        return "-"
    ends = "" if value.low == value.high else f" [{write_number(value.low)}, {write_number(value.high)}]"
    return write_number(value.value) + ends


def write_lines(titles: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    return "\n".join("| " + " | ".join(line) + " |" for line in (titles, ["---"] * len(titles), *lines)) + "\n"


def compare(one: Assessment, other: Assessment, measure: str) -> str:
    """Return what one recipe is beside another in a measure: by values, and beyond the intervals."""
    a, b = one.measures[measure], other.measures[measure]
    if a.high < b.low:
        return "better"
    return "worse" if a.low > b.high else "no worse" if a.value <= b.value else "worse, within"


def dominates(one: Assessment, other: Assessment) -> bool:
    """Return True if a recipe dominates another by values."""
    pairs = [(one.value(name), other.value(name)) for name in OBJECTIVES]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def show_data(name: str) -> str:
    """Return the table of a data set: a line a recipe, a line of its cells a seed."""
    seeds = read_seeds(name)
    fronts = [{item.number for item in select_front([one.recommended, *one.known])} for one in seeds]
    groups = [[one.recommended for one in seeds], *zip(*(one.known for one in seeds), strict=True)]
    lines = []
    for place, group in enumerate(groups):
        title = "<br>".join(item.title for item in group) if place == 0 else group[0].title
        cells = ["<br>".join(write(item.measures.get(m)) for item in group) for m in (DROP, AUC, TPR, BYTES)]
        front = [str(one.seed) for one, item, on in zip(seeds, group, fronts, strict=True) if item.number in on]
        lines.append([f"**recommended**: {title}" if place == 0 else title, *cells, ", ".join(front) or "-"])
    titles = ["recipe", "accuracy drop", "AUC", "TPR at 1 %", "bytes", "on the front in seeds"]
    listed = ", ".join(str(one.seed) for one in seeds)
    facts = show_originals(seeds, max(read_limit(name), TOLERANCE))
    return f"Seeds {listed}, in this order in every cell. {facts}\n\n" + write_lines(titles, lines)


def show_originals(seeds: Sequence[Seed], limit: float) -> str:
    """Return the accuracy of the originals, the recipes that beat them by more than a limit, and the seconds."""
    shares = {
        metric: ", ".join(
            write_number(next(row.value or 0.0 for row in one.rows if row.metric == metric and row.pruner == "none"))
            for one in seeds
        )
        for metric in ("train_accuracy", "test_accuracy")
    }
    spent = [sum(row.value or 0.0 for row in one.rows if row.metric == SPENT) for one in seeds]
    accuracies = f"Accuracy of the originals: train {shares['train_accuracy']}; test {shares['test_accuracy']}."
    gains = []
    for one in seeds:
        searched = [item for item in map(assess, read_recipes(one.rows)) if item.rung >= WHOLE]
        if best := find_gain(searched, limit):
            value, low, high, _ = best.measures[DROP]
            gain = write(Estimate(-value, -high, -low))
            gains.append(f"Not trained out, seed {one.seed}: {best.title} gains {gain} where recipes were chosen.")
    return " ".join([accuracies, *gains, f"Seconds of work: {', '.join(f'{seconds:.0f}' for seconds in spent)}."])


def show_verdict() -> str:
    """Return a line a search: the recommended recipe beside the best hand-picked one, which hindsight picks."""
    names = ("private", "accurate", "both", "unrefuted", "held", "lost", "gained")
    lines, counts, gaps = [], dict.fromkeys(names, 0), []
    for name, title in DATA.items():
        limit, pairs = read_limit(name), []
        for one in read_seeds(name):
            best = choose(one.papers, {DROP: limit})
            words = {measure: compare(one.recommended, best, measure) for measure, _ in JUDGED}
            held = one.recommended.value(DROP) <= limit
            private, accurate = all(is_no_worse(words[m]) for m in (AUC, TPR)), is_no_worse(words[DROP])
            facts = [private, accurate, private and accurate, "worse" not in words.values(), held]
            top = min(one.papers, key=lambda item: item.value(DROP))
            facts += [compare(one.recommended, top, DROP) == "worse", compare(one.recommended, top, AUC) == "better"]
            counts = {key: counts[key] + fact for key, fact in zip(counts, facts, strict=True)}
            shown = [words[measure] for measure, _ in JUDGED]
            kept = "yes" if held else "no"
            lines.append([f"{title}, {one.seed}", one.recommended.title, best.title, *shown, kept])
            pairs.append((one.recommended, best))
        gaps.append([title, *(write_gap(pairs, measure) for measure, _ in JUDGED)])
    titles = ["data, seed", "recommended", "best hand-picked", *(title for _, title in JUDGED), "holds its limit"]
    total = len(lines)
    said = (
        f"By values the recommended recipe is as private (AUC and TPR) in {counts['private']} of {total} searches, as "
        f"accurate in {counts['accurate']}, both in {counts['both']}. In none of the three measures worse beyond the "
        f"intervals: {counts['unrefuted']} of {total}. It holds its limit on the other rows in {counts['held']}. "
        f"Beside the most accurate hand-picked recipe it is less accurate beyond the intervals in {counts['lost']}, "
        f"and better by AUC in {counts['gained']}.\n"
    )
    means = write_lines(["mean over seeds, recommended less best hand-picked", *(t for _, t in JUDGED)], gaps)
    return write_lines(titles, lines) + "\n" + said + "\n" + means.replace("accuracy |", "accuracy drop |", 1)


def is_no_worse(word: str) -> bool:
    """Return True if a comparison is at least equal by values."""
    return word in ("better", "no worse")


def write_gap(pairs: Sequence[tuple[Assessment, Assessment]], measure: str) -> str:
    """Return the mean difference over seeds, with Student's interval."""
    return write(mean_of([one.value(measure) - other.value(measure) for one, other in pairs]))


def show_ours() -> str:
    """Return a line a data set and defense of our own: which recipes of the papers dominate it."""
    lines = []
    for name, title in DATA.items():
        seeds = read_seeds(name)
        for place in [i for i, item in enumerate(seeds[0].known) if is_ours(item)]:
            own = [one.known[place] for one in seeds]
            cells = [list_dominators(zip(seeds, own, strict=True), rule) for rule in (dominates, beats)]
            means = [mean_items([one.known[i] for one in seeds]) for i in range(len(seeds[0].known))]
            over = [item.title for item in means if not is_ours(item) and dominates(item, means[place])]
            values = [write_number(means[place].value(measure)) for measure in (DROP, AUC, TPR)]
            lines.append([f"{title}: {own[0].title}", *values, *cells, ", ".join(over) or "none"])
    titles = ["data, defense", "mean drop", "mean AUC", "mean TPR at 1 %", "dominated by values"]
    return write_lines([*titles, "beyond the intervals", "by the means"], lines)


def mean_items(items: Sequence[Assessment]) -> Assessment:
    """Return a recipe with its mean measures over seeds."""
    means = {name: mean_of([item.value(name) for item in items]) for name in (DROP, AUC, TPR, BYTES)}
    return Assessment(items[0].number, items[0].title, items[0].rung, means)


def list_dominators(pairs: Iterable[tuple[Seed, Assessment]], rule: Callable[[Assessment, Assessment], bool]) -> str:
    """Return the seeds in which recipes of the papers dominate a recipe, with these recipes."""
    found = {one.seed: [item.title for item in one.papers if rule(item, own)] for one, own in pairs}
    return "; ".join(f"seed {seed}: {', '.join(titles)}" for seed, titles in found.items() if titles) or "never"


def show_search(name: str) -> str:
    """Return the finalists of another search by the rows that chose, and the recommended one by the others."""
    rows = read_rows(name)
    items, confirmed = ([assess(line) for line in read_recipes(rows, prefix)] for prefix in (PREFIX, COMPARED))
    finalists = [item for item in items if item.rung == max(item.rung for item in items)]
    measures = [m for m in (DROP, AUC, RECOGNISABLE, PSNR, BYTES) if m in finalists[0].measures]
    ranked = sorted(finalists, key=lambda item: item.value(next(m for m in (RECOGNISABLE, AUC) if m in measures)))
    lines = [[item.title, *(write(item.measures.get(m)) for m in measures), "chose"] for item in ranked]
    lines += [[item.title, *(write(item.measures.get(m)) for m in measures), "chose nothing"] for item in confirmed]
    spent = sum(row.value or 0.0 for row in rows if row.metric == SPENT)
    table = write_lines(["recipe", *(NAMES[m] for m in measures), "rows that"], lines)
    return f"{len(items)} recipes, {len(finalists)} finalists, {spent:.0f} seconds of work.\n\n" + table


def show_ablation() -> str:
    """Return a line a defense of the audits without a search: means over seeds, with Student's intervals."""
    rows = [row for row in read_rows("ablation") if row.pruner != "none"]
    groups = {name: [row for row in rows if row.defense == name] for name in dict.fromkeys(row.defense for row in rows)}
    seeds = sorted({row.seed for row in rows})
    measured = {
        name: [find_strongest([row for row in same if row.seed == seed], (DROP, AUC, TPR)) for seed in seeds]
        for name, same in groups.items()
    }
    lines = []
    for name, items in measured.items():
        cells = [write(mean_of([item[measure].value for item in items])) for measure in (DROP, AUC, TPR)]
        for other in ("basic", "mixed-distil:strength=0.0"):
            pairs = zip(items, measured[other], strict=True)
            apart = name != other and name.startswith(other.partition(":")[0] if ":" in other else "")
            cells.append(write(mean_of([one[AUC].value - two[AUC].value for one, two in pairs])) if apart else "-")
        lines.append([name, *cells])
    titles = ["defense", "accuracy drop", "AUC", "TPR at 1 %", "AUC less that of basic", "less that of strength 0"]
    listed = ", ".join(map(str, seeds))
    return f"Seeds {listed}: means, with Student's intervals over seeds.\n\n" + write_lines(titles, lines)


BLOCKS: Mapping[str, Callable[[], str]] = {
    **{name: lambda name=name: show_data(name) for name in DATA},
    "verdict": show_verdict,
    "ours": show_ours,
    "ablation": show_ablation,
    **{name: lambda name=name: show_search(name) for name in ("updates", "federation")},
}


def main() -> int:
    """Write the page, or check it."""
    text = PAGE.read_text()
    page = BLOCK.sub(lambda match: match[1] + BLOCKS[match[2]]() + match[3], text)
    if "--check" in sys.argv[1:]:
        if page != text:
            print("results/recommend.md is not what the rows give; run python results/recommend.py", file=sys.stderr)
        return int(page != text)
    PAGE.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
