"""What whoever runs a federation needs of it, whichever loop it is: its rounds, its state, what it depends on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from secateur.interfaces import Params


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
