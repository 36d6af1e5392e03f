"""What the users of a collaborative training agree on before it begins."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.nn.functional import cross_entropy

from secateur.errors import WrongInput
from secateur.federated.schedules import SCHEDULES, Schedule
from secateur.federated.sending import SendAll, aligned, makes_anew
from secateur.interfaces import Loss, Mask, Transform, Upload

Liar = Callable[[int, Mask], Mask]  # the user that broadcasts and its honest positions -> what it broadcasts


@dataclass(frozen=True, eq=False)
class Plan:
    """N users, one shared model, one batch of every user a step (dgp Algorithm 2); the defaults are the paper's."""

    users: int = 10
    upload: Upload = field(default_factory=SendAll)  # every user keeps a state of its own for it
    schedule: Schedule = SCHEDULES["paper"]
    batch_size: int = 32  # of every user
    momentum: float = 0.9  # of the server
    weight_decay: float = 1e-4  # in the authors' code only
    transform: Transform | None = None  # of every batch's inputs, such as augment.crop_and_flip
    shares: Sequence[Tensor] | None = None  # rows of the train part, a user each; None: equal shares, shuffled
    liar: Liar | None = None  # of adgp: replaces what the chosen user broadcasts
    loss: Loss = cross_entropy

    def __post_init__(self) -> None:
        for name in ("users", "batch_size"):
            if getattr(self, name) < 1:
                raise WrongInput(name, f"{getattr(self, name)} is not allowed; give a whole number from 1")
        if not 0 <= self.momentum < 1:
            raise WrongInput(
                "momentum", f"{self.momentum} is not allowed; give a number from 0 up to, not including, 1"
            )
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise WrongInput("weight_decay", f"{self.weight_decay} is not allowed; give a number from 0")
        if self.shares is not None and (len(self.shares) != self.users or min(map(len, self.shares)) == 0):
            sizes = [len(rows) for rows in self.shares]
            raise WrongInput("shares", f"of sizes {sizes} are not allowed; give {self.users} that are not empty")
        if self.liar is not None and aligned(self.upload) is None:
            raise WrongInput("liar", "needs adgp: no other upload follows what a user broadcasts")

    @property
    def stated(self) -> dict[str, Any]:
        """The plan in words and numbers, for whoever reads the result."""
        statistics = "the running ones, which stay as they are" if makes_anew(self.upload) else "the batch's own"
        kept = (
            "" if makes_anew(self.upload) else "; the server averages the users' running statistics, sent in the clear"
        )
        return {
            "users": self.users,
            "upload": str(self.upload),
            "epochs": self.schedule.epochs,
            "learning_rates": [list(each) for each in self.schedule.rates],
            "batch_size": self.batch_size,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "augmentation": named(self.transform),
            "partition": "equal shares, shuffled" if self.shares is None else "given",
            "batchnorm": f"normalises by {statistics}{kept}",
            "liar": named(self.liar),
            "loss": named(self.loss),
        }


def named(function: Callable[..., Any] | None) -> str:
    """A function by its name, a dataclass by its fields: never by an address, which differs from run to run."""
    if function is None:
        return "none"
    if hasattr(function, "__qualname__"):
        return f"{function.__module__}.{function.__qualname__}"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(function))
