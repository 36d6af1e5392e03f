"""The engine of all studies: read a scale, plan, run into one folder, tabulate beside the paper's numbers.

A study is one figure or table of a paper. Its folder is a run: an interrupted study resumes, and `secateur report`
reads it. A study adds table.md and table.jsonl. Each paper's package has its data: what is measured (studies.json),
scales (scales.json), whose fields `--set field=value` changes, printed numbers (printed.json) and claims (claims.json).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from itertools import product
from pathlib import Path
from string import Formatter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch

from secateur.catalogue import find, method, name_of
from secateur.config.messages import yaml_value
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput, check_number, check_whole, unknown
from secateur.evaluation.client import check_pictures
from secateur.runs.archive import Archive
from secateur.runs.artifacts import write
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies import read_data
from secateur.studies.results import Results
from secateur.studies.table import Finding, StudyTable, Tabulated

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIZES = ("tiny", "small", "full")
STRONGEST = ".strongest"  # after the key of a claim: the same claim against the strongest attackers
CAVEATS = (
    "unfinished",
    "differs",
    "differ",
    "left out",
    "renamed",
)  # of the provenance: what a table's reader must know
S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True)
class Request:
    """A user's request: a study at a scale, with options and `field=value` overrides, into a folder."""

    study: str
    scale: str
    options: Mapping[str, Any]  # data, data_folder, model, seeds, device and images; None or absent: the study's
    overrides: Sequence[str]
    out: Path


@dataclass(frozen=True)
class StudyPlan:
    """A checked study that is ready to run."""

    run: Callable[[], Sequence[Row]]
    tabulate: Callable[[Sequence[Row]], Tabulated]
    facts: Callable[[Sequence[Row]], dict[str, Any]]  # the settings that the numbers hold for, for the table's reader
    intervals: str = ""  # describes the table's intervals; empty: they are over examples or seeds


@dataclass(frozen=True)
class Study:
    """A figure or table of a paper, as the paper's studies.json has it."""

    package: str  # the paper's
    make_plan: Callable[[Study, Request], StudyPlan]
    gather: Gather  # results from archived rows
    table: str  # the function that makes the table, as module:function of the package
    steps: Sequence[Mapping[str, Any]]  # the fields of its measurements
    intervals: str = ""  # describes the table's intervals; empty: the paper's plan does
    caution: str = ""  # how a line or an attacker was picked, for the table's reader

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of the study; raise for wrong input before any work."""
        return self.make_plan(self, request)

    def tabulate(self, results: Any) -> Tabulated:
        """Return the table of the paper's results."""
        module, _, name = self.table.partition(":")
        function = getattr(import_module(f"{__package__}.{self.package}.{module}"), name)
        lines, findings = function(results)
        strongest = results.under_strongest() if isinstance(results, Results) else None
        again = [] if strongest is None else function(strongest)[1]
        return lines, [*findings, *(ask_strongest(finding) for finding in again if self.hides(finding.key))]

    def hides(self, key: str) -> bool:
        """Return True if a claim of the paper says that a defense hides something."""
        return bool(self._read_claim(key).get("hides"))

    def list_compared(self, key: str) -> list[str]:
        """Return the defenses that a claim of the paper compares; empty if claims.json does not name them."""
        claim = self._read_claim(key)
        if "defense" not in claim.get("each", {}):
            return []
        parts = [claim[side]["defense"] for side in ("each", "lower", "higher") if "defense" in claim.get(side, {})]
        names = [name for part in parts for name in ([part] if isinstance(part, str) else part)]
        return [] if any("{" in name for name in names) else names

    def _read_claim(self, key: str) -> Mapping[str, Any]:
        """Return a claim of claims.json by its key; empty for one that code makes."""
        table, _, name = key.partition(".")
        claim: Mapping[str, Any] = read_data(self.package, "claims").get(table, {}).get(name, {})
        return claim

    def tabulate_rows(self, archive: Archive) -> dict[str, Tabulated]:
        """Return the tables of archived rows by the network and data set that they are about."""
        return {title: self.tabulate(results) for title, results in self.gather(self, archive).items()}

    def read_steps(self, kind: type[S], **values: Sequence[Any]) -> list[S]:
        """Return the steps, in which `{name}` stands for each of the values of that name.

        In a list it adds an item for each. Elsewhere the study has a step for each; the first such field changes
        slowest. `values` are those of the scale that studies.json names.
        """
        from pydantic import TypeAdapter

        adapter: TypeAdapter[S] = TypeAdapter(kind)
        read, known = [], read_data(self.package, "studies")["values"] | values
        for step in self.steps:
            choices = product(*(expand(value, known) for value in step.values()))
            read += [adapter.validate_python(dict(zip(step, chosen, strict=True))) for chosen in choices]
        return read


