"""Checkpoints of a federation as a stage of a run: a killed process resumes at the last saved round, to equal rows.

That is the last finished round, unless saving every round would take too long, or updates wait to be attacked together
(`_pause`). A checkpoint holds the server's weights, mask, momentum and squares, and every sampled client's state, or
where a file beside it holds the state (state_file.py). It also holds all counters, and the rows and figures so far.
Random generators need no saving: they depend on the seed and
the round's number.

`Resumable` is all that a checkpoint needs of a federation: its rounds and its state.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from secateur.data.dataset import Dataset, fingerprint
from secateur.data.partition import Shares, count_rows
from secateur.errors import WrongInput
from secateur.federated.spec import RoundsSpec
from secateur.federated.traffic import Round
from secateur.gpu.determinism import device_key
from secateur.interfaces import Params
from secateur.runs.artifacts import NoSpace, Result, decode, explained, key_of, save
from secateur.runs.folder import Run
from secateur.runs.rows import Row, pack, unpack
from secateur.runs.unfinished import forget

logger = logging.getLogger(__name__)
STAGE = "federate"
EVERY = 30.0  # seconds between two savings at most, unless one takes longer than a twentieth of that
LATER = 300.0  # seconds at least where updates wait for others: saving attacks them, in smaller groups
FULL = 30.0  # assumed seconds of saving after a full disk, so that the next try comes after ten minutes
SPEED = 3e8  # assumed bytes a second of saving, until it is measured


class Resumable(ABC):
    """A federation, or several together, that can stop and resume between two rounds."""

    terms: RoundsSpec
    number: int = 0  # finished rounds
    every: float | None = None  # seconds between two checkpoints; None: as `_pause` says

    def rounds(self) -> Iterator[Round]:
        """Run the rounds that are left, and yield each."""
        while self.number < self.terms.rounds:
            yield self.run_round(self.number + 1)

    @abstractmethod
    def run_round(self, number: int) -> Round:
        """Run one round."""

    @abstractmethod
    def was_observed(self, number: int) -> bool:
        """Return True if observers have looked at a round's updates and finished, so that saving is worthwhile."""

    @property
    def puts_off(self) -> bool:
        """True if updates wait to be attacked together; `state` attacks them."""
        return False

    @abstractmethod
    def model(self) -> Params:
        """Return the server's model as it is now: a state_dict of copies."""

    @abstractmethod
    def state(self) -> tuple[Params, dict[str, Any]]:
        """Return everything that the next round depends on, for `load`: tensors, and plain values."""

    @abstractmethod
    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Resume from the output of `state`, in a federation of the same specification, data and seed."""

    def place_states(self, path: Path) -> None:  # noqa: B027 (most have no file)
        """Keep a file of clients' states, if there is one, at this path."""

    def note_saved(self) -> None:  # noqa: B027
        """Note that the last output of `state` was saved."""


def check_state(same: bool) -> None:
    """Raise WrongInput if a saved state is not that of the `same` federation."""
    if not same:
        raise WrongInput("state", "is of another federation; use one saved with this specification and this seed")


@dataclass
class FederationLog:
    """The rows, figures and seconds of a federation so far."""

    rows: list[Row] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """Return the log as plain values for JSON."""
        return pack(self.rows) | {"figures": self.figures, "seconds": self.seconds}

    def load(self, plain: dict[str, Any]) -> None:
        """Restore the result of `to_plain`."""
        self.rows = unpack(plain)
        self.figures, self.seconds = list(plain["figures"]), plain["seconds"]


def run_or_resume(
    run: Run,
    federation: Resumable,
    log: FederationLog,
    record: Callable[[Round], None],  # adds a finished round to the log
    depends: dict[str, Any],
) -> tuple[Params, FederationLog]:
    """Run a federation, resume it, or take the result of an earlier start; return the model and the log."""
    key = key_of(STAGE, depends)

    def compute() -> Result:
        follow(run.folder, key, federation, [log], record)
        return Result(federation.model(), log.to_plain())

    result = run.stage(STAGE, depends, compute)
    forget(run.folder, STAGE, key)
    kept = FederationLog()
    kept.load(result.data)
    return dict(result.tensors), kept


