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

from secateur.errors import WrongInput, check_numbers
from secateur.federated.averaging import alive_of
from secateur.interfaces import Mask, Params
from secateur.seeding import derive
from secateur.wire import decode

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


class Refused(Exception):
    """An update that is left out, with its fault."""

    def __init__(self, fault: Fault, reason: str = "") -> None:
        super().__init__(reason or WORDS[fault])
        self.fault = fault


def read_update(data: bytes, like: Params, inside: Mask | None = None) -> Params:
    """Return the tensors of a message from a client, which is not trusted; raise Refused.

    This is the one reader of updates in the wire format. The names, shapes and types of `like` bound the bytes and the
    memory before anything is allocated, and every number is finite.
    """
    shapes = {name: tuple(value.shape) for name, value in like.items()}
    try:
        values = decode(data, shapes, inside=inside, dtypes={name: value.dtype for name, value in like.items()})
    except WrongInput as error:
        raise Refused("shape" if "shape" in error.message else "damaged", error.message) from error
    check_update(values, like)
    return values


def check_update(values: Params, like: Params) -> None:
    """Raise Refused for an update with wrong names, shapes or types, or with numbers that are not finite."""
    if (fault := refusal(values, like)) is not None:
        raise Refused(fault)
    numbers = {name: value for name, value in values.items() if value.is_floating_point()}
    if numbers and not bool(alive_of(numbers)):
        raise Refused("nan")


def refusal(values: Params, like: Mapping[str, Tensor]) -> Fault | None:
    """Return the fault of an update with wrong names, shapes or types; non-finite values are detected on the device."""
    if values.keys() != like.keys() or any(values[n].shape != v.shape for n, v in like.items()):
        return "shape"
    return None if all(values[n].dtype == v.dtype for n, v in like.items()) else "damaged"
