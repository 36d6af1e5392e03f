"""An update as the messages of the wire format that carry it: what a client sends, and what is counted."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from secateur.federated.turns import Update
from secateur.interfaces import Mask, Params
from secateur.lanes import looked
from secateur.wire import encode, encode_mask


def messages(update: Update, mask: Mask, squares: bool) -> dict[str, bytes]:
    """An update as bytes; which entries were sent only where the server counts them and could not know."""
    inside = mask if mask and update.own_mask is None else None
    found = {"values": encode(update.values, inside=inside)}
    if update.buffers:
        found["buffers"] = encode(update.buffers)
    if update.own_mask is not None:
        found["mask"] = encode_mask(update.own_mask)
    if update.sent is not None:
        found["sent"] = encode_mask(update.sent)
    if squares:
        found["squares"] = encode(squares_of(update))
    return found


def squares_of(update: Update) -> Params:
    """PruneFL's: of every entry of the dense gradient."""
    return {name: value.square() for name, value in update.summed.items()}


class Looked(NamedTuple):
    """What can be seen of updates in passing; it stays on the device, which is not asked in the middle of a round."""

    finite: Tensor  # (lanes,) whether all their numbers are: the squares too, which are of what is not sent as well
    size: Tensor  # (lanes,) how many bytes of their messages are values: those of the entries that are not 0


def look(update: Update, squares: bool) -> Looked:
    """At stacked updates, once over all that leaves the clients."""
    parts = [(value, False) for part in (update.values, update.buffers) for value in part.values()]
    parts += [(value, True) for value in update.summed.values()] if squares else []
    return Looked(*looked(parts))


def values_of(update: Update, squares: bool) -> Tensor:
    """() the bytes of one client's."""
    parts = [update.values, update.buffers, *([squares_of(update)] if squares else [])]
    return torch.stack([torch.count_nonzero(v) * v.element_size() for part in parts for v in part.values()]).sum()


def value_bytes(tensors: Params) -> int:
    """The bytes of the entries that are not 0."""
    counts = [torch.count_nonzero(value) * value.element_size() for value in tensors.values()]
    return int(torch.stack(counts).sum())
