"""Claims of the four papers beside what archives of rows say of them.

Lines are computed from rows/*.jsonl.xz by the studies' own claims; the provenance of an archive names its studies.
A claim without rows was not run. items.json lists the papers' figures, tables and claims. No number and no verdict is
written by hand.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from secateur.attacks.inversion.adaptive import PLAIN, settings_of_mode
from secateur.attacks.inversion.gradient_matching import GradientMatching
from secateur.catalogue import find, methods, name_of
from secateur.defenses import NATURAL
from secateur.evaluation.attack_strength import SHADOW_FEDERATIONS, SMOOTH, Strength, list_unmet
from secateur.evaluation.attack_strength import UNMET as UNMET_WORDS
from secateur.runs.archive import Archive
from secateur.runs.rows import Row
from secateur.studies import read_data
from secateur.studies.results import names_of
from secateur.studies.study import SIZES, STRONGEST, Study
from secateur.studies.table import NOT_SUPPORTED, SUPPORTED, UNDECIDED, Finding

sys.path.insert(0, str(Path(__file__).parent))
from pages import grid, read

HERE = Path(__file__).parent
NOT_RUN = "not run"
WORDS = {SUPPORTED: "reproduced", NOT_SUPPORTED: "not", UNDECIDED: "undecided"}
STANDS = "holds"
OURS = {SUPPORTED: STANDS, NOT_SUPPORTED: "does not hold", UNDECIDED: "undecided"}  # of claims that no paper makes
ORDER = ("reproduced", "partly", "not", "undecided", NOT_RUN)
STRONG = ("rmia", "lira")  # the strongest attackers on a model's answers
# settings that select parts of a study and reduce nothing
PARTS = (
    "steps",
    "defenses",
    "adaptive",
    "bases",
    "broadcast",
    "threads",
    "at_once",
    "way",
    "seeds",
    "pruner",
    "attack",
    "large",
)
# in claims of ours
OWN = ("ours:", "(ours)", "not in the paper", "not the paper's", " on both", "corrected", "beyond chance")
UNMET = "**"  # marks the attackers that a defense did not meet


@dataclass(frozen=True)
class Line:
    """One line of a paper's table."""

    item: str
    claim: str
    paper: str = ""
    ours: str = ""
    setting: str = ""
    attacker: str = ""
    verdict: str = NOT_RUN
    full: bool = True  # at the paper's scale, not reduced
    counts: bool = True  # False: no claim of the paper, or no result
    hides: bool = False  # a claim that a defense hides something
    against: str = ""  # whether the claim stands against the strongest attacker
    stronger: str = ""  # what was measured of the claim against the strongest attacker
    key: str = ""  # of the claim, in the paper's claims.json
    stand_in: bool = False  # on other data than the paper's
    panel: bool = False  # another data set of a figure: no claim by itself


@dataclass(frozen=True)
class Measurement:
    """What one archive says of one study."""

    study: str
    data: tuple[str, ...]
    findings: list[Finding]
    setting: str
    attacker: str
    scale: str
    reduced: bool = False

    @property
    def offline(self) -> bool:
        """True if an attack learned from models without the candidates, which is weaker."""
        return "(offline)" in self.attacker

    @property
    def full(self) -> bool:
        """True if this is the paper's scale."""
        return self.scale == "full" and not self.reduced

    def ask_strongest(self, finding: Finding, key: str, compared: Iterable[str] = ()) -> tuple[str, str]:
        """Return whether a claim to hide stands against the strongest attacker, and what was measured of that.

        Args:
            finding: the claim under the paper's attackers.
            key: the claim of ours that asks this. Of several with this key those count that name the defense.
            compared: the defenses that must have met the strongest attacker; by default all.
        """
        asked = [other for other in self.findings if other.key == key]
        names = [name for name in methods("defense") if has_word(name, finding.claim.lower())]
        if key == f"{finding.key}{STRONGEST}":
            asked = [other for other in asked if other.claim.endswith(finding.claim)]
        elif names:
            asked = [other for other in asked if any(name in other.claim.lower() for name in names)]
        verdicts, measured = {other.verdict for other in asked}, "; ".join(other.measured for other in asked)
        if NOT_SUPPORTED in verdicts:
            return OURS[NOT_SUPPORTED], measured
        unmet, compared = "".join(self.attacker.split(UNMET)[1::2]), list(compared)
        if not asked or (unmet and (not compared or any(has_word(name, unmet) for name in compared))):
            return "not asked", ""
        return OURS[UNDECIDED] if UNDECIDED in verdicts else STANDS, measured