def depends_of(terms: RoundsSpec, net: nn.Module, data: Dataset, seed: int, device: torch.device) -> dict[str, Any]:
    """Return everything that a federation's result depends on, except its observers."""
    return terms.description | training_key(net, data, terms.shares, seed, device)


def training_key(
    net: nn.Module, data: Dataset, shares: Sequence[Tensor], seed: int, device: torch.device
) -> dict[str, Any]:
    """Return the parts of a stage key that all trainings of several clients have."""
    structure = hashlib.sha256(repr(net).encode()).hexdigest()
    return {
        "data": data.key,
        "train_size": data.train_size,
        "net": [structure, fingerprint(*net.state_dict().values())],
        "shares": fingerprint(shares.rows) if isinstance(shares, Shares) else fingerprint(*shares),
        "sizes": count_rows(shares),
        "seed": seed,
        "device": device_key(device),
    }


def follow(
    folder: Path,  # of the run
    key: str,  # of the result
    federation: Resumable,
    logs: Sequence[FederationLog],  # one a federation; they share the seconds
    record: Callable[[Round], None],
) -> None:
    """Run a federation, or several together, to the last round, from the checkpoint of a killed process.

    The checkpoint stays until it is forgotten (`unfinished.forget`), when the result is kept.
    """
    path = folder / "unfinished" / f"{STAGE}-{key[:16]}.safetensors"
    every = federation.every
    federation.place_states(path.with_suffix(".states"))
    _resume(path, key, federation, logs)
    saved = begun = time.monotonic()
    takes, speed, earlier = 0.0, SPEED, sum(log.seconds for log in logs)
    for done in federation.rounds():
        record(done)
        start = time.monotonic()
        since, when = start - saved, (federation.was_observed(done.number), federation.puts_off)
        if since < (_pause(takes, *when) if every is None else every) or federation.number >= federation.terms.rounds:
            continue
        tensors, data = federation.state()
        size = sum(value.nbytes for value in tensors.values())
        takes = size / speed  # the size grows as clients join, and the first saving need not be cheap
        if every is None and since < _pause(takes, *when):
            continue
        _share(logs, earlier + start - begun)
        data = {"federation": data, "logs": [log.to_plain() for log in logs]}
        kept = _save(path, Result(tensors, data), key, federation.number)
        if kept:
            federation.note_saved()
        saved = time.monotonic()
        speed = max(size, 1) / max(saved - start, 1e-9) if kept else speed
        takes = saved - start if kept else FULL
    _share(logs, earlier + time.monotonic() - begun)


def _share(logs: Sequence[FederationLog], seconds: float) -> None:
    for log in logs:
        log.seconds = seconds / len(logs)


def _resume(path: Path, key: str, federation: Resumable, logs: Sequence[FederationLog]) -> None:
    """Load the checkpoint of a killed process; a damaged file counts as none."""
    with explained(path):
        content = path.read_bytes() if path.exists() else None
    kept = None if content is None else decode(content, key)
    if kept is not None:
        federation.load(dict(kept.tensors), kept.data["federation"])
        for log, saved in zip(logs, kept.data["logs"], strict=True):
            log.load(saved)


def _pause(takes: float, worth: bool, later: bool) -> float:
    """Return the seconds between two savings of `takes` seconds each.

    Savings take a fiftieth of the time, long ones a twentieth. `worth`: a twentieth also after a round with an attack,
    which should not be repeated. `later`: updates wait for others.
    """
    usual = 20 * takes if worth else min(50 * takes, max(EVERY, 20 * takes))
    return max(usual, LATER) if later else usual


def _save(path: Path, result: Result, key: str, number: int) -> bool:
    """Save a checkpoint and return True; return False on a full disk, which keeps the last one and ends no run."""
    try:
        with explained(path):
            path.parent.mkdir(exist_ok=True)
        save(path, result, key)
    except NoSpace:
        size = sum(value.nbytes for value in result.tensors.values()) / 1e9
        last = "an earlier round is kept" if path.exists() else "no round is kept"
        logger.warning(
            "no space left in %s to save round %d (%.1f GB): %s; the run goes on", path.parent, number, size, last
        )
        return False
    return True
