"""A federation as a stage of a run: killed at any moment, it goes on at its last saved round, to equal rows.

That is its last finished round, unless saving every one would take too long, or updates wait to be attacked together
(`_pause`). What is saved: the server's weights, mask, momentum and squares, every sampled client's state, all counters,
and the rows and figures so far. Chance needs no saving: it depends on the seed and the round's number.

What whoever runs a federation needs of it, whichever loop it is: its rounds, its state, what it depends on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from secateur.data.dataset import Dataset, fingerprint
from secateur.interfaces import Params
from secateur.runs.artifacts import NoSpace, Result, decode, explained, key_of, save
from secateur.runs.folder import Run
from secateur.runs.rows import Row
from secateur.runs.unfinished import forget

log = logging.getLogger(__name__)

STAGE = "federate"
EVERY = 30.0  # seconds between two savings at most, unless they take longer than a twentieth of that
LATER = 300.0  # seconds at least where updates wait for others: saved, they would be attacked one by one
FULL = 30.0  # seconds that saving is taken to need where the disk was full: it is tried again after ten minutes
SPEED = 3e8  # bytes a second that are saved, until it is measured


class Finished(Protocol):
    """A round that is done."""

    @property
    def number(self) -> int:
        """Which one, from 1."""
        ...


Done = TypeVar("Done", bound=Finished, covariant=True)


class Agreed(Protocol):
    """The terms of a federation."""

    @property
    def rounds(self) -> int:
        """How many there are."""
        ...


class Stated(Agreed, Protocol):
    """Terms that can be told."""

    @property
    def shares(self) -> Sequence[Tensor]:
        """The rows of each client."""
        ...

    @property
    def stated(self) -> dict[str, Any]:
        """All of them in words and numbers."""
        ...


class Standing(Protocol):
    """What a federation's result depends on."""

    @property
    def terms(self) -> Stated:
        """What was agreed on."""
        ...

    @property
    def net(self) -> nn.Module:
        """The model of round 1."""
        ...

    @property
    def seed(self) -> int:
        """Of all chance."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        ...


class Followed(Protocol[Done]):
    """A federation, or several together, that can be put down and taken up between two rounds."""

    @property
    def number(self) -> int:
        """Rounds that are done."""
        ...

    @property
    def terms(self) -> Agreed:
        """What was agreed on."""
        ...

    def rounds(self) -> Iterator[Done]:
        """From where it stands to the last one."""
        ...

    def observed(self, number: int) -> bool:
        """Whether somebody looked at a round's updates, and is done with them: it is worth saving."""
        ...

    @property
    def puts_off(self) -> bool:
        """Whether updates wait for others, to be attacked together; `state` ends that."""
        ...

    def model(self) -> Params:
        """What it came to."""
        ...

    def state(self) -> tuple[Params, dict[str, Any]]:
        """Everything that the next round depends on."""
        ...

    def load(self, tensors: Params, data: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        ...


@dataclass
class Story:
    """What a federation has told so far."""

    rows: list[Row] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        rows = [row.to_json() for row in self.rows]
        return {"rows": rows, "figures": self.figures, "seconds": self.seconds}

    def load(self, plain: dict[str, Any]) -> None:
        """Go on from what `plain` gave."""
        self.rows = [Row.from_json(row) for row in plain["rows"]]
        self.figures, self.seconds = list(plain["figures"]), plain["seconds"]


@dataclass
class Stories:
    """What federations that run together have told so far: a story each, saved as one."""

    each: Sequence[Story]

    @property
    def seconds(self) -> float:
        """Of all of them; each has an equal share."""
        return sum(story.seconds for story in self.each)

    @seconds.setter
    def seconds(self, spent: float) -> None:
        for story in self.each:
            story.seconds = spent / len(self.each)

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"each": [story.plain() for story in self.each]}

    def load(self, plain: dict[str, Any]) -> None:
        """Go on from what `plain` gave."""
        for story, own in zip(self.each, plain["each"], strict=True):
            story.load(own)


