"""Makes the pages of results: README.md, and the tables inside the other pages.

    python results/table.py           # writes the pages
    python results/table.py --check   # fails if a page is not what the rows and data files give, or has typed numbers

README.md sums up the claims of the four papers (claims.py). Markers in the other pages name their tables (pages.py).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from secateur.attacks.inversion.adaptive import PLAIN
from secateur.catalogue import name_of
from secateur.defenses import IN_OUT
from secateur.evaluation.attack_strength import SHADOW_FEDERATIONS, Strength
from secateur.report.heatmap import FIRST, NONE, Heatmap, MatrixCell, MatrixRow, build_heatmaps
from secateur.report.matrix_sentences import is_lower
from secateur.runs.rows import Row

sys.path.insert(0, str(Path(__file__).parent))
import claims
from claims import (
    NOT_RUN,
    ORDER,
    STANDS,
    Line,
    gather_lines,
    group_claims,
    join_items,
    judge_items,
    read_json,
    read_papers,
    tabulate,
    verdict_of,
)
from pages import fill_pages, find_typed, grid, read

PICTURES = {"pictures": "strongest", "active server": "active"}
MEMBERS = ("final-rmia", "final-lira", "updates")  # columns of the matrix
GUESSING = 0.1  # accuracy on CIFAR-10


def make_summary(papers: Mapping[str, Any], lines: Mapping[str, list[Line]]) -> str:
    """Return the text of results/README.md: main claims, verdicts in numbers, defenses, and each paper's claims."""
    (head, counts, reading), body = read_json("items.json")["about"], []
    for package, paper in papers.items():
        verdicts = Counter(verdict_of(same) for same in group_claims(lines[package]).values())
        link = f"[{paper['title']}](#{paper['title'].lower().replace(' ', '-')})"
        body.append([link, *(str(verdicts[word]) for word in ORDER)])
    parts = [head, _tabulate_headlines(papers, lines), counts, grid(["paper", *ORDER], body), reading]
    parts += list(_summarise_defenses(papers, lines))
    for package, paper in papers.items():
        title = f"## {paper['title']}\n{paper['gist']} Method, tables and every claim: [{package}.md]({package}.md)."
        parts += [title, *_summarise_claims(lines[package])]
    return "\n\n".join(parts) + "\n"


def _tabulate_headlines(papers: Mapping[str, Any], lines: Mapping[str, list[Line]]) -> str:
    """Return the table of the papers' main claims, which items.json names."""
    body: list[list[str]] = []
    for package, paper in papers.items():
        for number, headline in enumerate(paper["headlines"]):
            key = (headline["item"], headline["claim"])
            every = [line for line in lines[package] if line.counts and (line.item, line.key) == key]
            same = [line for line in every if headline.get("of", "") in line.claim] or every
            stronger = dict.fromkeys(f"{line.against}: {line.stronger}".rstrip(": ") for line in same if line.hides)
            here = f"**{verdict_of(same)}**" + _name_reductions(same)
            body.append(
                [
                    "" if number else paper["title"],
                    headline["says"],
                    here,
                    _show(same),
                    "; ".join(filter(None, stronger)),
                ]
            )
    return grid(["paper", "it says", "here", "measured [95 % interval]", "strongest attacker"], body)


def _name_reductions(lines: list[Line]) -> str:
    """Return why a claim is no more than partly reproduced."""
    measured = [line for line in lines if line.verdict != NOT_RUN]
    if any(line.full for line in measured) or not measured:
        return ""
    return ", on a stand-in" if all(line.stand_in for line in measured) else ", reduced"


