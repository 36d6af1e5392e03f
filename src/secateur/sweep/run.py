"""The job of `secateur sweep`: pieces of work over Ray workers, into one folder, one file of rows and one page.

Read `run_sweep` first. plan.py lists the pieces, and workers.py runs them on workers. `SweepLog` has the state of
every piece: on disk, so that a sweep can resume, and on the terminal.

pieces/NAME     the run folder of each piece; its piece.json marks its end, with the hash of its settings.
pieces.jsonl    the state of every piece, rewritten with every change.
results.jsonl   the rows of all finished pieces in the plan's order, each with its `run`; figures.jsonl likewise.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from secateur.config import Audit, Sweep
from secateur.errors import WrongInput, printable, require
from secateur.evaluation import limits
from secateur.progress import Advance, progress
from secateur.runs.artifacts import SCHEMA, explained, write
from secateur.runs.folder import Run, load_figures, load_rows, open_run
from secateur.runs.rows import Row
from secateur.sweep.plan import Piece, plan_at
from secateur.sweep.workers import STARTS, PieceOutcome, SweepFolder, spread


@dataclass
class PieceStatus:
    """One piece's line in pieces.jsonl."""

    name: str
    run: str
    state: str = "waiting"  # running, done or failed
    said: str | None = None  # why it failed
    trace: str | None = None
    starts: int = 0
    seconds: float | None = None
    machine: str | None = None


@dataclass(frozen=True)
class SweepResult:
    """Rows and pieces of a sweep."""

    rows: list[Row]
    entries: list[PieceStatus]
    passed_limits: list[str]  # sentences on limits of audits that do not hold

    @property
    def failed(self) -> list[str]:
        """Sentences on the pieces that failed."""
        return [f"{entry.name} failed: {entry.said}" for entry in self.entries if entry.state != "done"]


def run_sweep(config: Sweep, out: Path, address: str | None = None, workers: int | None = None) -> SweepResult:
    """Run every piece that is not finished, at `address` or on this machine, and gather all into the folder `out`."""
    from secateur.report.page import write_page

    pieces = plan_at(config, address)
    require("ray", "ray")
    seeds = sorted({seed for piece in pieces for seed in piece.config.seeds or ()})
    settings = config.model_dump(mode="json", by_alias=True)
    with open_run(out, "sweep", settings, seeds=seeds) as run:
        folder = create_folder(out)
        log = SweepLog(run, pieces, folder.pieces)
        try:
            if left := [piece for piece in pieces if not log.is_finished(piece)]:
                with progress(log.summary(), len(pieces)) as log.advance:
                    log.advance(len(pieces) - len(left))
                    spread(left, folder, log, address, workers)
        finally:  # gather the finished pieces also of a sweep that was interrupted
            (folder.pieces / ".home").unlink(missing_ok=True)
            done = [piece for piece in pieces if log.is_finished(piece)]
            gather(run, done, folder.pieces)
            run.flush()
            with suppress(WrongInput):  # no piece may be finished yet
                write_page([out])
    return SweepResult(run.rows, log.entries, list_passed_limits(done, folder.pieces))


def create_folder(out: Path) -> SweepFolder:
    """Create the folder of the pieces, with a token by which workers recognise a shared disk."""
    pieces = out.resolve() / "pieces"
    pieces.mkdir(exist_ok=True)
    folder = SweepFolder(pieces, uuid.uuid4().hex, Path.cwd())
    write(pieces / ".home", folder.token.encode())
    return folder


