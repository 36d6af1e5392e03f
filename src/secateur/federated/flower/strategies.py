"""Flower strategies around another strategy: one decodes updates in the wire format, one audits them.

The auditor (federated/auditor.py) attacks chosen updates as they arrive, and writes rows and a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from logging import WARNING

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from secateur.errors import WrongInput, check_whole
from secateur.federated.auditor import Auditor as Auditor
from secateur.federated.faults import Refused, check_update, read_update
from secateur.federated.flower.link import arrays_of, read_tensors, single_record, size_of, tensors_of, unpack
from secateur.federated.flower.mod import BUFFERS, apply_update
from secateur.interfaces import Batch, Params

Truth = Callable[[int, Message], Batch | None]  # (round, reply) -> the examples of an update, where they are known


class AroundStrategy(Strategy):
    """A strategy that delegates to the inner one, and keeps the model that the round's clients were sent."""

    def __init__(self, inner: Strategy) -> None:
        self.inner = inner
        self.sent: Params = {}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Keep the model, then delegate to the inner strategy."""
        self.sent = tensors_of(arrays)
        return self.inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Delegate to the inner strategy."""
        return self.inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate to the inner strategy."""
        return self.inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Delegate to the inner strategy."""
        return self.inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Delegate to the inner strategy."""
        self.inner.summary()


class DecodingStrategy(AroundStrategy):
    """A strategy that decodes the updates of `upload_mod(..., wire=True)`; unreadable replies are left out and logged.

    `bytes_up` counts the bytes of all updates so far, and `dense_bytes` the bytes of the same updates as arrays.
    """

    def __init__(self, inner: Strategy, buffers: tuple[str, ...] = BUFFERS) -> None:
        super().__init__(inner)
        self.buffers = buffers
        self.bytes_up = self.dense_bytes = 0

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Decode the replies, then delegate to the inner strategy."""
        read = [reply for reply in map(self._decode, replies) if reply is not None]
        return self.inner.aggregate_train(server_round, _select_alike(read))

    def _decode(self, reply: Message) -> Message | None:
        if reply.has_error():
            return reply
        try:
            name, record = single_record(reply.content, "a client's reply")
            self.bytes_up += size_of(record)
            sent = read_update(unpack(record).get("update", b""), self.sent)
            _check_metrics(reply, getattr(self.inner, "weighted_by_key", "num-examples"))
            arrays = arrays_of(apply_update(self.sent, sent, self.sent, self.buffers))
        except (WrongInput, Refused) as error:
            log(WARNING, "ignoring the update of node %s (%s)", reply.metadata.src_node_id, error)
            return None
        self.dense_bytes += size_of(arrays)
        reply.content[name] = arrays
        return reply


def _check_metrics(reply: Message, weight: str) -> None:
    """Refuse metrics that would end or poison the round: not finite, or a weight that is no positive number."""
    records = list(reply.content.metric_records.values())
    if len(records) != 1:
        raise WrongInput("message", f"it has {len(records)} records of metrics; exactly one is allowed")
    for name, value in records[0].items():
        if not all(math.isfinite(number) for number in (value if isinstance(value, list) else [value])):
            raise WrongInput("message", f"its metric {name!r} is not finite")
    examples = records[0].get(weight)
    if not isinstance(examples, int | float) or examples <= 0:
        raise WrongInput("message", f"its {weight} is {examples}; must be a positive number")


def _select_alike(replies: Sequence[Message]) -> list[Message]:
    """Return errors, and the replies of the most frequent form; Flower's strategies end a round of several forms."""
    forms = [None if reply.has_error() else _describe_form(reply) for reply in replies]
    usual = max((form for form in forms if form is not None), key=forms.count, default=None)
    for reply, form in zip(replies, forms, strict=True):
        if form not in (None, usual):
            log(WARNING, "ignoring the update of node %s (its metrics are not the others')", reply.metadata.src_node_id)
    return [reply for reply, form in zip(replies, forms, strict=True) if form in (None, usual)]


def _describe_form(reply: Message) -> tuple[frozenset[str], frozenset[tuple[str, str, int]]]:
    """Return the names of a reply's arrays, and record, name and length of its metrics (-1: a number)."""
    records = reply.content.metric_records.items()
    metrics = [(r, n, len(v) if isinstance(v, list) else -1) for r, record in records for n, v in record.items()]
    return frozenset(reply.content.array_records), frozenset(metrics)


class AuditedStrategy(AroundStrategy):
    """A strategy that attacks the first `updates` updates to arrive, in every `every`-th round.

    Put it inside `DecodingStrategy` where clients send the wire format. `truth` is for scoring a defense before its
    use, on examples that the server may know.
    """

    def __init__(
        self, inner: Strategy, auditor: Auditor, *, every: int = 1, updates: int = 1, truth: Truth | None = None
    ) -> None:
        super().__init__(inner)
        check_whole("every", every)
        check_whole("updates", updates)
        self.auditor, self.every, self.updates, self.truth = auditor, every, updates, truth

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Attack the chosen updates, then delegate to the inner strategy."""
        arrived = list(replies)
        if server_round % self.every == 0:
            for reply in [answer for answer in arrived if not answer.has_error()][: self.updates]:
                try:
                    weights = read_tensors(single_record(reply.content, "a client's reply")[1], self.sent)
                    check_update(weights, self.sent)
                except (WrongInput, Refused) as error:
                    log(WARNING, "not attacking the update of node %s (%s)", reply.metadata.src_node_id, error)
                    continue
                truth = None if self.truth is None else self.truth(server_round, reply)
                self.auditor(server_round, reply.metadata.src_node_id, self.sent, weights, truth)
        return self.inner.aggregate_train(server_round, arrived)