def _summarise_defenses(papers: Mapping[str, Any], lines: Mapping[str, list[Line]]) -> Iterator[str]:
    """Yield the section on defenses: claims that one hides something, and the strongest attacker of each defense."""
    hiding: dict[tuple[str, ...], list[Line]] = {}
    for package, some in lines.items():
        for line in (line for line in some if line.hides and line.verdict == "reproduced"):
            found = f"{line.stronger}: {line.against}" if line.stronger else line.against
            key = (papers[package]["title"], line.claim, line.ours, line.attacker, found)
            hiding.setdefault(key, []).append(line)
    full = sum(any(line.full for line in same) for same in hiding.values())
    yield (
        "## Defenses and their strongest attackers\n"
        f"{len(hiding)} measurements show that a defense hides something from its paper's attackers, "
        f"{full} of them at the paper's scale. "
        f"{sum(key[-1].endswith(STANDS) for key in hiding)} hold against the strongest attacker that they met, too. "
        f"The strongest LiRA and RMIA that are known learn online, from {IN_OUT} in-out models or "
        f"{SHADOW_FEDERATIONS} shadow federations; fewer, and offline ones, are named, and so is "
        "`ig-smooth` where it was not asked of natural pictures."
    )
    head = ["paper", "claim", "ours [95 % interval]", "attackers met", "against the strongest of them"]
    body = [[f"{key[0]}, {join_items(line.item for line in same)}", *key[1:]] for key, same in hiding.items()]
    yield grid(head, body) if body else ""
    paths = [claims.HERE / "rows" / f"matrix-{name}.jsonl.xz" for name in ("cifar10", "int8")]
    if rows := [row for path in paths if path.exists() for row in read(path).rows]:
        yield from _summarise_matrix(rows)


