"""Studies: one figure or table of a paper, run at a scale as one audit, then tabulated beside the paper's claims.

A study's folder is that of its audit: an interrupted study resumes, and `secateur report` and `secateur audit
config.yaml` read it. A study adds table.md and table.jsonl. A scale is a name, with `--set field=value` laid over it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from secateur.catalogue import Method, find, methods
from secateur.config.messages import yaml_value
from secateur.errors import WrongInput, unknown
from secateur.runs.artifacts import write
from secateur.studies.claims import Finding
from secateur.studies.results import AuditResults
from secateur.studies.table import StudyTable, TableLine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FOUR = ("l1-unstructured", "l1-structured", "l2-structured", "slimming")  # pruners
ONE = ("l1-unstructured",)  # pruner of the paper's MLP
NETWORKS = ("nn", "top3-nn", "nn-cls", "samia")  # attacks that are trained
Tabulate = Callable[[AuditResults], tuple[list[TableLine], list[Finding]]]
S = TypeVar("S", bound="DataclassInstance")


@dataclass(frozen=True)
class Study:
    """A figure or table of the paper: the settings of an audit, and the function from its rows to the table."""

    tabulate: Tabulate
    model: str = "resnet18-pool"  # the paper's, of its scale
    pruner: tuple[str, ...] = FOUR
    sparsity: float | None = None  # None: all of the scale's
    attack: tuple[str, ...] = ("conf", "samia")
    defense: tuple[str, ...] = ("basic",)  # a bare ppb, adv or dp-sgd stands for all of the scale's arguments
    adaptive: bool = False
    protocol: str = "known"
    shadows: int | None = None  # None: the scale's

    def conduct(
        self, entry: Method, scale: str, options: Mapping[str, Any], overrides: list[str] | None, out: Path
    ) -> StudyTable:
        """Run the audit into `out`, and return the table."""
        from secateur.config import Audit, read
        from secateur.experiments.audit import run_audit
        from secateur.runs.folder import load_figures

        for text in overrides or []:
            if text.partition("=")[0] in ("protocol", "adaptive"):
                raise WrongInput("set", f"{text!r} would make this another study; {entry.name} has its own protocol")
        changes = {field: value for field, value in options.items() if value is not None and field != "images"}
        config = read(Audit, None, settings(self, scale, options) | changes, overrides)  # an audit has no pictures
        rows = run_audit(config, out)
        lines, findings = self.tabulate(AuditResults(rows, load_figures(out)))
        facts: dict[str, Any] = {"study": entry.name, "scale": scale, "data": config.data, "model": config.model}
        facts |= {"shadows": config.shadows}
        facts |= {} if config.examples is None else {"examples": config.examples}
        facts |= {"seeds": config.seeds, "attacks": [str(attack) for attack in config.attack]}
        return StudyTable(entry.summary, facts, lines, findings)


@dataclass(frozen=True)
class AuditScale:
    """The size of a study."""

    shadows: int
    seeds: int
    sparsity: tuple[float, ...]
    ppb: tuple[float, ...]  # lambda
    adv: tuple[float, ...]  # alpha
    dp: tuple[float, ...]  # sigma
    experiments: int  # of an attacker that knows neither pruner nor sparsity
    epochs: tuple[int, int] | None = None  # of training and fine-tuning; None: the paper's
    schedule: str = ""  # of the attacks that are trained
    pruners: tuple[str, ...] = FOUR  # at most these
    examples: int | None = None  # at most so many of the data set's rows
    threads: int = 1

    def defenses(self, name: str) -> list[str]:
        """Return a defense with each of its arguments."""
        arguments = {"ppb": ("strength", self.ppb), "adv": ("alpha", self.adv), "dp-sgd": ("noise_multiplier", self.dp)}
        if name not in arguments:
            return [name]
        field, values = arguments[name]
        return [f"{name}:{field}={value:g}" for value in values]


TINY = AuditScale(
    shadows=1,
    seeds=1,
    sparsity=(0.5, 0.7),
    ppb=(4,),
    adv=(1,),
    dp=(0.1,),
    experiments=4,
    epochs=(30, 10),
    schedule=":epochs=5",
    pruners=("l1-unstructured", "l1-structured"),
)
SMALL_TABLES = AuditScale(2, 3, (0.5, 0.7, 0.9), (4, 16), (1,), (0.1,), experiments=20, examples=5010)
SMALL_IMAGES = AuditScale(
    shadows=1,
    seeds=1,
    sparsity=(0.5, 0.9),
    ppb=(4,),
    adv=(1,),
    dp=(0.1,),
    experiments=6,
    epochs=(15, 8),
    schedule=":epochs=20",
    examples=3000,
    threads=2,
)
FULL = AuditScale(
    shadows=5,
    seeds=1,
    sparsity=(0.5, 0.6, 0.7, 0.8, 0.9),
    ppb=(1, 2, 4, 8, 16),
    adv=(0.5, 1, 2, 4, 8, 16),
    dp=(0.01, 0.1, 1, 10, 100),
    experiments=20,
    schedule=":early_stopping=false",
)
SCALES = {"tiny": (TINY, TINY), "small": (SMALL_TABLES, SMALL_IMAGES), "full": (FULL, FULL)}  # of tables, of images


def reproduce(name: str, scale: str, options: Mapping[str, Any], overrides: list[str] | None, out: Path) -> StudyTable:
    """Run a study into `out`, write its table there, and return the table; `options` and `overrides` change fields."""
    entry = find("study", name)
    table: StudyTable = entry.make().conduct(entry, scale, options, overrides, out)
    write(out / "table.md", table.markdown().encode())
    write(out / "table.jsonl", table.jsonl().encode())
    return table


def settings(study: Study, scale: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a study's audit at a scale, on the data and model given, or else the scale's."""
    if scale not in SCALES:
        raise unknown("scale", scale, SCALES)
    data = options.get("data") or {"tiny": "digits", "small": "location", "full": "cifar10"}[scale]
    table = _is_table(data)
    images = {"tiny": "digits-cnn", "small": "resnet18-w16", "full": study.model}[scale]
    model = options.get("model") or ("mlp" if table else images)
    size = SCALES[scale][0 if table else 1]
    values: dict[str, Any] = {
        "data": data,
        "model": model,
        # The paper's MLP has one pruner: the others need convolutions and BatchNorm.
        "pruner": list(ONE if model == "mlp" else (name for name in study.pruner if name in size.pruners)),
        "sparsity": list(size.sparsity) if study.sparsity is None else [study.sparsity],
        "attack": [name + size.schedule if name in NETWORKS else name for name in study.attack],
        "defense": [text for name in study.defense for text in size.defenses(name)],
        "adaptive": study.adaptive,
        "protocol": study.protocol,
        "experiments": size.experiments,
        "shadows": study.shadows or size.shadows,
        "seeds": size.seeds,
        "examples": size.examples,
        "threads": size.threads,
    }
    if size.epochs is not None:
        values |= {"train": {"epochs": size.epochs[0]}, "finetune": {"epochs": size.epochs[1]}}
    return values