def federated(
    run: Run,
    federation: Followed[Done],
    story: Story,
    tell: Callable[[Done], None],  # adds to the story what a round came to
    depends: dict[str, Any],
    every: float | None = None,
) -> tuple[Params, Story]:
    """Run it, or go on, or take what an earlier start of this run made; returns the model and what was told."""
    key = key_of(STAGE, depends)

    def compute() -> Result:
        follow(run.folder, key, federation, story, tell, every)
        return Result(federation.model(), story.plain())

    result = run.stage(STAGE, depends, compute)
    forget(run.folder, STAGE, key)
    told = Story()
    told.load(result.data)
    return dict(result.tensors), told


def depends_of(federation: Standing, data: Dataset) -> dict[str, Any]:
    """All that a federation's result depends on but who looks at it."""
    terms, net = federation.terms, federation.net
    structure = hashlib.sha256(repr(net).encode()).hexdigest()
    return terms.stated | {
        "data": data.key,
        "train_size": data.train_size,
        "net": [structure, fingerprint(*net.state_dict().values())],
        "shares": fingerprint(*terms.shares),
        "sizes": [len(rows) for rows in terms.shares],
        "seed": federation.seed,
        "device": federation.device.type,
    }


def follow(
    folder: Path,  # of the run
    key: str,  # of all that it comes to
    federation: Followed[Done],
    story: Story | Stories,
    tell: Callable[[Done], None],
    every: float | None = None,
) -> None:
    """Follow a federation, or several together, to the last round, from where a killed process saved them.

    What is saved stays until it is forgotten (`unfinished.forget`), when the result is kept.
    """
    place = folder / "unfinished" / f"{STAGE}-{key[:16]}.safetensors"
    _resume(place, key, federation, story)
    saved = begun = time.monotonic()
    takes, speed, earlier = 0.0, SPEED, story.seconds
    for done in federation.rounds():
        tell(done)
        start = time.monotonic()
        since, when = start - saved, (federation.observed(done.number), federation.puts_off)
        if since < (_pause(takes, *when) if every is None else every) or federation.number >= federation.terms.rounds:
            continue
        tensors, data = federation.state()
        size = sum(value.nbytes for value in tensors.values())
        takes = size / speed  # it grows as clients join, and the first is not known to be cheap
        if every is None and since < _pause(takes, *when):
            continue
        story.seconds = earlier + start - begun
        kept = _save(place, Result(tensors, {"federation": data, "story": story.plain()}), key, federation.number)
        saved = time.monotonic()
        speed = max(size, 1) / max(saved - start, 1e-9) if kept else speed
        takes = saved - start if kept else FULL
    story.seconds = earlier + time.monotonic() - begun


def _pause(takes: float, worth: bool, later: bool) -> float:
    """Seconds between two savings that take so many: a fiftieth of the time goes there, of long ones a twentieth.

    `worth`: so it is also for a round with an attack, which is not to be made twice; `later`: updates wait for others.
    """
    usual = 20 * takes if worth else min(50 * takes, max(EVERY, 20 * takes))
    return max(usual, LATER) if later else usual


def _save(place: Path, result: Result, key: str, number: int) -> bool:
    """Whether there was space for it: a full disk keeps the last round that was saved, and does not end a run."""
    try:
        with explained(place):
            place.parent.mkdir(exist_ok=True)
        save(place, result, key)
    except NoSpace:
        size = sum(value.nbytes for value in result.tensors.values()) / 1e9
        last = "an earlier round is kept" if place.exists() else "no round is kept"
        log.warning(
            "no space left in %s to save round %d (%.1f GB): %s; the run goes on", place.parent, number, size, last
        )
        return False
    return True


def _resume(place: Path, key: str, federation: Followed[Any], story: Story | Stories) -> None:
    """Bring a federation to where a killed one was; a damaged file counts as none."""
    with explained(place):
        content = place.read_bytes() if place.exists() else None
    kept = None if content is None else decode(content, key)
    if kept is not None:
        federation.load(dict(kept.tensors), kept.data["federation"])
        story.load(kept.data["story"])