def has_word(name: str, text: str) -> bool:
    """Return True if a text has a name as a word."""
    return re.search(rf"\b{re.escape(name)}\b", text) is not None


def is_ours(claim: str) -> bool:
    """Return True if a claim is ours, not the paper's, such as the same attack on both models."""
    return any(words in claim for words in OWN)


def read_json(name: str) -> Any:
    """Read a data file of this folder."""
    return json.loads((HERE / name).read_text(encoding="utf-8"))


# From rows ------------------------------------------------------------------------------------------------------
def measure_archives() -> Iterator[Measurement]:
    """Yield what each archive says of each of its studies, setting by setting; a demonstration says nothing."""
    for path in sorted((HERE / "rows").glob("*.jsonl.xz")):
        archive = read(path)
        for name in archive.studies if archive.scale in SIZES[1:] else ():
            study: Study = find("study", name).make()
            for results in study.gather(study, archive).values():
                _, findings = study.tabulate(results)
                rows = list(getattr(results, "rows", results))
                data = tuple(dict.fromkeys(row.dataset for row in rows))
                setting = f"{describe(archive, rows)}; [rows](rows/{path.name})"
                measured = [finding for finding in findings if finding.measured != "not measured here"]
                attackers, reduced = describe_attackers(rows), _is_reduced(archive) or is_thin(rows)
                yield Measurement(name, data, measured, setting, attackers, archive.scale, reduced)


def _is_reduced(archive: Archive) -> bool:
    """Return True if a run had other settings than the paper's, or was interrupted."""
    return bool(differences(archive) or archive.provenance.get("unfinished"))


def is_thin(rows: list[Row]) -> bool:
    """Return True if a network has less width than the paper's, as its name says."""
    return any(re.search(r"-w\d+", row.model) for row in rows)


def describe(archive: Archive, rows: list[Row]) -> str:
    """Return seeds, scale, networks and data sets of rows, and how the run differs from the paper's."""
    seeds = count_seeds(rows)
    where = f"{', '.join(dict.fromkeys(row.model for row in rows))} on {', '.join({row.dataset: 0 for row in rows})}"
    provenance = {name: str(value) for name, value in archive.provenance.items()}
    parts = [f"{seeds} seed{'s' if seeds != '1' else ''}", archive.scale, where, differences(archive)]
    early = re.search(r"attack=\[?[^ ]*(samia|nn)", provenance.get("command", ""))
    parts.append("attack networks stop early" if early and "early_stopping=false" not in early[0] else "")
    parts += [provenance.get("unfinished", ""), "with cells left out" if "left out" in provenance else ""]
    return "; ".join(filter(None, parts))


def count_seeds(rows: list[Row]) -> str:
    """Return the number of seeds of every measured model or federation, such as `3`, or `1 to 5` where they differ."""
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        if row.value is not None:
            seeds.setdefault((row.model, row.dataset, row.pruner, row.sparsity, row.defense, row.attack), set()).add(
                row.seed
            )
    least, most = (pick(map(len, seeds.values()), default=0) for pick in (min, max))
    return str(most) if least == most else f"{least} to {most}"


def differences(archive: Archive) -> str:
    """Return how a run differs from the paper's: as its provenance says, or else the settings that were changed."""
    words = str(archive.provenance.get("command", "")).replace("--set=", "--set ").replace("'", "").split()
    changes = [after for word, after in pairwise(words) if word == "--set"]
    changed = [text for text in dict.fromkeys(changes) if text.partition("=")[0] not in (*PARTS, "attack")]
    return str(archive.provenance.get("differs") or ", ".join(changed))


