"""An update as the messages of the wire format that carry it: what a client sends, and what is counted."""

from __future__ import annotations

import torch
from torch import Tensor

from secateur.federated.turns import Update
from secateur.interfaces import Mask, Params
from secateur.lanes import nonzeros
from secateur.wire import encode, encode_mask


def messages(update: Update, mask: Mask, averaging: str, squares: bool) -> dict[str, bytes]:
    """An update as bytes; which entries were sent only where the server counts them and could not know."""
    inside = mask if mask and update.own_mask is None else None
    found = {"values": encode(update.values, inside=inside)}
    if update.buffers:
        found["buffers"] = encode(update.buffers)
    if update.own_mask is not None:
        found["mask"] = encode_mask(update.own_mask)
    if update.sent is not None and update.withheld and averaging == "coverage":
        found["sent"] = encode_mask(update.sent)
    if squares:
        found["squares"] = encode(squares_of(update))
    return found


def squares_of(update: Update) -> Params:
    """PruneFL's: of every entry of the dense gradient."""
    return {name: value.square() for name, value in update.summed.items()}


def values_of(update: Update, squares: bool, lanes: int = 1) -> Tensor:
    """(lanes,) how many bytes of its messages are values: those of the entries that are not 0; of stacked updates each.

    They stay on the device, as a GPU is not asked for them in the middle of a round.
    """
    parts = [update.values, update.buffers, *([squares_of(update)] if squares else [])]
    whole = [value for part in parts for value in part.values()]
    return torch.stack([nonzeros(v.reshape(lanes, -1)) * v.element_size() for v in whole]).sum(0)


def value_bytes(tensors: Params) -> int:
    """The bytes of the entries that are not 0."""
    counts = [torch.count_nonzero(value) * value.element_size() for value in tensors.values()]
    return int(torch.stack(counts).sum())
