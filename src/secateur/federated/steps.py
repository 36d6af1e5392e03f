"""What goes into a step of collaborative SGD, what its backwards find, and what goes over the wire."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor

from secateur.interfaces import Batch, Mask, Params


class Given(NamedTuple):
    """One user's examples of a step, and the chance inside its network."""

    batch: Batch
    dropout: tuple[Tensor, ...]

    def clone(self) -> Self:
        """The same in memory of its own."""
        batch = Batch(self.batch.inputs.clone(), self.batch.labels.clone())
        return type(self)(batch, tuple(value.clone() for value in self.dropout))


class Round(NamedTuple):
    """All that a step is given from outside; on a GPU copied to where a graph reads it."""

    given: list[Given]
    rate: Tensor  # () the learning rate
    chosen: Tensor  # (1,) the user that broadcasts

    def tensors(self) -> list[Tensor]:
        """In a fixed order."""
        users = [tensor for user in self.given for tensor in (*user.batch, *user.dropout)]
        return [*users, self.rate, self.chosen]

    def clone(self) -> Self:
        """The same in memory of its own."""
        return type(self)([user.clone() for user in self.given], self.rate.clone(), self.chosen.clone())


class Found(NamedTuple):
    """What the backwards give."""

    losses: list[Tensor]  # a user each, ()
    grads: list[Params]  # a user each
    buffers: list[Tensor]  # of all users, as Statistics keeps them


class Exchanged(NamedTuple):
    """What went over the wire in one round."""

    sent: list[Params]  # a user each
    inside: Mask | None  # adgp's broadcast
    average: Params  # of what was sent; the step of the server is taken in its memory