def describe_attackers(rows: list[Row]) -> str:
    """Return the attackers that the defenses of these rows met, and those known to be stronger that they did not."""
    attacks = {row.attack for row in rows if row.attack}
    if any(name_of(attack) in methods("inversion") for attack in attacks):
        return _describe_inversion(rows)
    names = list(dict.fromkeys(name_of(attack) for attack in sorted(attacks)))
    limits = {name: _describe_shadows([row for row in rows if name_of(row.attack or "") == name]) for name in names}
    defended = any(names_of(row.defense or "none") not in ("none", "basic") for row in rows if row.attack)
    informed = not defended or any(row.adaptive for row in rows if row.attack)
    missing = [name for name in STRONG if name not in names] + ([] if informed else ["one who knows the defense"])
    described = [f"{name}{f' ({limits[name]})' if limits[name] else ''}" for name in names]
    return ", ".join(described) + (f"; **not met: {', '.join(missing)}**" if missing and names else "")


def _describe_shadows(rows: list[Row]) -> str:
    """Return what an attack learned from, where the strongest of its kind learns from more; empty otherwise."""
    few = {f"{number} federations" for row in rows if (number := _count_federations(row)) < SHADOW_FEDERATIONS}
    few |= {"offline" for row in rows if "ran offline" in (row.note or "")}
    return " or ".join(sorted(few))


def _count_federations(row: Row) -> float:
    """Return the number of shadow federations that an attack learned from; infinite if it had none."""
    found = re.match(r"(\d+) federations", str(row.extra.get("shadows", "")))
    return int(found[1]) if found else math.inf


def _describe_inversion(rows: list[Row]) -> str:
    met: dict[tuple[str, str], dict[str, dict[int, set[str]]]] = {}  # by base and defense, its settings, and seed
    for row in rows:
        if row.attack:
            key = str(row.extra.get("base_pruning", "")), names_of(row.defense or "none")
            runs = met.setdefault(key, {}).setdefault(str(row.defense), {})
            runs.setdefault(row.seed, set()).add(row.attack)
    attacks = {row.attack for row in rows if row.attack}
    modes = {Strength(attack, 0, frozenset(), True).mode for attack in attacks} - {PLAIN}
    names = ", ".join(sorted({name_of(attack) for attack in attacks}))
    text = f"{names}: " + ", ".join(["plain", *sorted(modes)])
    never: dict[str, list[str]] = {}  # defenses by the attackers that they did not meet
    partly: dict[str, list[str]] = {}  # by those that they met on some of the seeds
    for (base, defense), settings in sorted(met.items()):
        where = f" on {name_of(base)}" if base else ""
        lacks = [_list_unmet(defense, seeds, base) for seeds in settings.values()]
        few, some = ([mode for lack in lacks for mode in lack[i]] for i in (0, 1))
        if few:
            never.setdefault(f"{where} {UNMET_WORDS}{', '.join(dict.fromkeys(few))}", []).append(defense)
        if left := [mode for mode in dict.fromkeys(some) if mode not in few]:
            partly.setdefault(f"{where} met {', '.join(left)} on some seeds only", []).append(defense)
    unmet = "; ".join(f"{', '.join(defenses)}{lack}" for lack, defenses in never.items())
    text += f"; **{unmet}**" if unmet else ""
    text += "".join(f"; {', '.join(defenses)}{lack}" for lack, defenses in partly.items())
    asked = " of all" if any(name_of(attack) == SMOOTH for attack in attacks) else ""
    return text + (f"; {SMOOTH} was not asked{asked}" if _lacks_smooth(rows) else "")


def _lacks_smooth(rows: list[Row]) -> bool:
    """Return True if a search for natural pictures was not ig-smooth under a defense that names it the strongest.

    Each network and seed must have met it: comparisons are made without it otherwise.
    """
    met: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        if row.attack and row.dataset.startswith("cifar"):
            key = names_of(row.defense or "none"), str(row.defense), row.model, row.dataset, str(row.seed)
            met.setdefault(key, set()).add(name_of(row.attack))
    named = {name for name, entry in methods("defense").items() if NATURAL in str(entry.info.get("strongest"))}
    searches = {name for name, entry in methods("inversion").items() if issubclass(entry.make, GradientMatching)}
    return any(key[0] in named and attacks & searches and SMOOTH not in attacks for key, attacks in met.items())