def _is_table(data: str) -> bool:
    """Return True if a data set is known to have rows of numbers, not images."""
    known = methods("dataset")
    return data in known and len(known[data].info["input_shape"]) == 1


def laid_over(
    scales: Mapping[str, S], name: str, overrides: Sequence[str] | None, fixed: Sequence[str], zero: Sequence[str] = ()
) -> S:
    """Return a scale with numbers laid over its fields, except the `fixed` ones; only those of `zero` may be 0."""
    if name not in scales:
        raise unknown("scale", name, scales)
    full = scales["full"]
    known = {field.name: getattr(full, field.name) for field in fields(full) if field.name not in fixed}
    changes: dict[str, Any] = {}
    for text in overrides or []:
        key, equals, value = text.partition("=")
        if not equals or key not in known:
            raise WrongInput("set", f"{text!r} is not possible in this study; allowed: {', '.join(known)}")
        changes[key] = _read(text, value, known[key], 0 if key in zero else 1)
    return replace(scales[name], **changes)


def _read(text: str, value: str, like: Any, least: int) -> bool | int | float:
    """Read a value of the type of `like`: true or false, a number above 0, or a whole number from `least`."""
    if isinstance(like, float):
        with suppress(ValueError):
            if 0 < (number := float(value)) < math.inf:  # YAML takes 1e-2 for a word
                return number
        raise WrongInput("set", f"{text!r} is not allowed; give a number above 0")
    parsed = yaml_value("set", value)
    if isinstance(like, bool) and isinstance(parsed, bool):
        return parsed
    if not isinstance(like, bool) and type(parsed) is int and parsed >= least:
        return parsed
    wanted = "true or false" if isinstance(like, bool) else f"a whole number from {least}"
    raise WrongInput("set", f"{text!r} is not allowed; give {wanted}")


def plain(value: Any) -> Any:
    """Return the value as YAML has it: tuples become lists."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple | list) else value
