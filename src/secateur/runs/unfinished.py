"""Observers of a long attack: progress, saved state for resuming a killed run, and results."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from secateur.interfaces import Batch, Params, Reconstruction
from secateur.runs.artifacts import SCHEMA, Result, decode, encode, explained, write

EVERY = 10.0  # seconds between two saves
POINTS = 200  # stored points of a loss curve, at most

Draw = Callable[..., list[dict[str, Any]]]  # of reconstructions, and of their numbers unless they are all


class NullWatcher:
    """Observer of an attack that stores no state."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """The attack's working time."""
        return time.monotonic() - self._begun

    def draw(self, pictures: Sequence[Reconstruction], numbers: Sequence[int]) -> None:
        """Do nothing."""

    def load(self) -> Params | None:
        """Return None: there is no saved state."""
        return None

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Do nothing."""


class StageWatcher:
    """Observer of one stage of a run; its files are in `unfinished/` until the stage is done."""

    def __init__(self, folder: Path, name: str, key: str, advance: Callable[[int], None], draw: Draw) -> None:
        self._advance, self._key, self.draw = advance, key, draw
        self._done = 0  # iterations
        self._state = _state_file(folder, name, key)
        self._figures = self._state.with_suffix(".jsonl")
        self._earlier = 0.0  # seconds of work before the process was killed
        self._begun = self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        """The attack's working time, summed over all its processes."""
        return self._earlier + time.monotonic() - self._begun

    def advance(self, iterations: int) -> None:
        """Count iterations and show the progress."""
        self._done += iterations
        self._advance(iterations)

    def load(self) -> Params | None:
        """Return the last saved state, on the CPU; None if there is none or the file is damaged."""
        with explained(self._state):
            content = self._state.read_bytes() if self._state.exists() else None
        saved = None if content is None else decode(content, self._key)
        if saved is None:
            return None
        self._earlier = saved.data["seconds"]
        self.advance(saved.data["iterations"])
        return dict(saved.tensors)

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Save the state and the pictures, at most once every EVERY seconds."""
        if time.monotonic() - self._saved < EVERY:
            return
        with explained(self._state):
            self._state.parent.mkdir(mode=0o700, exist_ok=True)
        write(self._state, encode(Result(state, {"seconds": self.seconds, "iterations": self._done}), self._key))
        lines = [json.dumps({"schema": SCHEMA} | figure, allow_nan=False) + "\n" for figure in self.draw(pictures)]
        write(self._figures, "".join(lines).encode())
        self._saved = time.monotonic()


def forget(folder: Path, name: str, key: str) -> None:
    """Delete the files of a finished stage."""
    for suffix in (".safetensors", ".jsonl", ".states"):
        _state_file(folder, name, key).with_suffix(suffix).unlink(missing_ok=True)


def _state_file(folder: Path, name: str, key: str) -> Path:
    return folder / "unfinished" / f"{name}-{key[:16]}.safetensors"


def pack(reconstructions: Sequence[Reconstruction | None], seconds: float) -> Result:
    """Pack reconstructions into the result of a stage."""
    tensors: Params = {}
    data: list[dict[str, Any] | None] = []
    for i, reconstruction in enumerate(reconstructions):
        if reconstruction is None:
            data.append(None)
            continue
        tensors |= {f"{i}.inputs": reconstruction.batch.inputs, f"{i}.labels": reconstruction.batch.labels}
        plain = {name: getattr(reconstruction, name) for name in ("loss", "trial", "diverged", "note")}
        data.append(plain | {"curve": _thin(reconstruction.curve)})
    return Result(tensors, {"targets": data, "seconds": seconds})


def unpack(result: Result) -> list[Reconstruction | None]:
    """Return the reconstructions of a result of `pack`."""
    reconstructions: list[Reconstruction | None] = []
    for i, data in enumerate(result.data["targets"]):
        batch = None if data is None else Batch(result.tensors[f"{i}.inputs"], result.tensors[f"{i}.labels"])
        reconstructions.append(None if batch is None else Reconstruction(batch, **data))
    return reconstructions


def _thin(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most POINTS points, the first and the last among them."""
    if len(curve) <= POINTS:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (POINTS - 1))] for i in range(POINTS)]