def ask_strongest(finding: Finding) -> Finding:
    """Return a finding under the strongest attackers as one of ours, with a key of its own."""
    return replace(
        finding, claim=f"ours, from the strongest attacker met: {finding.claim}", key=f"{finding.key}{STRONGEST}"
    )


Gather = Callable[[Study, Archive], Mapping[str, Any]]  # the paper's results by network and data set


def no_results(study: Study, archive: Archive) -> dict[str, Any]:
    """Return no results: the study has no table of archived rows."""
    return {}


def register(
    paper: str, package: str, make_plan: Callable[[Study, Request], StudyPlan], gather: Gather = no_results
) -> None:
    """Add the studies of a paper to the catalogue by name, each with its title."""
    for name, study in read_data(package, "studies")["studies"].items():
        fields = {key: value for key, value in study.items() if key != "title"}
        make = _factory(Study(package, make_plan, gather, **fields))
        make.__doc__ = study["title"]
        method("study", name, paper, scales=SIZES)(make)


def _factory(study: Study) -> Callable[[], Study]:
    return lambda: study


def expand(value: Any, values: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return all readings of a value in which `{name}` stands for each of the values of that name; of a list one.

    Example:
        >>> expand("snip:rate={rates:g}", {"rates": (0.3, 0.9)}), expand("{sizes}", {"sizes": (2, 4)}), expand(7, {})
        (['snip:rate=0.3', 'snip:rate=0.9'], [2, 4], [7])
        >>> expand(["none", "{bases}"], {"bases": ("snip", "grasp")})
        [['none', 'snip', 'grasp']]
    """
    if isinstance(value, list):
        return [[item for text in value for item in expand(text, values)]]
    if not isinstance(value, str):
        return [value]
    names = [name for _, name, _, _ in Formatter().parse(value) if name]
    if len(names) == 1 and value == f"{{{names[0]}}}":
        return list(values[names[0]])  # numbers stay numbers
    choices = product(*(values[name] for name in names))
    return [value.format(**dict(zip(names, chosen, strict=True))) for chosen in choices]


def reproduce(name: str, scale: str, options: Mapping[str, Any], overrides: list[str] | None, out: Path) -> StudyTable:
    """Run a study into `out`, write its table there, and return the table; `options` and `overrides` change fields."""
    entry = find("study", name)
    plan = entry.make().plan(Request(name, scale, options, overrides or [], out))
    rows = plan.run()
    lines, findings = plan.tabulate(rows)
    facts = {"study": name, "scale": scale} | plan.facts(rows)
    table = StudyTable(entry.summary, facts, lines, findings, plan.intervals, entry.make().caution)
    write(out / "table.md", table.markdown().encode())
    write(out / "table.jsonl", table.jsonl().encode())
    return table


def tabulate_archive(archive: Archive) -> list[StudyTable]:
    """Return the tables of archived rows: one for each study of their provenance, network and data set."""
    tables = []
    for name in archive.studies:
        entry = find("study", name)
        study: Study = entry.make()
        for title, (lines, findings) in study.tabulate_rows(archive).items():
            facts: dict[str, Any] = {"study": name, "scale": archive.scale or "not stated"} | (
                {"of": title} if title else {}
            )
            facts |= {key: archive.provenance.get(key, "not stated") for key in ("commit", "machine")}
            facts |= {"seeds": sorted({int(row.seed) for row in archive.rows})}
            facts |= {key: archive.provenance[key] for key in CAVEATS if archive.provenance.get(key)}
            tables.append(StudyTable(entry.summary, facts, lines, findings, study.intervals, study.caution))
    return tables


def run_steps(
    request: Request,
    scale: Scale,
    device: torch.device,
    seeds: list[int],
    measure: Callable[[Run], None],
    **more: Any,
) -> Sequence[Row]:
    """Run all measurements of a study into its folder, and return the rows.

    The page is written afterwards, also after an error. Unfinished work is kept unless all is done.

    Args:
        request: The user's request.
        scale: The scale with the user's changes, saved in config.yaml; its `threads` are set.
        device: Device of the run.
        seeds: Seeds of the run.
        measure: Adds all rows to the run.
        more: Further fields of config.yaml.
    """
    from secateur.report.page import write_page

    settings = {"study": request.study, "scale": request.scale} | vars(scale) | more
    settings |= {
        name: str(value) for name in ("data", "model", "images") if (value := request.options.get(name)) is not None
    }
    torch.set_num_threads(settings["threads"])
    opened = False
    try:
        with open_run(request.out, "study", settings | {"seeds": seeds}, device=str(device), seeds=seeds) as run:
            opened = True
            measure(run)
    finally:
        if opened:  # a folder that was refused is not ours
            with suppress(WrongInput):  # there may be no rows yet
                write_page([request.out])
    shutil.rmtree(request.out / "unfinished", ignore_errors=True)
    return run.rows


def select_steps(
    steps: Sequence[S], overrides: Sequence[str], parts: Mapping[str, str], optional: Sequence[str] = ()
) -> tuple[list[S], list[str]]:
    """Select a part of a study, to run on a separate machine; return its steps and the remaining overrides.

    `defenses=none,dgp` selects among the defenses of every step. A name selects all its settings; a full text
    (pseudo-largest:rate=0.3) selects one. A step of which nothing is selected is left out.

    Args:
        steps: All steps of the study.
        overrides: The user's `field=value` texts.
        parts: The fields of a step to select from, by the names that a user has for them.
        optional: Those of the parts that a step can do without; `none` selects nothing of it.
    """
    known = {part: dict.fromkeys(x for step in steps for x in _texts(step, field)) for part, field in parts.items()}
    others = [text for text in overrides if text.partition("=")[0] not in parts]
    chosen = {part: names for part, _, names in (text.partition("=") for text in overrides if text not in others)}
    left = []
    for step in steps:
        fields: dict[str, Any] = {}
        for part, names in chosen.items():
            wanted = {name.strip() for name in names.split(",")}
            allowed = [*known[part], *(["none"] if part in optional else [])]
            if wrong := wanted - {*allowed, *map(name_of, allowed)}:
                raise unknown(part, min(wrong), allowed)
            fields[parts[part]] = tuple(x for x in _texts(step, parts[part]) if x in wanted or name_of(x) in wanted)
        if all(values or name in optional for name, values in fields.items()):
            several = {name: values for name, values in fields.items() if not isinstance(getattr(step, name), str)}
            left.append(replace(step, **several))
    if not left:
        choices = ", its ".join(f"{part} are {', '.join(texts)}" for part, texts in known.items())
        raise WrongInput("set", f"leaves nothing of this study; its {choices}")
    return left, others


def _texts(step: DataclassInstance, field: str) -> tuple[str, ...]:
    """Return all values of a field of a step."""
    values: str | tuple[str, ...] = getattr(step, field)
    return (values,) if isinstance(values, str) else values


def load_pictures(name: str, options: Mapping[str, Any], examples: int | None) -> Dataset:
    """Load a data set of pictures from the user's data folder, with at most so many rows."""
    data = load(name, options.get("data_folder"), True)
    check_pictures(data)
    return data if examples is None else data.limit_rows(examples, derive(0, "examples"))


class Scale(SimpleNamespace):
    """The size of a study, with the fields of the paper's scales.json; `full` is the paper's setting."""

    def change(self, **values: Any) -> Self:
        """Return the scale with other values."""
        return type(self)(**vars(self) | values)


@cache
def read_scales(paper: str) -> dict[str, Scale]:
    """Return the scales of a paper by name; a field without a value at a scale has that of `full`."""
    known = read_data(paper, "scales")
    return {size: Scale(**{name: rules.get(size, rules["full"]) for name, rules in known.items()}) for size in SIZES}


def scale_of(paper: str, name: str, overrides: Sequence[str] = ()) -> Scale:
    """Return a scale by its name, with `field=value` overrides; fields with a `kind` in scales.json can be set."""
    scales = read_scales(paper)
    if name not in scales:
        raise unknown("scale", name, scales)
    settable = {name: rules for name, rules in read_data(paper, "scales").items() if "kind" in rules}
    changes: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or key not in settable:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(settable)}")
        changes[key] = read_field(key, settable[key], value)
    return scales[name].change(**changes)


def read_field(name: str, rules: Mapping[str, Any], text: str) -> Any:
    """Read a value of a scale, and check it by the rules of its field.

    Args:
        name: The field.
        rules: Its `kind` (whole, number, switch or several), and `least` and `even`, or the values `among` which
            several are chosen.
        text: The value; several are joined by +.
    """
    if rules["kind"] == "number":
        number = math.nan
        with suppress(ValueError):
            number = float(text)  # YAML takes 1e-2 for a word
        check_number(name, number, "(0, inf)")
        return number
    if rules["kind"] == "several":
        values = [yaml_value("set", part) for part in text.split("+")]
        if not all(type(value) is type(rules["among"][0]) and value in rules["among"] for value in values):
            allowed = ", ".join(map(str, rules["among"]))
            raise WrongInput(name, f"{text!r} is not allowed; use {allowed}, several joined by +")
        return values
    value = yaml_value("set", text)
    if rules["kind"] == "switch":
        if not isinstance(value, bool):
            raise WrongInput(name, f"{text!r} is not allowed; must be true or false")
        return value
    whole: Any = text if isinstance(value, bool) else value
    check_whole(name, whole, rules.get("least", 1), even=rules.get("even", False))
    return whole
