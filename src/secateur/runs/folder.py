"""Folder of a run. A run that is killed at any moment and started again ends with the same rows.

run.json        schema, kind, versions, device, threads, seeds, hash of the data, command, times of start and end.
config.yaml     all settings: a run file that repeats the run.
results.jsonl   one row per measurement, rebuilt from the stages by every start.
groups.jsonl    the fields that many rows share; a row names its group (rows.py).
figures.jsonl   one curve or histogram per line, for the page; rebuilt likewise.
artifacts/      one file per stage, named by the hash of its dependencies.
unfinished/     the saved state and figures of a long stage that is not done.
pictures/       training pictures and their reconstructions, if the run shows them.
report.html     the page.
.lock           held while a run writes here; the kernel releases it when the process dies.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from secateur.errors import WrongInput
from secateur.runs.artifacts import (
    SCHEMA,
    TEMPORARY,
    Result,
    decode,
    encode,
    explained,
    key_of,
    version,
    write,
    write_parts,
)
from secateur.runs.rows import Groups, Row

T = TypeVar("T")
DAMAGE = (ValueError, TypeError, AttributeError, LookupError, RecursionError)  # of a line that no run wrote

log = logging.getLogger(__name__)
COMMAND: ContextVar[str | None] = ContextVar("command", default=None)  # as it was typed, if it was


def load_rows(folder: Path | str) -> list[Row]:
    """Return the rows of a run, finished or not."""
    folder = Path(folder)
    load_marker(folder)
    return read_lines(folder / "results.jsonl", _load_groups(folder).expand)


def load_marker(folder: Path | str) -> dict[str, Any]:
    """Return the content of a run's run.json; refuse any other folder."""
    folder = Path(folder)
    try:
        check_plain(folder, "run")
        marker = _marker(folder, "run")
    except OSError as error:
        raise WrongInput("run", f"{folder} cannot be read ({error.strerror})") from error
    if marker is None:
        raise WrongInput("run", f"{folder} is not the folder of a run; use one that has a run.json")
    return marker