def _summarise_matrix(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table of every defense of the matrix with the strongest attackers that it met."""
    heatmap = build_heatmaps(rows)[0]
    yield (
        "## Every defense on one ground\n"
        f"{heatmap.network.capitalize()}, CIFAR-10, {len(heatmap.seeds)} seeds; "
        "[method, all columns and what the intervals say](matrix.md). Low is good: a grey picture has about 12 dB and "
        "a copy 60, guessed members have an AUC of 0.5. `adgp`, `ats`, `precode` and `ppb in clients` are attacked "
        "outside the federation and held against `none (first round)`, `int8` is attacked on another machine. "
        "The last column names what the seeds show to be lower than without a defense (of `ppb`, `adv` and `dp-sgd`: "
        "than `basic`), of pictures above grey. A star: a stronger attacker is known and was not met on every seed. "
        "LiRA and RMIA had half as many reference models as are advised, and inversions fewer iterations."
    )
    head = ["defense", "pictures, plain attacker", "pictures, strongest attacker", "active server"]
    body = []
    for row in heatmap.rows:
        pictures = [_write_cell(row, key) for key in ("inversion", "strongest", "active")]
        members = _write_cell(row, _pick_members(row)) + _mark(row, *MEMBERS)
        body.append([f"`{row.name}`", *pictures, members, _write_cell(row, "accuracy")])
        body[-1].append(_list_lower(row, heatmap))
    title = "shown to lower, against the strongest"
    yield grid([*head, "members, strongest attacker", "accuracy", title], [line for line in body if any(line[1:-1])])


def _pick_members(row: MatrixRow) -> str:
    """Return the column of membership in which most is found."""
    return max((key for key in MEMBERS if key in row.cells), key=lambda key: _value(row.cells[key]), default="")


def _list_lower(row: MatrixRow, heatmap: Heatmap) -> str:
    """Return what is shown to be lower than in the row that it is compared with, and whether the model has learnt."""
    if row.name in (NONE, FIRST):
        return ""
    pairs = {name: (row.measure(key), heatmap.measure_base(row, key)) for name, key in PICTURES.items()}
    members = _pick_members(row)
    bare = next((other for other in heatmap.rows if other.name == row.name_base(members)), row)
    pairs["members"] = row.measure(members), bare.measure(_pick_members(bare))
    marks = {name: _mark(row, key) for name, key in PICTURES.items()} | {"members": _mark(row, *MEMBERS)}
    lower = [f"{name}{marks[name]}" for name, (one, other) in pairs.items() if is_lower(one, other)]
    accuracy = row.cells["accuracy"].estimate if "accuracy" in row.cells else None
    learns = accuracy is None or accuracy.value > GUESSING
    return (", ".join(lower) or "nothing") + ("" if learns else "; learns nothing")


def _mark(row: MatrixRow, *columns: str) -> str:
    """Return a star if a stronger attacker than those of these columns is known and was not met on every seed."""
    return "*" if any(row.cells[key].unmet for key in columns if key in row.cells) else ""


def _value(cell: MatrixCell) -> float:
    return -1.0 if cell.estimate is None else cell.estimate.value


def _write_cell(row: MatrixRow, key: str) -> str:
    """Return a cell of the matrix with its attacker; empty if nothing was measured."""
    cell = row.cells.get(key)
    if cell is None or cell.estimate is None:
        return ""
    interval = f" [{cell.interval.replace(' to ', ', ')}]" if cell.interval else ""
    name, _, references = (cell.attack or "").partition(", ")
    mode = Strength(name, 0, frozenset(), True).mode if name else PLAIN
    notes = [name_of(name), "" if mode == PLAIN else mode, references]
    attacker = "" if not name or key == "inversion" else f" ({', '.join(filter(None, notes))})"
    star = "" if key in MEMBERS else _mark(row, key)  # of members: any of their columns
    return f"{cell.text} {cell.column.unit}{interval}{attacker}{star}"


def _summarise_claims(lines: list[Line]) -> Iterator[str]:
    """Yield the verdicts by figure, the claims that stand and that do not, and the numbers of all others."""
    claims, items = group_claims(lines), judge_items(lines)
    verdicts = {key: verdict_of(same) for key, same in claims.items()}
    named = {word: join_items(item for item in items if items[item] == word) for word in ORDER}
    yield "By figure and table: " + "; ".join(f"**{word}** {names}" for word, names in named.items() if names) + "."
    for title, word in {"Stands": "reproduced", "Does not": "not"}.items():
        keys = [key for key in claims if verdicts[key] == word]
        bullets = [f"- {items}: {claim}: {_show(claims[items, claim])}" for items, claim in keys]
        if keys:
            yield "\n".join([f"**{title}** ({len(keys)} of {len(claims)} claims):", "", *bullets])
    for title, word in {"Stands in part": "partly", "Undecided": "undecided", "Not run": NOT_RUN}.items():
        number = Counter(items for items, claim in claims if verdicts[items, claim] == word)
        names = "; ".join(f"{items} ({count})" if count > 1 else items for items, count in number.items())
        if number:
            yield f"**{title}** ({number.total()}): {names}."


def _show(lines: list[Line]) -> str:
    """Return what was measured of a claim, with seeds and data; with verdicts where data sets differ."""
    measured = [line for line in lines if line.verdict != NOT_RUN]
    differ = len({line.verdict for line in measured}) > 1
    texts = []
    for line in measured:
        seeds, _, where, *_ = line.setting.split("; ")
        reduced = "" if line.full else ", a stand-in" if line.stand_in else ", reduced"
        texts.append(f"{f'{line.verdict}, ' if differ else ''}{line.ours} ({seeds}, {where}{reduced})")
    return "; ".join(texts)


def make_pages() -> dict[Path, str]:
    """Return the texts of all pages of this folder."""
    lines = gather_lines()
    tables = {package: tabulate(some) for package, some in lines.items()}
    return {claims.HERE / "README.md": make_summary(read_papers(), lines)} | fill_pages(claims.HERE, tables)


def main(arguments: list[str]) -> int:
    """Write the pages, or check them."""
    texts = make_pages()
    if "--check" not in arguments:
        for path, text in texts.items():
            path.write_text(text, encoding="utf-8")
        print(*(path.name for path in texts))
        return 0
    wrong = [path.name for path, text in texts.items() if not path.exists() or path.read_text("utf-8") != text]
    for name in wrong:
        print(f"results/{name} is not what its rows and data files give; run python results/table.py", file=sys.stderr)
    typed = [f"{name}: {sentence}" for name, text in read_prose() for sentence in find_typed(text)]
    for sentence in typed:
        print(f"{sentence} (a number that no row gives; use a table made from rows, or words)", file=sys.stderr)
    return int(bool(wrong or typed))


def read_prose() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of every page that may have no measured number of its own."""
    for path in [claims.HERE.parent / "README.md", *sorted(claims.HERE.glob("*.md"))]:
        if path.exists() and path != claims.HERE / "README.md":
            yield f"{path.parent.name}/{path.name}", path.read_text(encoding="utf-8")
    for package, paper in read_papers().items():
        yield f"items.json, {package}", paper["gist"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
