"""Faults of a round: clients that drop out, return NaN or wrong shapes, or miss the deadline.

In a simulation faults are drawn from a generator. A straggler is a client whose simulated seconds exceed the deadline.
The server checks updates (`refusal`) as a real server would: it trusts no update and never reads the drawn faults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Generator, Tensor

from secateur.errors import check_numbers
from secateur.interfaces import Params
from secateur.seeding import derive

Fault = Literal["dropped", "late", "nan", "shape", "absent", "size", "damaged", "error", "tampered"]
WORDS = {
    "dropped": "dropped out",
    "late": "missed the deadline",
    "nan": "returned NaN or infinity",
    "shape": "returned a wrong shape",
    "absent": "was not connected",
    "size": "returned an oversized update",
    "damaged": "returned a message that cannot be read",
    "error": "answered with an error",
    "tampered": "was sent a model that the attacker changed, so its update is not averaged",
}
NO_ANSWER = ("dropped", "late", "tampered")


@dataclass(frozen=True)
class Faults:
    """Probabilities of faults, and the time model of stragglers; by default there are no faults."""

    drop_out: float = 0.0  # probability that a sampled client never answers
    nan: float = 0.0  # probability that a client returns NaN
    shape: float = 0.0  # probability that a client returns a wrong shape
    deadline: float | None = None  # seconds that the server waits; None: no limit
    step_seconds: float = 1.0  # duration of a local step of the median client
    spread: float = 0.5  # standard deviation of the logarithm of the clients' speeds

    def __post_init__(self) -> None:
        timed = ("step_seconds",) if self.deadline is None else ("step_seconds", "deadline")
        check_numbers(self, "[0, 1]", "drop_out", "nan", "shape", prefix="faults.")
        check_numbers(self, "(0, inf)", *timed, prefix="faults.")
        check_numbers(self, "[0, inf)", "spread", prefix="faults.")

    @property
    def any(self) -> bool:
        """True if any fault can occur."""
        return bool(self.drop_out or self.nan or self.shape or self.deadline is not None)

    def draw(self, clients: Sequence[int], steps: Sequence[int], seed: int, rng: Generator) -> dict[int, Fault]:
        """Return the faults of a round by client, at most one each; `steps` are the clients' local steps."""
        faults: dict[int, Fault] = {}
        if not self.any:
            return faults
        draws = torch.rand(len(clients), 3, generator=rng).tolist()
        for client, local_steps, (dropped, nan, shape) in zip(clients, steps, draws, strict=True):
            if dropped < self.drop_out:
                faults[client] = "dropped"
            elif self.deadline is not None and self.seconds(client, local_steps, seed) > self.deadline:
                faults[client] = "late"
            elif nan < self.nan:
                faults[client] = "nan"
            elif shape < self.shape:
                faults[client] = "shape"
        return faults

    def seconds(self, client: int, steps: int, seed: int) -> float:
        """Return a client's duration: steps times its speed, which is log-normal and the same in every round."""
        speed = torch.randn((), generator=derive(seed, "speed", client)).mul(self.spread).exp()
        return steps * self.step_seconds * float(speed)


def apply_fault(values: Params, fault: Fault | None) -> Params:
    """Return the values as a client with this fault sends them."""
    if fault not in ("nan", "shape"):
        return values
    first, value = next(iter(values.items()))
    wrong = torch.full_like(value, torch.nan) if fault == "nan" else value.flatten()[:-1]
    return values | {first: wrong}


def refusal(values: Params, like: Mapping[str, Tensor]) -> Fault | None:
    """Return the fault of an update with wrong names, shapes or types; non-finite values are detected on the device."""
    if values.keys() != like.keys() or any(values[n].shape != v.shape for n, v in like.items()):
        return "shape"
    return None if all(values[n].dtype == v.dtype for n, v in like.items()) else "damaged"
