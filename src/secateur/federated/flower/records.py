"""Tensors in Flower's records: as arrays that any app reads, and as bytes of our wire format."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from flwr.app import Array, ArrayRecord, RecordDict
from torch import Tensor

from secateur.errors import WrongInput
from secateur.interfaces import Params

WIRE = "secateur"  # the name of an array whose bytes are a message of wire/, and its serialisation type


def tensors_of(record: ArrayRecord) -> Params:
    """The arrays of a record by name."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as arrays that any Flower app reads."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def packed(**messages: bytes) -> ArrayRecord:
    """Bytes of the wire format, each under its name; Flower cuts an array into pieces, and nothing else."""
    return ArrayRecord({name: Array("uint8", (len(data),), WIRE, data) for name, data in messages.items()})


def unpacked(record: ArrayRecord) -> dict[str, bytes]:
    """The bytes in a record that `packed` made."""
    if wrong := [name for name, array in record.items() if array.stype != WIRE]:
        raise WrongInput("message", f"{wrong[0]} is not in the wire format of secateur")
    return {name: array.data for name, array in record.items()}


def size_of(record: ArrayRecord) -> int:
    """Bytes of the arrays of a record."""
    return sum(len(array.data) for array in record.values())


def only(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    """The one record of arrays in a message, and its name."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise WrongInput(what, f"holds {len(found)} records of arrays; exactly one is allowed")
    return found[0]


def kept(state: RecordDict, name: str) -> Params | None:
    """What a client kept at home under a name; None where it has nothing yet."""
    return tensors_of(state.array_records[name]) if name in state.array_records else None


def keep(state: RecordDict, name: str, tensors: Params) -> None:
    """Keep tensors at home, in the client's context, until its next turn."""
    state.array_records[name] = arrays_of(tensors)