class SweepLog:
    """State of all pieces, in pieces.jsonl and on the terminal; it also stores the outcomes of pieces."""

    def __init__(self, run: Run, pieces: Sequence[Piece], folder: Path) -> None:
        self.advance: Advance = lambda steps, said=None: None
        self._run, self._folder, self._begun = run, folder, time.monotonic()
        self._entries = {piece.name: PieceStatus(piece.name, piece.run) for piece in pieces}
        for piece in pieces:
            if (marker := self._marker(piece)) is not None:
                entry = self._entries[piece.name]
                entry.state, entry.seconds, entry.machine = "done", marker["seconds"], marker["machine"]
        self._before = self.count("done")
        self._save()

    @property
    def entries(self) -> list[PieceStatus]:
        """All pieces, in the plan's order."""
        return list(self._entries.values())

    def count(self, state: str) -> int:
        """Return the number of pieces in a state."""
        return Counter(entry.state for entry in self.entries)[state]

    def is_finished(self, piece: Piece) -> bool:
        """Return True if a piece was finished with the same settings, now or by an earlier start."""
        return self._marker(piece) is not None

    def note_start(self, piece: Piece) -> None:
        """Note that a worker started a piece."""
        entry = self._entries[piece.name]
        entry.state, entry.starts = "running", entry.starts + 1
        self._save()
        self.advance(0, self.summary())

    def note_death(self, piece: Piece, starts: int, reason: str) -> None:
        """Note that a worker died, and that its piece waits again."""
        self._entries[piece.name].state = "waiting"
        why = reason.partition(". ")[0][:200]
        self._print(f"{piece.name}: worker died, restarting ({why}; start {starts + 1} of {STARTS})")

    def note_end(self, piece: Piece, outcome: PieceOutcome) -> None:
        """Note that a piece is done, or has failed for good."""
        entry = self._entries[piece.name]
        entry.said, entry.trace = outcome.error, outcome.trace
        entry.seconds, entry.machine = round(outcome.seconds, 3), outcome.machine
        if outcome.error is None:
            self._store(piece, outcome)
        entry.state = "failed" if outcome.error else "done"
        self._save()
        how = "done" if outcome.error is None else f"failed: {outcome.error}"
        self._print(f"{piece.name}: {how} ({self.summary()}{self._time_left()})")
        self.advance(1, self.summary())

    def summary(self) -> str:
        """Return the progress of the sweep in one line."""
        done, failed, running = map(self.count, ("done", "failed", "running"))
        return f"sweep: {done} of {len(self._entries)} done, {running} running, {failed} failed"

    def _time_left(self) -> str:
        """Return the time left, if the other pieces take as long; progress bars show it themselves."""
        ended = self.count("done") + self.count("failed")
        left, here = len(self._entries) - ended, ended - self._before
        return f", about {(time.monotonic() - self._begun) / here * left:.0f} s left" if left and here else ""

    def _marker(self, piece: Piece) -> dict[str, Any] | None:
        """Return the content of piece.json, if it is of the same settings."""
        try:
            marker = json.loads((self._folder / piece.name / "piece.json").read_text())
        except (OSError, ValueError):
            return None
        known = isinstance(marker, dict) and {"key", "seconds", "machine"} <= marker.keys()
        return marker if known and marker["key"] == piece.key else None

    def _store(self, piece: Piece, outcome: PieceOutcome) -> None:
        """Write the files of a worker into the piece's folder, and last the marker of its end, piece.json."""
        folder = self._folder / piece.name
        if outcome.files is not None:
            if any(Path(name).is_absolute() or ".." in Path(name).parts for name in outcome.files):
                raise WrongInput(
                    "out", f"the worker of {piece.name} names a file outside of its folder; check {outcome.machine}"
                )
            with explained(folder):
                shutil.rmtree(folder, ignore_errors=True)  # files of another start would be mixed with these
                for name in outcome.files:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
            for name, content in outcome.files.items():
                write(folder / name, content)
        marker = {"schema": SCHEMA, "key": piece.key, "seconds": outcome.seconds, "machine": outcome.machine}
        write(folder / "piece.json", json.dumps(marker).encode())

    def _print(self, line: str) -> None:
        print(printable(line), file=sys.stderr, flush=True)

    def _save(self) -> None:
        lines = (json.dumps({"schema": SCHEMA} | asdict(entry)) + "\n" for entry in self.entries)
        self._run.write("pieces.jsonl", "".join(lines))


def gather(run: Run, pieces: Sequence[Piece], folder: Path) -> None:
    """Add the rows and figures of all pieces to the run, in order; seeds of one setting share their `run`."""
    for piece in pieces:
        run.add(replace(row, extra=row.extra | {"run": piece.run}) for row in load_rows(folder / piece.name))
        run.show({**figure, "run": piece.run} for figure in load_figures(folder / piece.name))


def list_passed_limits(pieces: Sequence[Piece], folder: Path) -> list[str]:
    """Return a sentence for each limit that does not hold, with its piece."""
    sentences = []
    for piece in pieces:
        policy = limits.policy_of(piece.config.limits) if isinstance(piece.config, Audit) else None
        checks = limits.check(load_rows(folder / piece.name), policy) if policy else []
        sentences += [f"{piece.name}: {check.sentence}" for check in checks if not check.passed]
    return sentences
