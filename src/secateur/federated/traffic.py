"""Bytes up and down, per round and client, in the wire format.

Encoding every message would take longer than training. So one message of each kind is encoded in the first round and
again in evaluation rounds where something changed; of any other the bytes of its values are counted from its own
entries, and its table and positions are taken to cost what they did then. A mask travels as bits, to every client once
after each change; where both sides know a mask, positions are sent inside it only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.interfaces import Mask, Params
from secateur.wire import encode, encode_mask


class Traffic:
    """Counts what goes over the wire."""

    def __init__(self, clients: int, squares: bool) -> None:
        self.up, self.down = [0] * clients, [0] * clients  # bytes since the beginning
        self.known = [-1] * clients  # the version of the mask that a client has
        self.version = 0  # of the mask
        self.squares = squares  # whether dense squared gradients go up too
        self.model_bytes = self.mask_bytes = self.positions = self.squares_bytes = 0
        self.values = 0  # bytes of the values of an update that withholds nothing
        self.fresh = False  # whether the sizes are of the mask as it is
        self._unread: list[tuple[list[int], list[Tensor] | None]] = []

    def changed(self) -> None:
        """The mask is another one."""
        self.version += 1
        self.fresh = False

    def broadcast(self, clients: Sequence[int]) -> None:
        """The model went to these clients, with the mask where they have an older one."""
        for client in clients:
            outdated = self.known[client] != self.version
            self.down[client] += self.model_bytes + (self.mask_bytes if outdated else 0)
            self.known[client] = self.version

    def measure_model(self, model: Params, mask: Mask, dense: bool) -> None:
        """Encode the model that is broadcast, and the mask."""
        self.mask_bytes = len(encode_mask(mask)) if mask else 0
        self.model_bytes = len(encode(model, inside=None if dense or not mask else mask))

    def measure_update(self, update: Params, params: Params, mask: Mask) -> None:
        """Encode one update; inside the mask where it stays there."""
        self.read()  # what came before was of the sizes that held then
        whole = len(encode(update, inside=mask or None))
        self.values = _value_bytes(update)
        self.positions = whole - self.values
        dense = {name: torch.ones_like(value) for name, value in params.items()}
        self.squares_bytes = len(encode(dense)) if self.squares else 0
        self.fresh = True

    def upload(self, clients: list[int], values: list[Tensor] | None) -> None:
        """Updates of these clients came in; `values` () each are their values' bytes, None: all like the measured."""
        self._unread.append((clients, values))

    def read(self) -> None:
        """Take over what the device counted since it was asked last."""
        counted = [value for _, values in self._unread if values is not None for value in values]
        numbers = iter(torch.stack(counted).tolist() if counted else [])
        for clients, values in self._unread:
            for client in clients:
                own = self.values if values is None else next(numbers)
                self.up[client] += self.positions + own + self.squares_bytes
        self._unread.clear()

    def state(self) -> dict[str, Any]:
        """All numbers, for a checkpoint."""
        self.read()
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        vars(self).update(state)


def value_bytes(update: Params) -> Tensor:
    """() the bytes of an update's entries that are not 0, on its device."""
    counts = [torch.count_nonzero(value) * value.element_size() for value in update.values()]
    return torch.stack(counts).sum()


def _value_bytes(update: Params) -> int:
    return int(value_bytes(update))
