"""Flower strategies around another strategy: one decodes updates in the wire format, one audits them.

The auditor (federated/auditor.py) attacks chosen updates as they arrive, and writes rows and a page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from logging import WARNING
from typing import NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from secateur.errors import WrongInput, check_whole
from secateur.federated.auditor import Auditor as Auditor
from secateur.federated.faults import Refused, check_update, read_update
from secateur.federated.flower.link import (
    WIRE,
    arrays_of,
    mask_in,
    read_tensors,
    single_record,
    size_of,
    tensors_of,
    unpack,
)
from secateur.federated.flower.mod import BUFFERS, apply_update
from secateur.federated.flower.statement import read_statement
from secateur.interfaces import Batch, Mask, Params

Truth = Callable[[int, Message], Batch | None]  # (round, reply) -> the examples of an update, where they are known


class Question(NamedTuple):
    """The model that a node was sent in this round, and the mask with it; empty if there is none."""

    sent: Params
    mask: Mask


class AroundStrategy(Strategy):
    """A strategy that delegates to the inner one, and keeps the models that the round's clients were sent."""

    def __init__(self, inner: Strategy, buffers: tuple[str, ...] = BUFFERS) -> None:
        self.inner, self.buffers = inner, buffers
        self.asked: dict[int, Question] = {}  # by node

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Delegate to the inner strategy, and keep the models that it sends."""
        return self._remember(self.inner.configure_train(server_round, arrays, config, grid))

    def _remember(self, messages: Iterable[Message]) -> list[Message]:
        """Keep the models in messages; messages of one content share theirs."""
        messages, known = list(messages), dict[int, Question]()
        for content in (message.content for message in messages):
            if id(content) not in known:
                sent = tensors_of(single_record(content, "the message to a client")[1])
                known[id(content)] = Question(sent, mask_in(content, sent))
        self.asked = {message.metadata.dst_node_id: known[id(message.content)] for message in messages}
        return messages

    def read_reply(self, reply: Message) -> tuple[str, Params]:
        """Return the weights of a reply, as arrays or in the wire format, and their record's name; trust nothing."""
        question = self.asked.get(reply.metadata.src_node_id)
        if question is None:
            raise WrongInput("message", "it comes from a node that was not asked in this round")
        (name, record), sent = single_record(reply.content, "a client's reply"), question.sent
        if any(array.stype == WIRE for array in record.values()):
            update = read_update(unpack(record).get("update", b""), sent, question.mask or None)
            return name, apply_update(sent, update, sent, self.buffers)
        weights = read_tensors(record, sent)
        check_update(weights, sent)
        return name, weights

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

    Replies of arrays are checked and passed on. `bytes_up` counts the bytes of all updates so far, and `dense_bytes`
    the bytes of the same updates as arrays.
    """

    def __init__(self, inner: Strategy, buffers: tuple[str, ...] = BUFFERS) -> None:
        super().__init__(inner, buffers)
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
            self.bytes_up += sum(map(size_of, reply.content.array_records.values()))
            name, weights = self.read_reply(reply)
            check_metrics(reply, self.inner)
            arrays = arrays_of(weights)
        except (WrongInput, Refused) as error:
            log(WARNING, "ignoring the update of node %s (%s)", reply.metadata.src_node_id, error)
            return None
        self.dense_bytes += size_of(arrays)
        reply.content[name] = arrays
        return reply


def check_metrics(reply: Message, strategy: Strategy) -> None:
    """Refuse metrics that would end or poison the round: not finite, or a weight that is no positive number."""
    weight = getattr(strategy, "weighted_by_key", "num-examples")
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
                node = reply.metadata.src_node_id
                try:
                    _, weights = self.read_reply(reply)
                except (WrongInput, Refused) as error:
                    log(WARNING, "not attacking the update of node %s (%s)", node, error)
                    continue
                truth = None if self.truth is None else self.truth(server_round, reply)
                self.auditor(server_round, node, self.asked[node].sent, weights, truth, stated=_read_cosine(reply))
        return self.inner.aggregate_train(server_round, arrived)


def _read_cosine(reply: Message) -> float | None:
    """Return the cosine that a client states, if there is a statement and its signature holds."""
    try:
        return read_statement(reply.content)[0].cosine
    except WrongInput:
        return None
