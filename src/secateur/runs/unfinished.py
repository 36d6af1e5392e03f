"""Who follows a long attack: shows how far it is, keeps what a killed run goes on from, and what came out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from secateur.interfaces import Batch, Params, Reconstruction
from secateur.runs.artifacts import SCHEMA, Result, decode, encode, explained, write

EVERY = 10.0  # seconds between two savings
POINTS = 200  # of a loss curve that are kept

Draw = Callable[[Sequence[Reconstruction]], list[dict[str, Any]]]


class Onlooker:
    """Watches an attack that keeps nothing."""

    def __init__(self, advance: Callable[[int], None]) -> None:
        self.advance = advance

    def load(self) -> Params | None:
        """There is nothing to go on from."""
        return None

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Nothing is kept."""


class Keeper:
    """Watches one stage of a run; what it keeps lies in `unfinished/` until the stage is done."""

    def __init__(self, folder: Path, name: str, key: str, advance: Callable[[int], None], draw: Draw) -> None:
        self._advance, self._key, self._draw = advance, key, draw
        self._done = 0  # iterations
        self._state = _place(folder, name, key)
        self._figures = self._state.with_suffix(".jsonl")
        self._earlier = 0.0  # seconds of work before the process was killed
        self._begun = self._saved = time.monotonic()

    @property
    def seconds(self) -> float:
        """How long the attack has worked, all its processes together."""
        return self._earlier + time.monotonic() - self._begun

    def advance(self, iterations: int) -> None:
        """Show how far it is."""
        self._done += iterations
        self._advance(iterations)

    def load(self) -> Params | None:
        """The last saved state, on the CPU; None where there is none or it is damaged."""
        with explained(self._state):
            content = self._state.read_bytes() if self._state.exists() else None
        kept = None if content is None else decode(content, self._key)
        if kept is None:
            return None
        self._earlier = kept.data["seconds"]
        self.advance(kept.data["iterations"])
        return dict(kept.tensors)

    def save(self, state: Params, pictures: Sequence[Reconstruction]) -> None:
        """Keep the state and show the pictures, at most once in a while."""
        if time.monotonic() - self._saved < EVERY:
            return
        with explained(self._state):
            self._state.parent.mkdir(exist_ok=True)
        write(self._state, encode(Result(state, {"seconds": self.seconds, "iterations": self._done}), self._key))
        lines = [json.dumps({"schema": SCHEMA} | figure, allow_nan=False) + "\n" for figure in self._draw(pictures)]
        write(self._figures, "".join(lines).encode())
        self._saved = time.monotonic()


def forget(folder: Path, name: str, key: str) -> None:
    """Nothing of this stage is unfinished any more."""
    for suffix in (".safetensors", ".jsonl"):
        _place(folder, name, key).with_suffix(suffix).unlink(missing_ok=True)


def _place(folder: Path, name: str, key: str) -> Path:
    return folder / "unfinished" / f"{name}-{key[:16]}.safetensors"


def packed(made: Sequence[Reconstruction | None], seconds: float) -> Result:
    """Reconstructions as the result of a stage."""
    tensors: Params = {}
    data: list[dict[str, Any] | None] = []
    for i, each in enumerate(made):
        if each is None:
            data.append(None)
            continue
        tensors |= {f"{i}.inputs": each.batch.inputs, f"{i}.labels": each.batch.labels}
        plain = {name: getattr(each, name) for name in ("loss", "trial", "diverged", "note")}
        data.append(plain | {"curve": _thinned(each.curve)})
    return Result(tensors, {"targets": data, "seconds": seconds})


def unpacked(result: Result) -> list[Reconstruction | None]:
    """The inverse of `packed`."""
    found: list[Reconstruction | None] = []
    for i, data in enumerate(result.data["targets"]):
        batch = None if data is None else Batch(result.tensors[f"{i}.inputs"], result.tensors[f"{i}.labels"])
        found.append(None if batch is None else Reconstruction(batch, **data))
    return found


def _thinned(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """At most so many points, the first and the last among them."""
    if len(curve) <= POINTS:
        return list(curve)
    return [curve[round(i * (len(curve) - 1) / (POINTS - 1))] for i in range(POINTS)]
