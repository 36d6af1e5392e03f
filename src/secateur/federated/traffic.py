"""Bytes up and down, per round and client, in the wire format.

Encoding every message would take longer than training. So one update of each kind (under the server's mask, or under a
mask of the client's own) is encoded when the first one comes, and again in evaluation rounds where something changed;
of any other the bytes of its values are counted from its own entries, and its tables and positions are taken to cost
what they did then. A mask travels as bits, to every client once after each change; where both sides know a mask,
positions are sent inside it only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from secateur.federated.messages import messages, values_of
from secateur.federated.turns import Update
from secateur.interfaces import Mask, Params
from secateur.wire import encode, encode_mask


class Traffic:
    """Counts what goes over the wire."""

    def __init__(self, clients: int, squares: bool) -> None:
        self.up, self.down = [0] * clients, [0] * clients  # bytes since the beginning
        self.known = [-1] * clients  # the version of the mask that a client has
        self.version = 0  # of the mask
        self.squares = squares  # whether squared gradients go up too
        self.model_bytes = self.mask_bytes = 0
        self.sizes: dict[str, tuple[int, int]] = {}  # of an update of each kind: all but its values, and its values
        self.measured: list[str] = []  # kinds whose sizes are of the mask as it is
        self._unread: list[tuple[str, list[int], list[Tensor] | None]] = []

    def changed(self) -> None:
        """The mask is another one."""
        self.version += 1
        self.measured = []

    def due(self, own_masks: bool, evaluating: bool) -> bool:
        """Whether a round's messages are to be measured."""
        kind = _kind(own_masks)
        return kind not in self.sizes or (evaluating and kind not in self.measured)

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

    def measure_update(self, update: Update, mask: Mask) -> None:
        """Encode one update, as its client does."""
        self.read()  # what came before was of the sizes that held then
        kind, values = _kind(update.own_mask is not None), int(values_of(update, self.squares))
        whole = sum(map(len, messages(update, mask, self.squares).values()))
        self.sizes[kind] = whole - values, values
        self.measured = [*self.measured, kind]

    def upload(self, clients: list[int], values: list[Tensor] | None, own_masks: bool) -> None:
        """Updates of these clients came in; `values` () each are their values' bytes, None: all like the measured."""
        self._unread.append((_kind(own_masks), clients, values))

    def read(self) -> None:
        """Take over what the device counted since it was asked last."""
        counted = [value for _, _, values in self._unread if values is not None for value in values]
        numbers = iter(torch.stack(counted).tolist() if counted else [])
        for kind, clients, values in self._unread:
            for client in clients:
                rest, usual = self.sizes[kind]
                self.up[client] += rest + (usual if values is None else next(numbers))
        self._unread.clear()

    def state(self) -> dict[str, Any]:
        """All numbers, for a checkpoint."""
        self.read()
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        vars(self).update(state)


def _kind(own_masks: bool) -> str:
    return "own masks" if own_masks else "the server's mask"
