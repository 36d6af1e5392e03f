"""Pieces over Ray workers: as many at once as there is room for, and started again where a worker dies."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from secateur.cluster import connected
from secateur.errors import WrongInput
from secateur.sweep.pieces import Piece
from secateur.sweep.working import Home, Outcome, conduct

STARTS = 4  # of a piece whose worker dies again and again
GROWTH = 10.0  # seconds until it is asked again whether a cluster has more room


class Watch(Protocol):
    """Is told how the pieces fare."""

    def began(self, piece: Piece) -> None:
        """A piece was given to a worker."""

    def died(self, piece: Piece, starts: int, reason: str) -> None:
        """Its worker died after so many starts of the piece; it waits for the next."""

    def ended(self, piece: Piece, outcome: Outcome) -> None:
        """A piece is done, or has failed for good."""


def spread(pieces: Sequence[Piece], home: Home, watch: Watch, address: str | None, workers: int | None) -> None:
    """Run the pieces in their order on a cluster, or on this machine, at most `workers` at once."""
    most = None if workers is None else math.ceil(workers * max(piece.cpus for piece in pieces))
    with connected(address, most) as ray:
        if not (address or os.environ.get("RAY_ADDRESS")):
            _check_room(pieces, ray.cluster_resources())
        job: Any = ray.remote(max_retries=0)(conduct)  # we count the starts ourselves, to tell of them
        waiting, running, starts = deque(pieces), dict[Any, Piece](), Counter[str]()
        while waiting or running:
            while waiting and _fits(waiting[0], running.values(), ray.cluster_resources(), workers):
                piece = waiting.popleft()
                starts[piece.name] += 1
                running[job.options(num_cpus=piece.cpus, num_gpus=piece.gpus).remote(piece, home)] = piece
                watch.began(piece)
            for ended in ray.wait(list(running), timeout=GROWTH)[0]:
                piece = running.pop(ended)
                try:
                    outcome = ray.get(ended)
                except ray.exceptions.RayTaskError as error:
                    outcome = Outcome("?", 0.0, f"{type(error.cause).__name__}: {error.cause}", str(error))
                except ray.exceptions.RayError as error:  # the worker or its machine died, or its answer was lost
                    reason = " ".join(str(error).split())
                    if starts[piece.name] < STARTS:
                        waiting.append(piece)  # last, as what killed it (too little memory) may have passed by then
                        watch.died(piece, starts[piece.name], reason)
                        continue
                    outcome = Outcome("?", 0.0, f"its worker died {STARTS} times", reason)
                watch.ended(piece, outcome)


def _fits(piece: Piece, running: Collection[Piece], there: Mapping[str, float], workers: int | None) -> bool:
    """Whether a piece can begin now; one alone always can, as a cluster may grow when it is asked."""
    if not running:
        return True
    if workers is not None and len(running) >= workers:
        return False
    return (
        sum(each.cpus for each in running) + piece.cpus <= there.get("CPU", 0)
        and sum(each.gpus for each in running) + piece.gpus <= there.get("GPU", 0) + 1e-9
    )


def _check_room(pieces: Sequence[Piece], there: Mapping[str, float]) -> None:
    """Refuse a piece that this machine never has room for."""
    for piece in pieces:
        for field, name in (("cpus", "CPU"), ("gpus", "GPU")):
            asked, found = getattr(piece, field), there.get(name, 0)
            if asked > found:
                raise WrongInput(field, f"{asked:g} for {piece.name} is more than this machine's {found:g}")
