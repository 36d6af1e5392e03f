"""Bytes of a message in the wire format: of a whole model by its width, of an update by its values."""

from __future__ import annotations

from secateur import tree
from secateur.federated.messages import value_bytes
from secateur.interfaces import Params
from secateur.wire import encode


class Sizes:
    """Encodes one message of each kind; what tells where an update's values are is taken to cost what it did then."""

    def __init__(self) -> None:
        self.known: dict[str, int] = {}

    def model(self, rate: float, params: Params) -> int:
        """Of a model that keeps this share of the channels."""
        return self._once(f"model {rate}", params, 0)

    def update(self, rate: float, message: Params) -> int:
        """Of an update that is 0 where nothing is sent."""
        values = value_bytes(message)
        return values + self._once(f"positions {rate}", message, values)

    def _once(self, key: str, message: Params, less: int) -> int:
        if key not in self.known:
            self.known[key] = len(encode(tree.to(message, "cpu"))) - less
        return self.known[key]
