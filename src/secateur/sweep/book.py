"""How the pieces of a sweep fare: on disk for whoever starts it again, and on the terminal."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from secateur.artifacts import SCHEMA, explained, write
from secateur.progress import Advance
from secateur.runs import Run
from secateur.sweep.pieces import Piece
from secateur.sweep.spreading import STARTS
from secateur.sweep.working import Outcome


@dataclass
class Entry:
    """One piece's line in pieces.jsonl."""

    name: str
    run: str
    state: str = "waiting"  # running, done or failed
    said: str | None = None  # why it failed
    trace: str | None = None
    starts: int = 0
    seconds: float | None = None
    machine: str | None = None


class Book:
    """Keeps pieces.jsonl, puts what comes back in its place, and tells how far the sweep is."""

    def __init__(self, run: Run, pieces: Sequence[Piece], folder: Path) -> None:
        self.advance: Advance = lambda steps, said=None: None
        self._run, self._folder, self._begun = run, folder, time.monotonic()
        self._entries = {piece.name: Entry(piece.name, piece.run) for piece in pieces}
        for piece in pieces:
            if (said := self._marker(piece)) is not None:
                entry = self._entries[piece.name]
                entry.state, entry.seconds, entry.machine = "done", said["seconds"], said["machine"]
        self._before = self.count("done")
        self._save()

    @property
    def entries(self) -> list[Entry]:
        """All pieces, in the plan's order."""
        return list(self._entries.values())

    def count(self, state: str) -> int:
        """How many pieces are in a state."""
        return Counter(entry.state for entry in self.entries)[state]

    def finished(self, piece: Piece) -> bool:
        """Whether a piece was finished with these very settings, now or by an earlier start."""
        return self._marker(piece) is not None

    def began(self, piece: Piece) -> None:
        """A piece was given to a worker."""
        entry = self._entries[piece.name]
        entry.state, entry.starts = "running", entry.starts + 1
        self._save()
        self.advance(0, self.told())

    def died(self, piece: Piece, starts: int, reason: str) -> None:
        """A worker died, and its piece goes back to the others that wait."""
        self._entries[piece.name].state = "waiting"
        why = reason.partition(". ")[0][:200]
        self._tell(f"{piece.name}: its worker died, so it is started again ({why}; start {starts + 1} of {STARTS})")

    def ended(self, piece: Piece, outcome: Outcome) -> None:
        """A piece is done, or has failed for good."""
        entry = self._entries[piece.name]
        entry.said, entry.trace = outcome.wrong, outcome.trace
        entry.seconds, entry.machine = round(outcome.seconds, 3), outcome.machine
        if outcome.wrong is None:
            self._put(piece, outcome)
        entry.state = "failed" if outcome.wrong else "done"
        self._save()
        how = "done" if outcome.wrong is None else f"failed: {outcome.wrong}"
        self._tell(f"{piece.name}: {how} ({self.told()}{self._left()})")
        self.advance(1, self.told())

    def told(self) -> str:
        """How far the sweep is, in one line."""
        done, failed, running = map(self.count, ("done", "failed", "running"))
        return f"sweep: {done} of {len(self._entries)} done, {running} running, {failed} failed"

    def _left(self) -> str:
        """The time left, if the other pieces take as long; bars have their own."""
        ended = self.count("done") + self.count("failed")
        left, here = len(self._entries) - ended, ended - self._before
        return f", about {(time.monotonic() - self._begun) / here * left:.0f} s left" if left and here else ""

    def _marker(self, piece: Piece) -> dict[str, Any] | None:
        """What piece.json says, where it is of these very settings."""
        try:
            said = json.loads((self._folder / piece.name / "piece.json").read_text())
        except (OSError, ValueError):
            return None
        return said if isinstance(said, dict) and said.get("key") == piece.key else None

    def _put(self, piece: Piece, outcome: Outcome) -> None:
        """Files that came back into the piece's folder, and last of all the word that it is finished."""
        folder = self._folder / piece.name
        if outcome.files is not None:
            with explained(folder):
                shutil.rmtree(folder, ignore_errors=True)  # of another start, whose files would be mixed with these
                for name in outcome.files:
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
            for name, content in outcome.files.items():
                write(folder / name, content)
        said = {"schema": SCHEMA, "key": piece.key, "seconds": outcome.seconds, "machine": outcome.machine}
        write(folder / "piece.json", json.dumps(said).encode())

    def _tell(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def _save(self) -> None:
        lines = (json.dumps({"schema": SCHEMA} | asdict(entry)) + "\n" for entry in self.entries)
        self._run.write("pieces.jsonl", "".join(lines))