def _list_unmet(defense: str, seeds: Mapping[int, set[str]], base: str) -> tuple[list[str], list[str]]:
    """Return the adaptive attackers that one setting of a defense met on fewer than two seeds, and on fewer than all.

    A single seed is enough if there is no other.
    """
    missing = Counter(mode for attacks in seeds.values() for mode in _name_unmet(defense, attacks, base))
    most = len(seeds) - min(2, len(seeds))  # seeds that may lack it
    return [mode for mode, times in missing.items() if times > most], [m for m, n in missing.items() if 0 < n <= most]


def _name_unmet(defense: str, attacks: set[str], base: str) -> list[str]:
    """Return the adaptive attackers that a defense on a base pruning did not meet, of the modes that these can have."""
    return [settings_of_mode(mode) for mode in list_unmet(defense, attacks, base, able=True)]


# The page -------------------------------------------------------------------------------------------------------
class Blank(dict[str, str]):
    """Words of a claim; a name without a word stands for itself."""

    def __missing__(self, key: str) -> str:
        """Return the name as a word."""
        return key.replace("_", " ")


def words_of(study: str, key: str) -> str:
    """Return the words of a claim: from the paper's claims.json, or from items.json if code judges."""
    package = find("study", study).make().package
    table, _, name = key.partition(".")
    return str(
        read_data(package, "claims")[table][name]["claim"] if name else read_json("items.json")[package]["texts"][key]
    )


def lines_of(package: str, paper: Mapping[str, Any], measurements: list[Measurement]) -> Iterator[Line]:
    """Yield the lines of a paper: each claim with all that was measured of it, or as not run."""
    printed = read_data(package, "printed")
    for item in paper["items"]:
        title = item["item"]
        if "study" not in item:
            yield Line(title, item["about"], verdict=item.get("verdict", "no result"), counts="verdict" in item)
            continue
        here = [measured for measured in measurements if measured.study == item["study"]]
        item = {"own": paper["own"]} | item
        counts = not item["item"].startswith("not in the paper")
        informed = [measured for measured in measurements if measured.study == item.get("informed")]
        for key, number in item["claims"].items():
            for line in _claim_lines(item, key, fill(number, printed), here, informed):
                yield replace(line, item=title, counts=counts and line.counts, key=key)
        known = {data for measured in here for data in measured.data}
        for data, name in item.get("missing", {}).items():
            if data not in known:
                yield Line(title, f"the same on {name}", panel=True)


def _claim_lines(
    item: Mapping[str, Any], key: str, paper: str, here: list[Measurement], informed: list[Measurement]
) -> Iterator[Line]:
    """Yield the lines of one claim; attackers who know of the defense may be in a study of their own."""
    study: Study = find("study", item["study"]).make()
    text = words_of(item["study"], key).format_map(Blank(item.get("words", {})))
    any_line = False
    for measured in here:
        alike = [other for other in informed if other.data == measured.data]
        # the strongest attackers, then those of the same rows
        asked = min(alike, key=lambda other: (other.offline, other.setting != measured.setting), default=measured)
        for finding in measured.findings:
            if finding.key == key:
                any_line = True
                ours, hides = is_ours(finding.claim), study.hides(key)
                words = OURS if ours else WORDS
                elsewhere = f"{asked.attacker} (in {asked.study}{'' if asked.full else ', reduced'})"
                attacker = elsewhere if hides and asked is not measured else measured.attacker
                strongest = item.get("asks", {}).get(key, f"{key}{STRONGEST}")
                compared = study.list_compared(key)
                against, stronger = asked.ask_strongest(finding, strongest, compared) if hides else ("", "")
                stand_in = not set(measured.data) <= set(item["own"])
                yield Line("", finding.claim, paper, finding.measured, measured.setting, attacker,
                           words[finding.verdict], measured.full and not stand_in, not ours, hides, against, stronger,
                           stand_in=stand_in)  # fmt: skip
    if not any_line:
        yield Line("", text, paper, counts=not is_ours(text))


