"""The job of `secateur sweep`: pieces of work over Ray workers, into one folder, one file of rows and one page.

Read `run_sweep` first. pieces.py says what the pieces are, spreading.py gives them to workers, working.py runs them.

pieces/NAME     the run folder of each piece; its piece.json says that it is finished, and of which settings
pieces.jsonl    how every piece fares, rewritten with every change
results.jsonl   the rows of all finished pieces in the plan's order, each with its `run`; figures.jsonl likewise
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from secateur import limits
from secateur.artifacts import write
from secateur.config import Audit, Sweep
from secateur.errors import WrongInput, require
from secateur.progress import progress
from secateur.rows import Row
from secateur.runs import Run, load_figures, load_rows, open_run
from secateur.sweep.book import Book, Entry
from secateur.sweep.pieces import Piece, plan_at
from secateur.sweep.spreading import spread
from secateur.sweep.working import Home


@dataclass(frozen=True)
class Swept:
    """What a sweep came to."""

    rows: list[Row]
    entries: list[Entry]
    broken: list[str]  # limits of audits that do not hold

    @property
    def wrong(self) -> list[str]:
        """What a user must know: pieces that failed, and limits that were passed."""
        return [f"{entry.name} failed: {entry.said}" for entry in self.entries if entry.state != "done"] + self.broken


def run_sweep(config: Sweep, out: Path, address: str | None = None, workers: int | None = None) -> Swept:
    """Run every piece that is not finished, at `address` or on this machine, and gather all into the folder `out`."""
    pieces = plan_at(config, address)
    require("ray", "ray")
    seeds = sorted({seed for piece in pieces for seed in piece.config.seeds or ()})
    settings = config.model_dump(mode="json", by_alias=True)
    with open_run(out, "sweep", settings, seeds=seeds) as run:
        home = at_home(out)
        book = Book(run, pieces, home.pieces)
        try:
            if left := [piece for piece in pieces if not book.finished(piece)]:
                with progress(book.told(), len(pieces)) as book.advance:
                    book.advance(len(pieces) - len(left))
                    spread(left, home, book, address, workers)
        finally:  # also where it was stopped: what is finished is gathered
            (home.pieces / ".home").unlink(missing_ok=True)
            done = [piece for piece in pieces if book.finished(piece)]
            gather(run, done, home.pieces)
            run.flush()
            _write_page(out)
    return Swept(run.rows, book.entries, broken(done, home.pieces))


def at_home(out: Path) -> Home:
    """The folder of the pieces, with a token by which workers know whether they share it."""
    pieces = out.resolve() / "pieces"
    pieces.mkdir(exist_ok=True)
    home = Home(pieces, uuid.uuid4().hex, Path.cwd())
    write(pieces / ".home", home.token.encode())
    return home


def gather(run: Run, pieces: Sequence[Piece], folder: Path) -> None:
    """The rows and figures of all pieces, in the pieces' order; seeds of one setting share their `run`."""
    for piece in pieces:
        run.add(replace(row, extra=row.extra | {"run": piece.run}) for row in load_rows(folder / piece.name))
        run.show({**figure, "run": piece.run} for figure in load_figures(folder / piece.name))


def broken(pieces: Sequence[Piece], folder: Path) -> list[str]:
    """The limits that do not hold, each with its piece."""
    sentences = []
    for piece in pieces:
        given = piece.config.limits.given() if isinstance(piece.config, Audit) else {}
        checks = limits.check(load_rows(folder / piece.name), given) if given else []
        sentences += [f"{piece.name}: {check.sentence}" for check in checks if not check.passed]
    return sentences


def _write_page(out: Path) -> None:
    from secateur.report.page import write_page

    with suppress(WrongInput):  # no piece may be finished yet
        write_page([out])
