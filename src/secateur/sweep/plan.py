"""Pieces of a sweep, in a fixed order; each piece is a separate run."""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any

from secateur.config import Audit, Federate, Invert, Reproduce, Sweep, Work, dump, put, read
from secateur.errors import WrongInput, expand, unknown
from secateur.experiments.context import file_key
from secateur.runs.artifacts import key_of

KINDS: dict[str, type[Audit | Invert | Federate | Reproduce]] = {
    "audit": Audit,
    "invert": Invert,
    "federate": Federate,
    "reproduce": Reproduce,
}
LONGEST = 120  # characters of a folder's name


@dataclass(frozen=True)
class Piece:
    """Run of a sweep: its name, its configuration, and the CPUs and GPUs that it needs."""

    name: str
    run: str  # the name without the seed: pieces that share it differ in their seeds alone
    config: Audit | Invert | Federate | Reproduce
    cpus: float
    gpus: float

    @property
    def label(self) -> str:
        """Name and resources of the piece, in one line."""
        return f"{self.name} ({self.cpus:g} CPUs{f', {self.gpus:g} GPUs' if self.gpus else ''})"

    @cached_property
    def key(self) -> str:
        """The hash of the piece's settings and of the files that they name."""
        values = as_json(self.config)
        return key_of("piece", {"kind": type(self.config).__name__, "config": values, "files": _files(values)})


def plan(sweep: Sweep) -> list[Piece]:
    """Return the pieces of a sweep; refuse, before any work, every error that is visible without the data."""
    pieces = [piece for name, work in sweep.jobs.items() for piece in _pieces(name, work)]
    name, times = Counter(piece.name for piece in pieces).most_common(1)[0]
    if times > 1:
        raise WrongInput("grid", f"{times} pieces are called {name}; every piece must differ in a field of the grid")
    return pieces


def plan_at(sweep: Sweep, address: str | None) -> list[Piece]:
    """Return the pieces of a sweep; without a cluster, check that the files that they name are on this machine."""
    pieces = plan(sweep)
    for piece in () if address or os.environ.get("RAY_ADDRESS") else pieces:
        data = piece.config.data or ""
        named: dict[str, Any] = {"data": data} if "/" in data or data.endswith(".npz") else {}
        named |= {name: value for name, value in piece.config if isinstance(value, Path)}
        for field, value in named.items():
            if not expand(value).exists():
                raise WrongInput(field, f"{value} does not exist (in {piece.run})")
    return pieces


def as_json(config: Audit | Invert | Federate | Reproduce) -> dict[str, Any]:
    """Return a configuration as JSON values."""
    if isinstance(config, Reproduce):
        return config.model_dump(mode="json", by_alias=True)
    return dump(config)


def _pieces(name: str, work: Work) -> Iterator[Piece]:
    """Yield a piece for every case, combination of the grid and seed."""
    grid = work.grid or {}
    seeds: list[int | None] = [None] if work.seeds is None else list(work.seeds)
    for case in work.cases:
        set_fields = [*work.common, *case, *grid, *([] if work.seeds is None else ["seeds"])]
        for field, times in Counter(set_fields).items():
            if times > 1:
                raise WrongInput(field, f"is set in {times} places of {name}; set it once, in the grid or elsewhere")
        for values in itertools.product(*grid.values()):
            piece_fields = case | dict(zip(grid, values, strict=True))
            for seed in seeds:
                yield _piece(name, work, piece_fields, seed)


def _piece(name: str, work: Work, piece_fields: Mapping[str, Any], seed: int | None) -> Piece:
    fields = copy.deepcopy(work.common)
    run = folder_name("-".join([name, *(f"{field}={value_name(value)}" for field, value in piece_fields.items())]))
    try:
        for field, value in piece_fields.items():
            put(fields, field, copy.deepcopy(value))
        fields |= {} if seed is None else {"seeds": [seed]}
        config = _read(work, fields)
    except WrongInput as error:
        raise WrongInput(error.field, f"{error.message} (in {run})") from None
    return Piece(run if seed is None else f"{run}-seed={seed}", run, config, work.cpus, work.gpus)


def _read(work: Work, fields: dict[str, Any]) -> Audit | Invert | Federate | Reproduce:
    kind = KINDS[work.job]
    names = {*kind.model_fields, *(field.alias for field in kind.model_fields.values() if field.alias)} - {"set_"}
    for field in fields:
        if field not in names:
            raise unknown(field, field, names | set(Work.model_fields))
    config = read(kind, None, fields | {"device": _device(fields.get("device"), work.gpus)})
    threads = getattr(config, "threads", 1)
    if threads > work.cpus:
        raise WrongInput("cpus", f"{work.cpus:g} is not allowed; must be at least {threads}, the number of threads")
    for field, value in (("execution", "ray"), ("engine", "flower")):
        if getattr(config, field, None) == value:
            raise WrongInput(field, f"{value} is not possible in a sweep; Ray spreads its pieces already")
    return config


def _device(asked: str | None, gpus: float) -> str:
    """Return the device of a piece: the GPU that Ray assigns, or a CPU if the piece has no GPU."""
    if asked in (None, "auto"):
        return "cuda" if gpus else "cpu"
    if asked not in ("cpu", "cuda"):
        raise WrongInput(
            "device", f"{asked!r} is not allowed in a sweep, where Ray assigns the GPUs; allowed: cpu, cuda"
        )
    if asked == "cuda" and not gpus:
        raise WrongInput("device", "cuda needs gpus; set how much of a GPU a piece has, such as 1 or .25")
    return asked


def value_name(value: Any) -> str:
    """Return a value as part of a name."""
    if isinstance(value, Mapping):
        return "+".join(f"{key}={value_name(item)}" for key, item in value.items())
    return "+".join(map(value_name, value)) if isinstance(value, list | tuple) else str(value)


def folder_name(name: str) -> str:
    """Return the name as a valid folder name of at most LONGEST characters."""
    readable = re.sub(r"[^\w.=+,-]+", "_", name)
    if len(readable) <= LONGEST:
        return readable
    return f"{readable[: LONGEST - 9]}-{sha256(name.encode()).hexdigest()[:8]}"


def _files(value: Any) -> dict[str, str]:
    """Return the hashes of the files that a configuration names, if they are on this machine."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return {name: key for item in value for name, key in _files(item).items()}
    # `is_file` raises an error for a text that is longer than a path may be.
    is_file = isinstance(value, str) and 0 < len(value) < 255 and Path(value).is_file()
    return {value: file_key(Path(value))} if is_file else {}
