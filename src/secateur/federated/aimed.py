"""Targets that wait for an attack: what it sees of some clients of a round, taken down when it saw them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from secateur.catalogue import Choice
from secateur.federated.captions import is_active
from secateur.federated.observing import Seen
from secateur.interfaces import Batch, Knowledge, ServerView


class Aimed(NamedTuple):
    """Clients of a round that one attack is to be mounted on, and what is said of them."""

    attack: Choice
    round: int
    known: Knowledge  # what holds for all of them
    seen: Sequence[Seen]
    truths: Sequence[Batch]
    targets: Sequence[Sequence[ServerView]]
    labels: Sequence[dict[str, Any]]  # of each one's rows
    pooled: dict[str, Any] | None  # of the rows of all together, if they are several

    @property
    def alike(self) -> Hashable:
        """What targets of one call have in common; what knows something of its round alone stays alone."""
        alone = is_active(self.attack) or self.known.compression is not None
        return str(self.attack), self.truths[0].size, self.round if alone else None


def alike(waiting: Iterable[Aimed]) -> list[list[Aimed]]:
    """Those that one call of an attack can be mounted on, side by side."""
    groups: dict[Hashable, list[Aimed]] = {}
    for aimed in waiting:
        groups.setdefault(aimed.alike, []).append(aimed)
    return list(groups.values())