def load_config(folder: Path | str) -> str:
    """Return the text of a run's config.yaml; empty if there is none."""
    path = Path(folder) / "config.yaml"
    try:
        return path.read_text(encoding="utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise WrongInput("run", f"{path} cannot be read ({error}); rerun the command") from error


def check_plain(folder: Path, field: str) -> None:
    """Refuse a run folder that holds a link, a device or a pipe: the folder may come from somebody else.

    The folder itself may be behind a link, as the user named it. Nothing that a run writes is a link.
    """
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            try:
                mode = os.lstat(os.path.join(parent, name)).st_mode
            except FileNotFoundError:  # of a run that is writing at this moment
                continue
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                path = os.path.relpath(os.path.join(parent, name), folder)
                problem = f"{folder} holds {path!r}, which is a link or no plain file"
                raise WrongInput(field, f"{problem}; a run folder has none: remove it, or do not use this folder")


@contextmanager
def explain_damage(folders: Iterable[Path]) -> Iterator[None]:
    """Turn what rows and figures of another form make fail into one WrongInput: the folders come from somebody else."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        names = ", ".join(map(str, folders))
        problem = f"{names} holds a row or a figure that no run writes ({type(error).__name__}: {error})"
        raise WrongInput("run", f"{problem}; rerun the command") from error


def load_finished(folder: Path | str) -> list[Row]:
    """Return the rows of a run that ended; refuse one that was interrupted."""
    if not load_marker(folder).get("finished"):
        raise WrongInput("run", f"{folder} is not finished; start the run again to complete it")
    return load_rows(folder)


def _load_groups(folder: Path) -> Groups:
    """Return the groups of a run's rows; none where schema 1 wrote the folder."""
    return Groups(read_lines(folder / "groups.jsonl", dict))


def load_figures(folder: Path | str) -> list[dict[str, Any]]:
    """Return the curves, histograms and pictures of a run, also those of a stage that was interrupted."""
    paths = (Path(folder) / "figures.jsonl", *sorted(Path(folder).glob("unfinished/*.jsonl")))
    return [figure for path in paths for figure in read_lines(path, dict)]


def read_lines(path: Path, read: Callable[[Any], T]) -> list[T]:
    """Return the lines of a JSONL file, each as `read` returns it; none if there is no file."""
    try:
        lines = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise WrongInput("run", f"{path} cannot be read ({error.strerror})") from error
    try:  # in one call, which takes a third of the time of a call a line
        values = json.loads(b"[" + b",".join(lines) + b"]")
        if len(values) == len(lines):
            return [read(value) for value in values]
    except DAMAGE:
        pass  # the loop below names the line
    results = []
    for number, line in enumerate(lines, start=1):
        try:
            results.append(read(json.loads(line)))
        except DAMAGE as error:
            raise WrongInput("run", f"{path} is damaged at line {number}; rerun the command") from error
    return results


class Run:
    """Open run: computes missing stages, saves finished ones, collects rows and figures."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: list[Row] = []
        self.figures: list[dict[str, Any]] = []
        self._groups = Groups()
        self._lines: dict[str, list[str]] = {"results.jsonl": [], "figures.jsonl": []}
        self._saved = -1  # lines that are in the files
        self._saved_at = -math.inf

    def stage(self, name: str, depends: dict[str, Any], compute: Callable[[], Result]) -> Result:
        """Return the result of a stage: loaded if it was computed from the same `depends`, else computed and saved."""
        return self.stages(name, [depends], lambda missing: [(0, compute())])[0]

    def stages(
        self,
        name: str,
        depends: Sequence[dict[str, Any]],
        compute_many: Callable[[list[int]], Iterable[tuple[int, Result]]],
    ) -> list[Result]:
        """Return the results of many stages, in the order of `depends`.

        `compute_many` gets the missing indices and yields each with its result, in any order. A result is saved
        at once, so that a kill loses only unfinished ones. Results are read back from the saved bytes: a resumed
        run has exactly the results of one that was never killed.
        """
        keys = [key_of(name, inputs) for inputs in depends]
        done = {key: result for key in keys if (result := self._load(name, key)) is not None}
        missing = {key: index for index, key in reversed(list(enumerate(keys))) if key not in done}  # equal ones once
        for index, result in compute_many(sorted(missing.values())) if missing else ():
            done[keys[index]] = self._save(name, keys[index], result)
        if absent := sorted(index for key, index in missing.items() if key not in done):
            raise RuntimeError(f"stage {name} did not compute {absent}")
        return [done[key] for key in keys]

    def keep_groups(self) -> None:
        """Keep the groups of an earlier start, so that its rows can be read at any moment."""
        try:
            self._groups = _load_groups(self.folder)
        except WrongInput:
            log.warning("rewriting %s: it is damaged", self.folder / "groups.jsonl")

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows to results.jsonl, which is rewritten at most once a second and when the run is left."""
        for row in rows:
            self._lines["results.jsonl"].append(_line(self._groups.shorten(row)))
            self.rows.append(row)
        if time.monotonic() - self._saved_at > 1:  # rewriting it for every row would cost the square of the rows
            self.flush()

    def show(self, figures: Iterable[dict[str, Any]]) -> None:
        """Add curves and histograms for the page; they are saved with the rows."""
        for figure in figures:
            self._lines["figures.jsonl"].append(_line({"schema": SCHEMA} | figure))
            self.figures.append(figure)

    def write(self, name: str, text: str) -> None:
        """Write a file such as report.html into the folder, completely or not at all."""
        write(self.folder / name, text.encode(), private=True)

    def write_parts(self, name: str, parts: Iterable[str]) -> None:
        """Write a file into the folder part by part, completely or not at all."""
        write_parts(self.folder / name, parts, private=True)

    def flush(self) -> None:
        """Save the rows and figures now."""
        lines = sum(map(len, self._lines.values()))
        if self._saved != lines:
            self.write("groups.jsonl", "".join(map(_line, self._groups.lines)))  # before the rows that refer to them
            for name, content in self._lines.items():
                self.write(name, "".join(content))
            self._saved, self._saved_at = lines, time.monotonic()

    def _path(self, name: str, key: str) -> Path:
        if not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(f"the name of a stage must be valid in a file name: {name!r}")
        return self.folder / "artifacts" / f"{name}-{key[:16]}.safetensors"

    def _load(self, name: str, key: str) -> Result | None:
        path = self._path(name, key)
        with explained(path):
            if not path.exists():
                return None
            content = path.read_bytes()
        result = decode(content, key)
        if result is None:
            log.warning("recomputing a stage: %s is damaged", path)
        return result

    def _save(self, name: str, key: str, result: Result) -> Result:
        content = encode(result, key)
        write(self._path(name, key), content)
        saved = decode(content, key)
        assert saved is not None
        return saved


class MemoryRun:
    """A run in memory: computes every stage, and collects the rows and the figures."""

    folder = None

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.figures: list[dict[str, Any]] = []

    def stage(self, name: str, depends: dict[str, Any], compute: Callable[[], Result]) -> Result:
        """Compute and return the result of a stage."""
        return compute()

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows."""
        self.rows.extend(rows)

    def show(self, figures: Iterable[dict[str, Any]]) -> None:
        """Add curves, histograms and pictures."""
        self.figures.extend(figures)

    def flush(self) -> None:
        """Do nothing: there are no files."""


def _line(content: dict[str, Any]) -> str:
    return json.dumps(content, allow_nan=False, separators=(",", ":")) + "\n"


@contextmanager
def open_run(
    folder: Path | str,
    kind: str,
    config: Mapping[str, Any],
    *,
    device: str = "cpu",
    seeds: Sequence[int] = (),
    data: str | None = None,
) -> Iterator[Run]:
    """Open a folder for a new run or to resume one; leaving the context without an error finishes the run.

    `data` is the sha256 of the loaded examples and labels (`Dataset.key`), which a name of a data set does not say.
    """
    folder = Path(folder)
    environment = describe_environment(device)  # first: it may start a process, which would inherit the lock
    with _locked(folder, kind):
        marker = {"schema": SCHEMA, "kind": kind} | environment | {"seeds": list(seeds), "started": _now()}
        marker |= {"command": typed} if (typed := COMMAND.get()) else {}
        marker |= {} if data is None else {"data_sha256": data}
        run = Run(folder)
        run.write("run.json", json.dumps(marker | {"finished": None}, indent=2))
        with explained(folder):
            (folder / "artifacts").mkdir(mode=0o700, exist_ok=True)
            for left in (*folder.glob(TEMPORARY), *folder.glob(f"*/{TEMPORARY}")):
                left.unlink()
        _renew_config(run, config)
        run.keep_groups()
        try:
            yield run
        except BaseException:
            if run.rows or run.figures:
                run.flush()
            raise
        run.flush()
        run.write("run.json", json.dumps(marker | {"finished": _now()}, indent=2))


def _renew_config(run: Run, config: Mapping[str, Any]) -> None:
    """Write the configuration; first delete the rows of another one."""
    import yaml

    text = yaml.safe_dump({"schema": 1} | dict(config), sort_keys=False)  # of run files
    path = run.folder / "config.yaml"
    with explained(path):
        if path.exists() and path.read_text() == text:
            return
        stale = [run.folder / name for name in ("results.jsonl", "groups.jsonl", "figures.jsonl", "report.html")]
        for file in (*stale, *run.folder.glob("unfinished/*.jsonl"), *run.folder.glob("pictures/**/*.png")):
            file.unlink(missing_ok=True)
    run.write("config.yaml", text)


@contextmanager
def _locked(folder: Path, kind: str) -> Iterator[None]:
    with explained(folder):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # a run holds models and pictures of the training data
        _check_ours(folder, kind)  # before a lock is written into a folder of other files
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            owner = os.read(lock, 32).decode() or "just started"
            problem = f"{folder} is in use by another run (process {owner})"
            raise WrongInput("out", f"{problem}; use another folder") from None
        except OSError as error:  # of a network file system without locks
            problem = f"{folder} lies on a file system that has no locks ({error.strerror})"
            raise WrongInput("out", f"{problem}, so two runs could write it at once; use another folder") from None
        with explained(folder):
            if os.fstat(lock).st_nlink != 1:
                raise WrongInput("out", f"{folder}/.lock has a second name; remove it, or use another folder")
            os.ftruncate(lock, 0)
            os.write(lock, str(os.getpid()).encode())
            _check_ours(folder, kind)  # another run may have come and gone since
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing alone would leave it to children that were forked with it
        os.close(lock)


def _check_ours(folder: Path, kind: str) -> None:
    marker = _marker(folder, "out")
    if marker is None:
        if any(path.name != ".lock" and not path.match(".run.json.*.tmp") for path in folder.iterdir()):
            raise WrongInput("out", f"{folder} is not empty and not the folder of a run; use a new or an empty folder")
    elif marker.get("kind") != kind:
        raise WrongInput("out", f"{folder} holds a run of kind {marker.get('kind')}, not {kind}; use another folder")
    check_plain(folder, "out")


def _marker(folder: Path, field: str) -> dict[str, Any] | None:
    """Return the content of run.json, or None if there is none of Secateur."""
    try:
        marker = json.loads((folder / "run.json").read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    if not isinstance(marker, dict) or "secateur" not in marker or not isinstance(marker.get("schema"), int):
        return None
    if not isinstance(marker.get("seeds", []), list):
        return None
    if marker["schema"] > SCHEMA:
        raise WrongInput(field, f"{folder} was written by Secateur {marker['secateur']}, which is newer; upgrade first")
    return marker


def describe_environment(device: str) -> dict[str, Any]:
    """Return the versions, the machine and its threads, as run.json has them."""
    import platform
    from importlib.metadata import version as version_of

    import torch

    return {
        "secateur": version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": version_of("numpy"),
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else _processor(),
        "threads": torch.get_num_threads(),
    }


def _processor() -> str:
    import platform

    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
