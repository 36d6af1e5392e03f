"""A strategy of Flower's around another one, and the one that reads updates in the wire format."""

from __future__ import annotations

from collections.abc import Iterable
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from secateur.errors import WrongInput
from secateur.federated.flower.mod import BUFFERS, applied
from secateur.federated.flower.records import arrays_of, only, size_of, tensors_of, unpacked
from secateur.interfaces import Params
from secateur.wire import decode


class AroundStrategy(Strategy):
    """Does what the strategy inside does, and remembers the model that a round's clients were sent."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.sent: Params = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside."""
        self.sent = tensors_of(arrays)
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """As the strategy inside."""
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """As the strategy inside."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """As the strategy inside."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """As the strategy inside."""
        self.inner.summary()


class DecodingStrategy(AroundStrategy):
    """Makes arrays of what `upload_mod(..., wire=True)` sends; a reply that cannot be read is left out and named.

    `bytes_up` are the bytes of all updates so far, and `dense_bytes` what they would have been as arrays.
    """

    def __init__(self, inner: Strategy, buffers: tuple[str, ...] = BUFFERS) -> None:
        super().__init__(inner)
        self.buffers = buffers
        self.bytes_up = self.dense_bytes = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode, then as the strategy inside."""
        read = [self._decoded(reply) for reply in replies]
        return self.inner.aggregate_train(server_round, [reply for reply in read if reply is not None])

    def _decoded(self, reply: Message) -> Message | None:
        if reply.has_error():
            return reply
        try:
            name, record = only(reply.content, "a client's reply")
            self.bytes_up += size_of(record)
            shapes = {name: tuple(value.shape) for name, value in self.sent.items()}
            sent = decode(unpacked(record).get("update", b""), shapes)
            arrays = arrays_of(applied(self.sent, sent, self.sent, self.buffers))
        except WrongInput as error:
            log(WARNING, "the update of node %s is left out: %s", reply.metadata.src_node_id, error)
            return None
        self.dense_bytes += size_of(arrays)
        reply.content[name] = arrays
        return reply
