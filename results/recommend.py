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
from typing import Any

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
    compare_values,
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
SHOWN = (DROP, AUC, TPR, BYTES)
JUDGED = ((DROP, "accuracy"), (AUC, "AUC"), (TPR, "TPR at 1 %"))
BLOCK = re.compile(r"(<!-- rows: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Seed:
    """One search: the recommended recipe and the hand-picked ones, as measured on rows that chose nothing."""

    seed: int
    recommended: Assessment
    by_value: Assessment | None  # the best recipe by values, if it is neither the recommended one nor the reference
    known: Sequence[Assessment]
    rivals: int  # number of recipes to beat, the first of the known ones
    limit: float
    rows: Sequence[Row]

    @property
    def papers(self) -> list[Assessment]:
        """The hand-picked recipes by methods of the papers, which are those to beat."""
        return list(self.known[: self.rivals])

    @property
    def searched(self) -> list[Assessment]:
        """All recipes, as measured on the rows that chose."""
        return [assess(line) for line in read_recipes(self.rows)]

    @property
    def reference(self) -> Assessment:
        """The best recipe to beat by the rows that chose, as measured on the others."""
        rivals = [item for item in self.searched if item.number < self.rivals]
        return self.known[choose(rivals, {DROP: self.limit}).number]

    @property
    def hindsight(self) -> Assessment:
        """The best recipe to beat by the very rows that are shown."""
        return choose(self.papers, {DROP: self.limit})

    @property
    def keeps(self) -> bool:
        """True if the search recommends the reference itself."""
        return self.recommended.title == self.reference.title and 0 <= self.recommended.number < self.rivals


def read_rows(name: str) -> list[Row]:
    """Return the rows of a data set, or of another search."""
    return list(read_archive(HERE / "rows" / f"recommend-{name}.jsonl.xz").rows)


def read_seeds(name: str) -> list[Seed]:
    """Return the searches of a data set."""
    rows, seeds = read_rows(name), []
    rivals, limit = len(read_file(name)["beat"]), read_limit(name)
    for seed in sorted({row.seed for row in rows}):
        same = [row for row in rows if row.seed == seed]
        lines = read_recipes(same, COMPARED)
        values = [assess(line) for line in lines if "rule" in line.labels]
        (best,) = [assess(line) for line in lines if line.labels["recipe"] >= 0 and "rule" not in line.labels]
        known = sorted((item for item in map(assess, lines) if item.number < 0), key=lambda item: -item.number)
        seeds.append(Seed(seed, best, values[0] if values else None, known, rivals, limit, same))
    return seeds


def read_file(name: str) -> dict[str, Any]:
    """Return the fields of a run file."""
    return dict(yaml.safe_load((HERE / f"recommend-{name}.yaml").read_text()))


def read_limit(name: str) -> float:
    """Return the limit on the accuracy drop that a run file sets."""
    return float(read_file(name)["limits"][DROP])


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


def compare(one: Assessment, other: Assessment) -> dict[str, str]:
    """Return what one recipe is beside another, by measure; the reference beside itself is equal."""
    if one.title == other.title and one.measures == other.measures:
        return {measure: "equal" for measure, _ in JUDGED}
    return {measure: compare_values(one.measures[measure], other.measures[measure]) for measure, _ in JUDGED}


def dominates(one: Assessment, other: Assessment) -> bool:
    """Return True if a recipe dominates another by values."""
    pairs = [(one.value(name), other.value(name)) for name in OBJECTIVES]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def show_data(name: str) -> str:
    """Return the table of a data set: a line a recipe, a line of its cells a seed."""
    seeds = read_seeds(name)
    shown = [[one.recommended, *([one.by_value] if one.by_value else []), *one.known] for one in seeds]
    fronts = [{item.number for item in select_front(items)} for items in shown]
    known = [(items[0].title, items) for items in zip(*(one.known for one in seeds), strict=True)]
    stays = ["it stays: " if one.keeps else "" for one in seeds]
    titles = [word + one.recommended.title for word, one in zip(stays, seeds, strict=True)]
    groups = [(f"**recommended**: {'<br>'.join(titles)}", [one.recommended for one in seeds])]
    if any(one.by_value for one in seeds):
        titles = [one.by_value.title if one.by_value else "-" for one in seeds]
        groups.append((f"**best by values**, if another one: {'<br>'.join(titles)}", [one.by_value for one in seeds]))
    lines = []
    for title, group in [*groups, *known]:
        cells = ["<br>".join(write(item.measures.get(m) if item else None) for item in group) for m in SHOWN]
        pairs = zip(seeds, group, fronts, strict=True)
        front = [str(one.seed) for one, item, on in pairs if item and item.number in on]
        lines.append([title, *cells, ", ".join(front) or "-"])
    listed = ", ".join(str(one.seed) for one in seeds)
    facts = show_originals(seeds, max(read_limit(name), TOLERANCE))
    columns = ["recipe", "accuracy drop", "AUC", "TPR at 1 %", "bytes", "on the front in seeds"]
    return f"Seeds {listed}, in this order in every cell. {facts}\n\n" + write_lines(columns, lines)


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
    """Return a line a search: the recommended recipe beside the reference, and beside the one that hindsight picks."""
    lines, counts, gaps, met = [], dict.fromkeys(("holds", "kept", "past", "unrefuted"), 0), [], []
    for name, title in DATA.items():
        seeds = read_seeds(name)
        for one in seeds:
            words, past = compare(one.recommended, one.reference), compare(one.recommended, one.hindsight)
            smaller = one.recommended.value(BYTES) <= one.reference.value(BYTES)
            facts = [is_no_worse(words) and smaller, one.keeps, is_no_worse(past), "worse" not in words.values()]
            counts = {key: counts[key] + fact for key, fact in zip(counts, facts, strict=True)}
            shown = "it stays" if one.keeps else one.recommended.title
            cells = [", ".join(past[m] for m, _ in JUDGED)] if one.hindsight is not one.reference else ["the same"]
            beside = [words[measure] for measure, _ in JUDGED]
            lines.append([f"{title}, {one.seed}", one.reference.title, shown, *beside, one.hindsight.title, *cells])
        pairs = [(one.recommended, one.reference) for one in seeds]
        gaps.append([title, *(write_gap(pairs, measure) for measure, _ in JUDGED)])
        refuted = any("worse" in compare(*pair).values() for pair in pairs)
        met += [title] if not refuted and all(mean_gap(pairs, m).value <= 0 for m, _ in JUDGED) else []
    titles = [
        "data, seed",
        "reference",
        "recommended",
        *(title for _, title in JUDGED),
        "by hindsight",
        "beside that one",
    ]
    total = len(lines)
    said = (
        f"By values the recommended recipe is no worse in all of accuracy, AUC, TPR at 1 % and bytes in "
        f"{counts['holds']} of {total} searches; {counts['kept']} of these keep the reference. It is worse beyond the "
        f"intervals in some measure in {total - counts['unrefuted']}. Beside the recipe that hindsight picks it is no "
        f"worse in {counts['past']}. Data sets that hold by the criterion: {', '.join(met) or 'none'}.\n"
    )
    means = write_lines(["mean over seeds, recommended less reference", *(t for _, t in JUDGED)], gaps)
    return write_lines(titles, lines) + "\n" + said + "\n" + means.replace("accuracy |", "accuracy drop |", 1)


def show_values() -> str:
    """Return a line a search: the best recipe by values beside the reference, where it is another one."""
    lines, gaps, held, total = [], [], 0, 0
    for name, title in DATA.items():
        seeds = read_seeds(name)
        pairs = [(one.by_value or one.recommended, one.reference) for one in seeds]
        for one, (best, reference) in zip(seeds, pairs, strict=True):
            words = compare(best, reference)
            held, total = held + is_no_worse(words), total + 1
            shown = "it stays" if one.keeps and one.by_value is None else best.title
            lines.append([f"{title}, {one.seed}", reference.title, shown, *(words[m] for m, _ in JUDGED)])
        gaps.append([title, *(write_gap(pairs, measure) for measure, _ in JUDGED)])
    said = f"No worse in all three by values: {held} of {total}.\n"
    means = write_lines(["mean over seeds, best by values less reference", *(t for _, t in JUDGED)], gaps)
    table = write_lines(["data, seed", "reference", "best by values", *(t for _, t in JUDGED)], lines)
    return table + "\n" + said + "\n" + means.replace("accuracy |", "accuracy drop |", 1)


def is_no_worse(words: Mapping[str, str]) -> bool:
    """Return True if a recipe is at least equal by values in all measures."""
    return all(word in ("better", "no worse", "equal") for word in words.values())


def mean_gap(pairs: Sequence[tuple[Assessment, Assessment]], measure: str) -> Estimate:
    """Return the mean difference over seeds, with Student's interval."""
    return mean_of([one.value(measure) - other.value(measure) for one, other in pairs])


def write_gap(pairs: Sequence[tuple[Assessment, Assessment]], measure: str) -> str:
    """Return the mean difference over seeds in words."""
    return write(mean_gap(pairs, measure))


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
    """Return the finalists of other searches by the rows that chose, and the recommended ones by the others."""
    rows, lines, facts, measures = read_rows(name), [], [], list[str]()
    for seed in sorted({row.seed for row in rows if row.metric.startswith(PREFIX)}):
        same = [row for row in rows if row.seed == seed]
        items, confirmed = ([assess(line) for line in read_recipes(same, prefix)] for prefix in (PREFIX, COMPARED))
        finalists = [item for item in items if item.rung == max(item.rung for item in items)]
        measures = [m for m in (DROP, AUC, RECOGNISABLE, PSNR, BYTES) if m in finalists[0].measures]
        leak = next(m for m in (RECOGNISABLE, AUC) if m in measures)
        ranked = sorted(finalists, key=lambda item: item.value(leak))
        for item, rule in [*((item, "chose") for item in ranked), *((item, "chose nothing") for item in confirmed)]:
            lines.append([str(seed), item.title, *(write(item.measures.get(m)) for m in measures), rule])
        spent = sum(row.value or 0.0 for row in same if row.metric == SPENT)
        facts.append(f"Seed {seed}: {len(items)} recipes, {len(finalists)} finalists, {spent:.0f} seconds of work.")
    titles = ["seed", "recipe", *(NAMES[m] for m in measures), "rows that"]
    return " ".join(facts) + "\n\n" + write_lines(titles, lines)


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
    "values": show_values,
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