def fill(text: str, printed: Any) -> str:
    """Return a text in which `{table/row/column:format}` stands for a number that the paper prints."""

    def look_up(match: re.Match[str]) -> str:
        value = printed
        for part in match[1].split("/"):
            value = value[int(part)] if isinstance(value, list) else value[part]
        return format(value, match[2] or "")

    return re.sub(r"\{([^}:]+):?([^}]*)\}", look_up, text)


def verdict_of(lines: list[Line]) -> str:
    """Return the verdict of a figure or table from the lines of its claims; a smaller scale reproduces in part."""
    known = Counter(line.verdict for line in lines if line.verdict != NOT_RUN)
    if not known:
        return NOT_RUN
    whole = all(line.verdict == "reproduced" and line.full for line in lines)
    if whole:
        return "reproduced"
    if known["reproduced"]:
        return "partly"
    return "not" if known["not"] else "undecided"


def group_claims(lines: list[Line]) -> dict[tuple[str, str], list[Line]]:
    """Return the counted lines of a paper by its items and the claim: a claim has a line for each data set.

    Figures and tables that make the same claim by the same rows are one: `Figs. 2, 4`.
    """
    claims: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.counts and not line.panel:
            claims.setdefault((line.item, line.claim), []).append(line)
    merged: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for item, claim in claims:
        ours = tuple(f"{line.ours} {line.setting}".strip() for line in claims[item, claim])
        merged.setdefault((claim, ours if any(ours) else (item,)), []).append(item)
    return {(join_items(items), claim): claims[items[0], claim] for (claim, _), items in merged.items()}


def join_items(names: Iterable[str]) -> str:
    """Return names of figures and tables as one text, such as `Figs. 1, 4; Table 2`."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kind, _, number = name.rpartition(" ") if re.fullmatch(r"(Fig\.|Table) \w+", name) else (name, "", "")
        kinds.setdefault(kind, []).append(number)
    plural = {"Fig.": "Figs.", "Table": "Tables"}
    return "; ".join(
        f"{plural.get(kind, kind) if len(numbers) > 1 else kind} {', '.join(numbers)}".strip()
        for kind, numbers in kinds.items()
    )


def judge_items(lines: list[Line]) -> dict[str, str]:
    """Return the verdicts of a paper's figures and tables."""
    counted = [line for line in lines if line.counts]
    return {line.item: verdict_of([same for same in counted if same.item == line.item]) for line in counted}


def tabulate(lines: list[Line]) -> str:
    """Return the table of lines in Markdown."""
    head = ["item", "claim", "paper", "ours [95 % interval]", "seeds, scale, stand-ins", "strongest attacker met"]
    return grid([*head, "verdict"], _cells(lines))


def _cells(lines: list[Line]) -> list[list[str]]:
    """Return the cells of lines; what a cell repeats from the line above is left out."""
    body, before = [], Line("", "")
    for line in lines:
        item = f"**{line.item}**" if line.item != before.item else ""
        same = line.setting == before.setting and line.setting != ""
        setting = "as above" if same else line.setting
        attacker = "as above" if same and line.attacker == before.attacker else line.attacker
        caveats = [] if line.full or line.verdict == NOT_RUN else ["on a stand-in" if line.stand_in else "reduced"]
        weak = line.hides and line.against != STANDS and line.verdict == "reproduced"
        caveats += ["by the paper's attackers only"] if weak else []
        verdict = ", ".join([line.verdict, *caveats])
        again = not item and line.claim == before.claim
        claim, paper = ("as above", "") if again else (line.claim, line.paper)
        body.append([item, claim, paper, line.ours, setting, attacker, verdict])
        before = line
    return body


def read_papers() -> dict[str, Any]:
    """Return the papers with their figures, tables and claims."""
    return {name: paper for name, paper in read_json("items.json").items() if name != "about"}


def gather_lines() -> dict[str, list[Line]]:
    """Return the lines of every paper."""
    measurements = list(measure_archives())
    return {package: list(lines_of(package, paper, measurements)) for package, paper in read_papers().items()}
