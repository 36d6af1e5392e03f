"""The plan of a collaborative training, its learning-rate schedules, and the inputs and results of one step.

Learning rates depend on the epoch: the paper's, those of its authors' code, or any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.functional import cross_entropy

from secateur.defenses.uploads import SendAll, find_aligned, makes_anew
from secateur.errors import WrongInput, check_number, check_wholes, unknown
from secateur.federated.spec import name_function
from secateur.interfaces import Batch, Loss, Mask, Params, Transform, Upload

Liar = Callable[[int, Mask], Mask]  # (user that broadcasts, its honest positions) -> positions that it broadcasts


@dataclass(frozen=True)
class Schedule:
    """A number of epochs and their learning rates; epochs count from 1."""

    epochs: int
    rates: tuple[tuple[int, float], ...]  # (from this epoch on, learning rate), the first from epoch 1

    def __post_init__(self) -> None:
        check_wholes(self, "epochs")
        starts = [start for start, _ in self.rates]
        if not starts or starts[0] != 1 or any(b <= a for a, b in pairwise(starts)):
            begins = ", ".join(map(str, starts)) or "nothing"
            raise WrongInput("schedule", f"its rates begin at {begins}; must be rising epochs, the first of them 1")
        for _, rate in self.rates:
            check_number("schedule", rate, "(0, inf)")

    def rate(self, epoch: int) -> float:
        """Return the learning rate of an epoch.

        Example:
            >>> [SCHEDULES["code"].rate(epoch) for epoch in (1, 50, 51, 70, 71, 150)]
            [0.1, 0.1, 0.01, 0.01, 0.005, 0.005]
        """
        return [rate for start, rate in self.rates if start <= epoch][-1]


SCHEDULES = {
    "paper": Schedule(100, ((1, 0.01), (71, 0.005))),  # dgp Appendix: .01 up to epoch 70, .005 after it
    "paper-lenet": Schedule(100, ((1, 0.1), (51, 0.01), (71, 0.005))),
    "code": Schedule(150, ((1, 0.1), (51, 0.01), (71, 0.005))),
}


@dataclass(frozen=True, eq=False)
class Plan:
    """A training of N users with one shared model and one batch of every user a step (dgp Algorithm 2).

    The defaults are the paper's.
    """

    users: int = 10
    upload: Upload = field(default_factory=SendAll)  # every user keeps a separate state for it
    schedule: Schedule = SCHEDULES["paper"]
    batch_size: int = 32  # of every user
    momentum: float = 0.9  # of the server
    weight_decay: float = 1e-4  # in the authors' code only
    transform: Transform | None = None  # of every batch's inputs, such as augment.crop_and_flip
    shares: Sequence[Tensor] | None = None  # rows of the train part for each user; None: equal shares, shuffled
    liar: Liar | None = None  # of adgp: replaces the chosen user's broadcast
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        check_wholes(self, "users", "batch_size")
        check_number("momentum", self.momentum, "[0, 1)")
        check_number("weight_decay", self.weight_decay, "[0, inf)")
        if self.shares is not None and (len(self.shares) != self.users or min(map(len, self.shares)) == 0):
            sizes = [len(rows) for rows in self.shares]
            raise WrongInput("shares", f"of sizes {sizes} are not allowed; must be {self.users}, none of them empty")
        if self.liar is not None and find_aligned(self.upload) is None:
            raise WrongInput("liar", "needs adgp: in no other upload do users follow a broadcast")

    @property
    def description(self) -> dict[str, Any]:
        """The plan in words and numbers, for readers of the result."""
        statistics = "the running ones, which stay as they are" if makes_anew(self.upload) else "the batch's own"
        kept = (
            "" if makes_anew(self.upload) else "; the server averages the users' running statistics, sent in the clear"
        )
        return {
            "users": self.users,
            "upload": str(self.upload),
            "epochs": self.schedule.epochs,
            "learning_rates": [list(change) for change in self.schedule.rates],
            "batch_size": self.batch_size,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "augmentation": name_function(self.transform),
            "partition": "equal shares, shuffled" if self.shares is None else "given",
            "batchnorm": f"normalises by {statistics}{kept}",
            "liar": name_function(self.liar),
            "loss": name_function(self.loss),
        }


class UserInputs(NamedTuple):
    """One user's examples of a step, and the random draws inside its network."""

    batch: Batch
    dropout: tuple[Tensor, ...]


class StepInputs(NamedTuple):
    """All inputs of a step; on a GPU copied into the memory that a graph reads."""

    users: list[UserInputs]
    rate: Tensor  # () the learning rate
    chosen: Tensor  # (1,) the user that broadcasts


class StepGradients(NamedTuple):
    """The results of the backwards of a step."""

    losses: list[Tensor]  # () of each user
    grads: list[Params]  # of each user
    buffers: list[Tensor]  # of all users, in the groups of Statistics


class StepMessages(NamedTuple):
    """The messages of one round."""

    sent: list[Params]  # of each user
    inside: Mask | None  # adgp's broadcast
    average: Params  # of the sent gradients; the server's step overwrites it


def schedule_of(schedule: str | Schedule | Sequence[float]) -> Schedule:
    """Return a schedule by its name, as it is, or from a list with one learning rate an epoch.

    Example:
        >>> schedule_of([0.1, 0.1, 0.05])
        Schedule(epochs=3, rates=((1, 0.1), (3, 0.05)))
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise unknown("schedule", schedule, SCHEDULES)
        return SCHEDULES[schedule]
    changes = [(i, rate) for i, rate in enumerate(schedule, start=1) if i == 1 or rate != schedule[i - 2]]
    return Schedule(len(schedule), tuple(changes))
