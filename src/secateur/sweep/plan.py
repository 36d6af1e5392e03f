"""What a sweep is made of: its pieces of work, in a fixed order, each a run of its own."""

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
from secateur.errors import WrongInput, unknown
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
    """One run of a sweep: what is run, under which name, and what it needs."""

    name: str
    run: str  # the name without the seed: pieces that share it differ in their seeds alone
    config: Audit | Invert | Federate | Reproduce
    cpus: float
    gpus: float

    @property
    def told(self) -> str:
        """The piece in one line."""
        return f"{self.name} ({self.cpus:g} CPUs{f', {self.gpus:g} GPUs' if self.gpus else ''})"

    @cached_property
    def key(self) -> str:
        """The hash of all that the piece depends on: its settings and the files that they name."""
        values = plain(self.config)
        return key_of("piece", {"kind": type(self.config).__name__, "config": values, "files": _files(values)})


def plan(sweep: Sweep) -> list[Piece]:
    """The pieces of a sweep; what can be refused without the data is refused here, before any work."""
    pieces = [piece for name, work in sweep.jobs.items() for piece in _pieces(name, work)]
    name, times = Counter(piece.name for piece in pieces).most_common(1)[0]
    if times > 1:
        raise WrongInput("grid", f"{times} pieces are called {name}; every piece must differ in a field of the grid")
    return pieces


def plan_at(sweep: Sweep, address: str | None) -> list[Piece]:
    """The pieces of a sweep on a cluster; without one on this machine, where the files that they name must be."""
    pieces = plan(sweep)
    for piece in () if address or os.environ.get("RAY_ADDRESS") else pieces:
        data = piece.config.data or ""
        named: dict[str, Any] = {"data": data} if "/" in data or data.endswith(".npz") else {}
        named |= {name: value for name, value in piece.config if isinstance(value, Path)}
        for field, value in named.items():
            if not Path(value).expanduser().exists():
                raise WrongInput(field, f"{value} does not exist (in {piece.run})")
    return pieces


def plain(config: Audit | Invert | Federate | Reproduce) -> dict[str, Any]:
    """A configuration as JSON has it."""
    if isinstance(config, Reproduce):
        return config.model_dump(mode="json", by_alias=True)
    return dump(config)


def _pieces(name: str, work: Work) -> Iterator[Piece]:
    """Every case with every combination of the grid, for every seed."""
    grid = work.grid or {}
    seeds: list[int | None] = [None] if work.seeds is None else list(work.seeds)
    for case in work.cases:
        places = [*work.common, *case, *grid, *([] if work.seeds is None else ["seeds"])]
        for field, times in Counter(places).items():
            if times > 1:
                raise WrongInput(field, f"is set in {times} places of {name}; set it once, in the grid or elsewhere")
        for values in itertools.product(*grid.values()):
            own = case | dict(zip(grid, values, strict=True))
            for seed in seeds:
                yield _piece(name, work, own, seed)


def _piece(name: str, work: Work, own: Mapping[str, Any], seed: int | None) -> Piece:
    fields = copy.deepcopy(work.common)
    run = short("-".join([name, *(f"{field}={worded(value)}" for field, value in own.items())]))
    try:
        for field, value in own.items():
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
        raise WrongInput("cpus", f"{work.cpus:g} is not allowed: the piece has {threads} threads; give as many")
    for field, value in (("way", "ray"), ("engine", "flower")):
        if getattr(config, field, None) == value:
            raise WrongInput(field, f"{value} is not possible in a sweep, whose pieces are spread by Ray already")
    return config


def _device(asked: str | None, gpus: float) -> str:
    """A piece works on the GPU that Ray gives it, and without one on a CPU, wherever it runs."""
    if asked in (None, "auto"):
        return "cuda" if gpus else "cpu"
    if asked not in ("cpu", "cuda"):
        raise WrongInput("device", f"{asked!r} is not allowed in a sweep, where Ray deals out the GPUs; cpu or cuda")
    if asked == "cuda" and not gpus:
        raise WrongInput("device", "cuda needs gpus: how much of a GPU a piece has, such as 1 or .25")
    return asked


def worded(value: Any) -> str:
    """A value as part of a name."""
    if isinstance(value, Mapping):
        return "+".join(f"{key}={worded(each)}" for key, each in value.items())
    return "+".join(map(worded, value)) if isinstance(value, list | tuple) else str(value)


def short(name: str) -> str:
    """A name that a folder can have."""
    readable = re.sub(r"[^\w.=+,-]+", "_", name)
    if len(readable) <= LONGEST:
        return readable
    return f"{readable[: LONGEST - 9]}-{sha256(name.encode()).hexdigest()[:8]}"


def _files(value: Any) -> dict[str, str]:
    """The hashes of the files that a configuration names, where they are on this machine."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        return {name: key for each in value for name, key in _files(each).items()}
    # A text longer than a path may be is no path, and asking for it would be an error.
    found = isinstance(value, str) and 0 < len(value) < 255 and Path(value).is_file()
    return {value: file_key(Path(value))} if found else {}
