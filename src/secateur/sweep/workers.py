"""Ray workers of a sweep: as many pieces at once as there is room for, each started again if its worker dies.

A worker runs a piece in the sweep's folder, or in a local folder if the sweep's folder is not on its disk. The files
of a local folder come back in the outcome. Its name is the piece's key, so that a killed piece resumes there.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import platform
import shutil
import tempfile
import time
import traceback
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from secateur.config import Audit, Federate, Invert, Reproduce
from secateur.errors import WrongInput
from secateur.sweep.plan import Piece
from secateur.training.ray import connected

PATIENCE = 60.0  # seconds until the worker of a killed sweep has released its folder
STARTS = 4  # at most, of a piece whose worker dies each time
GROWTH = 10.0  # seconds between questions if a cluster has more room


@dataclass(frozen=True)
class SweepFolder:
    """Folder of the sweep; a worker that reads the token there shares its disk."""

    pieces: Path
    token: str
    current: Path  # base of relative paths in the run file

    @property
    def shared(self) -> bool:
        """True if this process sees the sweep's folder."""
        try:
            return (self.pieces / ".home").read_text() == self.token
        except OSError:
            return False


@dataclass(frozen=True)
class PieceOutcome:
    """End of a piece on a worker."""

    machine: str
    seconds: float
    error: str | None = None  # one sentence on why it failed
    trace: str | None = None  # of an internal error
    files: dict[str, bytes] | None = None  # of a folder that only the worker has


class PieceCallbacks(Protocol):
    """Callbacks on the state of the pieces."""

    def note_start(self, piece: Piece) -> None:
        """Note that a worker started a piece."""

    def note_death(self, piece: Piece, starts: int, reason: str) -> None:
        """Note that a worker died after so many starts of the piece, which waits for the next."""

    def note_end(self, piece: Piece, outcome: PieceOutcome) -> None:
        """Note that a piece is done, or has failed for good."""


def spread(
    pieces: Sequence[Piece], folder: SweepFolder, callbacks: PieceCallbacks, address: str | None, workers: int | None
) -> None:
    """Run the pieces in their order on a cluster, or on this machine, at most `workers` at once."""
    most = None if workers is None else math.ceil(workers * max(piece.cpus for piece in pieces))
    with connected(address, most) as ray:
        if not (address or os.environ.get("RAY_ADDRESS")):
            _check_room(pieces, ray.cluster_resources())
        job: Any = ray.remote(max_retries=0)(run_piece)  # starts are counted here, for the callbacks
        waiting, running, starts = deque(pieces), dict[Any, Piece](), Counter[str]()
        while waiting or running:
            while waiting and _fits(waiting[0], running.values(), ray.cluster_resources(), workers):
                piece = waiting.popleft()
                starts[piece.name] += 1
                running[job.options(num_cpus=piece.cpus, num_gpus=piece.gpus).remote(piece, folder)] = piece
                callbacks.note_start(piece)
            for ended in ray.wait(list(running), timeout=GROWTH)[0]:
                piece = running.pop(ended)
                try:
                    outcome = ray.get(ended)
                except ray.exceptions.RayTaskError as error:
                    outcome = PieceOutcome("?", 0.0, f"{type(error.cause).__name__}: {error.cause}", str(error))
                except ray.exceptions.RayError as error:  # the worker or its machine died, or its answer was lost
                    reason = " ".join(str(error).split())
                    if starts[piece.name] < STARTS:
                        waiting.append(piece)  # last, as what killed it (too little memory) may have passed by then
                        callbacks.note_death(piece, starts[piece.name], reason)
                        continue
                    outcome = PieceOutcome("?", 0.0, f"its worker died {STARTS} times", reason)
                callbacks.note_end(piece, outcome)


def _check_room(pieces: Sequence[Piece], resources: Mapping[str, float]) -> None:
    """Refuse a piece that this machine never has room for."""
    for piece in pieces:
        for field, name in (("cpus", "CPU"), ("gpus", "GPU")):
            asked, available = getattr(piece, field), resources.get(name, 0)
            if asked > available:
                raise WrongInput(field, f"{asked:g} for {piece.name} is more than this machine's {available:g}")


def _fits(piece: Piece, running: Collection[Piece], resources: Mapping[str, float], workers: int | None) -> bool:
    """Return True if a piece can begin now; one alone always can, as a cluster may grow on demand."""
    if not running:
        return True
    if workers is not None and len(running) >= workers:
        return False
    return (
        sum(other.cpus for other in running) + piece.cpus <= resources.get("CPU", 0)
        and sum(other.gpus for other in running) + piece.gpus <= resources.get("GPU", 0) + 1e-9
    )


def run_piece(piece: Piece, sweep: SweepFolder) -> PieceOutcome:
    """Run a piece to its end; a failure is an outcome too, so that the other pieces continue."""
    start, failure, trace, files = time.monotonic(), None, None, None
    torch.set_num_threads(1)
    try:
        shared = sweep.shared
        if shared:
            os.chdir(sweep.current)
        folder = sweep.pieces / piece.name if shared else local_folder(piece)
        wait_until_free(folder)
        run_job(piece, folder)
        if not shared:
            files = read_files(folder)
            shutil.rmtree(folder)
    except WrongInput as error:
        failure = str(error)
    except Exception as error:
        failure, trace = f"{type(error).__name__}: {error}", traceback.format_exc()
    return PieceOutcome(platform.node(), time.monotonic() - start, failure, trace, files)


def local_folder(piece: Piece) -> Path:
    """Return the folder of this piece on the worker's disk, in which other users cannot write."""
    base = Path(tempfile.gettempdir()) / f"secateur-{os.getuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise WrongInput("out", f"{base} on {platform.node()} belongs to another user; set TMPDIR there")
    return base / piece.key[:32]


def wait_until_free(folder: Path, patience: float = PATIENCE) -> None:
    """Wait while another process holds the run: a worker of a killed sweep dies a little later than the sweep."""
    until = time.monotonic() + patience
    while (folder / ".lock").exists() and time.monotonic() < until:
        with (folder / ".lock").open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.2)
            else:
                return  # closing the file releases the lock


def run_job(piece: Piece, out: Path) -> None:
    """Run the piece's job into the folder `out`."""
    config = piece.config
    if isinstance(config, Invert):
        from secateur.experiments.invert import run_invert

        run_invert(config, out)
    elif isinstance(config, Federate):
        from secateur.experiments.federate import run_federate

        run_federate(config, out)
    elif isinstance(config, Reproduce):
        from secateur.studies.study import reproduce

        overrides = [f"{field}={x if isinstance(x, str) else json.dumps(x)}" for field, x in config.set_.items()]
        reproduce(config.study, config.scale, config.options, overrides, out)
    else:
        _audit(config, out)


def _audit(config: Audit, out: Path) -> None:
    from secateur.experiments.audit import run_audit
    from secateur.experiments.predictions import run_predictions

    if config.predictions is None:
        run_audit(config, out)
    else:
        run_predictions(config, config.predictions, out)


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of every file of a run, except its lock, by its path inside the folder."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
