"""The engine of all studies: read a scale, plan, run into one folder, tabulate beside the paper's numbers.

A study is one figure or table of a paper. Its folder is a run: an interrupted study resumes, and `secateur report`
reads it. A study adds table.md and table.jsonl. Each paper's package has its data: titles of studies (titles.json),
scales (scales.json), whose fields `--set field=value` changes, printed numbers (printed.json) and claims (claims.json).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, get_args, get_type_hints

import torch

from secateur.catalogue import find, method, name_of
from secateur.config.messages import yaml_value
from secateur.data.dataset import Dataset
from secateur.data.load import load
from secateur.errors import WrongInput, check_number, check_whole, unknown
from secateur.evaluation.client import check_pictures
from secateur.runs.artifacts import write
from secateur.runs.folder import Run, open_run
from secateur.runs.rows import Row
from secateur.seeding import derive
from secateur.studies import read_data
from secateur.studies.table import StudyTable, Tabulated

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SIZES = ("tiny", "small", "full")
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


class Study(Protocol):
    """A figure or table of a paper."""

    def plan(self, request: Request) -> StudyPlan:
        """Return the plan of the study; raise for wrong input before any work."""
        ...


def register(paper: str, package: str, studies: Mapping[str, Study]) -> None:
    """Add the studies of a paper to the catalogue by name, each with its title from titles.json."""
    titles = read_data(package, "titles")
    for name, study in studies.items():
        make = _factory(study)
        make.__doc__ = titles[name]
        method("study", name, paper, scales=SIZES)(make)


def _factory(study: Study) -> Callable[[], Study]:
    return lambda: study


def reproduce(name: str, scale: str, options: Mapping[str, Any], overrides: list[str] | None, out: Path) -> StudyTable:
    """Run a study into `out`, write its table there, and return the table; `options` and `overrides` change fields."""
    entry = find("study", name)
    study: Study = entry.make()
    plan = study.plan(Request(name, scale, options, overrides or [], out))
    rows = plan.run()
    lines, findings = plan.tabulate(rows)
    facts = {"study": name, "scale": scale} | plan.facts(rows)
    table = StudyTable(entry.summary, facts, lines, findings, plan.intervals)
    write(out / "table.md", table.markdown().encode())
    write(out / "table.jsonl", table.jsonl().encode())
    return table


def run_steps(
    request: Request,
    scale: DataclassInstance,
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

    settings = {"study": request.study, "scale": request.scale} | asdict(scale) | more
    settings |= {
        name: str(value) for name in ("data", "model", "images") if (value := request.options.get(name)) is not None
    }
    torch.set_num_threads(settings["threads"])
    opened = False
    try:
        with open_run(request.out, "study", plain(settings | {"seeds": seeds}), device=str(device), seeds=seeds) as run:
            opened = True
            measure(run)
    finally:
        if opened:  # a folder that was refused is not ours
            with suppress(WrongInput):  # there may be no rows yet
                write_page([request.out])
    shutil.rmtree(request.out / "unfinished", ignore_errors=True)
    return run.rows


def select_steps(steps: Sequence[S], overrides: Sequence[str], parts: Mapping[str, str]) -> tuple[list[S], list[str]]:
    """Select a part of a study, to run on a separate machine; return its steps and the remaining overrides.

    `defenses=none,dgp` selects among the defenses of every step. A name selects all its settings; a full text
    (pseudo-largest:rate=0.3) selects one. A step of which nothing is selected is left out.

    Args:
        steps: All steps of the study.
        overrides: The user's `field=value` texts.
        parts: The fields of a step to select from, by the names that a user has for them.
    """
    others = [text for text in overrides if text.partition("=")[0] not in parts]
    chosen = {part: names for part, _, names in (text.partition("=") for text in overrides if text not in others)}
    left = []
    for step in steps:
        fields: dict[str, Any] = {}
        for part, names in chosen.items():
            wanted = {name.strip() for name in names.split(",")}
            fields[parts[part]] = tuple(x for x in _texts(step, parts[part]) if x in wanted or name_of(x) in wanted)
        if all(fields.values()):
            several = {name: values for name, values in fields.items() if not isinstance(getattr(step, name), str)}
            left.append(replace(step, **several))
    if not left:
        known = {part: dict.fromkeys(x for step in steps for x in _texts(step, parts[part])) for part in parts}
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


def read_scales(kind: type[S], paper: str) -> dict[str, S]:
    """Read the scales of a paper's studies; `full` has the defaults of the class unless the file says otherwise."""
    from pydantic import TypeAdapter

    values = read_data(paper, "scales")
    adapter: TypeAdapter[S] = TypeAdapter(kind)
    return {name: adapter.validate_python(values.get(name, {})) for name in SIZES}


def scale_of(scales: Mapping[str, S], name: str, overrides: Sequence[str] = ()) -> S:
    """Return a scale by its name, with `field=value` overrides.

    Fields of numbers and truth values can be set: numbers from 1 or above 0, unless the field's metadata say otherwise.
    They may hold `least`, `even`, or `among`; several values of `among` are joined by +.
    """
    if name not in scales:
        raise unknown("scale", name, scales)
    scale = scales[name]
    settable = {field.name: (field, kind) for field, kind in _settable(scale)}
    changes: dict[str, Any] = {}
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals or key not in settable:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(settable)}")
        changes[key] = _read(*settable[key], value)
    return replace(scale, **changes)


def _settable(scale: DataclassInstance) -> Iterator[tuple[Field[Any], type]]:
    """Yield the fields that can be set, each with its type: bool, int, float or tuple."""
    hints = get_type_hints(type(scale))
    for field in fields(scale):
        kinds = [kind for kind in get_args(hints[field.name]) or (hints[field.name],) if kind in (bool, int, float)]
        if "among" in field.metadata:
            yield field, tuple
        elif kinds and hints[field.name] in (kinds[0], kinds[0] | None):
            yield field, kinds[0]


def _read(field: Field[Any], kind: type, text: str) -> bool | int | float | tuple[int, ...]:
    """Read the value of a field, and check it."""
    name, rules = field.name, field.metadata
    if kind is float:
        number = math.nan
        with suppress(ValueError):
            number = float(text)  # YAML takes 1e-2 for a word
        check_number(name, number, "(0, inf)")
        return number
    if kind is tuple:
        numbers = tuple(yaml_value("set", part) for part in text.split("+"))
        if not all(type(number) is int and number in rules["among"] for number in numbers):
            allowed = ", ".join(map(str, rules["among"]))
            raise WrongInput(name, f"{text!r} is not allowed; use {allowed}, several joined by +")
        return numbers
    value = yaml_value("set", text)
    if kind is bool:
        if not isinstance(value, bool):
            raise WrongInput(name, f"{text!r} is not allowed; must be true or false")
        return value
    whole: Any = text if isinstance(value, bool) else value
    check_whole(name, whole, rules.get("least", 1), even=rules.get("even", False))
    return int(whole)


def plain(value: Any) -> Any:
    """Return the value as YAML has it: tuples become lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
