"""The bytes of a federation over Flower."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from secateur.federated.traffic import Traffic
from secateur.interfaces import Mask, Params


class Counted(Traffic):
    """Bytes as they are in the messages, not as they are estimated."""

    def broadcast(self, clients: Sequence[int]) -> None:
        """Counted message by message."""

    def measure_model(self, model: Params, mask: Mask, dense: bool) -> None:
        """There is nothing to estimate."""

    def measure_update(self, update: Params, params: Params, mask: Mask) -> None:
        """There is nothing to estimate."""

    def upload(self, clients: list[int], values: list[Tensor] | None) -> None:
        """Counted message by message."""
