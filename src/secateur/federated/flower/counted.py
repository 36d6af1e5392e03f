"""The bytes of a federation over Flower."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secateur.federated.traffic import Traffic


class Counted(Traffic):
    """Bytes as they are in the messages, not as they are estimated."""

    def due(self, own_masks: bool, evaluating: bool) -> bool:
        """There is nothing to estimate."""
        return False

    def broadcast(self, clients: Sequence[int]) -> None:
        """Counted message by message."""

    def upload(self, clients: list[int], values: list[Tensor] | None, own_masks: bool) -> None:
        """Counted message by message."""
