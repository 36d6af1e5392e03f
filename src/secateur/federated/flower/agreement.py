"""A Flower strategy that holds the clients' updates against an agreement on their defense."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from logging import WARNING
from pathlib import Path
from typing import Literal

from flwr.app import ArrayRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp.strategy import Strategy

from secateur.defenses.effect import find_contradiction
from secateur.defenses.uploads import SendAll
from secateur.errors import WrongInput, printable, unknown
from secateur.federated.faults import Refused
from secateur.federated.flower.mod import BUFFERS, read_upload, split_update
from secateur.federated.flower.statement import Statement, digest_of, load_public, read_statement
from secateur.federated.flower.strategies import AroundStrategy
from secateur.interfaces import Upload

LONGEST = 300  # characters of a client's reason


@dataclass(frozen=True)
class Breach:
    """A reply without an update that was defended as agreed."""

    round: int
    node: int
    reason: str


class AgreedStrategy(AroundStrategy):
    """A strategy that holds updates against an agreement on the defense, by the signed statements of `upload_mod`.

    A breach is a statement that is missing, forged, replayed or of another defense, or an update that contradicts it.
    Put this strategy outermost. `statements` and `breaches` list what came in, and `refusals` the reasons of clients
    that sent nothing. The metrics of a round have the number of breaches, and of updates whose defense changed nothing.

    Args:
        inner: the strategy that averages.
        agreed: the defense, also as text such as dgp:k1=0.05.
        keys: files of the clients' public keys. None: a node's key is the one of its first round.
        on_breach: refuse leaves such an update out, flag only reports it.
        buffers: as for `upload_mod`.
    """

    def __init__(
        self,
        inner: Strategy,
        agreed: Upload | str,
        *,
        keys: Iterable[Path | str] | None = None,
        on_breach: Literal["refuse", "flag"] = "refuse",
        buffers: tuple[str, ...] = BUFFERS,
    ) -> None:
        super().__init__(inner, buffers)
        if on_breach not in ("refuse", "flag"):
            raise unknown("on_breach", on_breach, ("refuse", "flag"))
        self.agreed, self.on_breach = read_upload(agreed), on_breach
        self.keys = None if keys is None else set(map(load_public, keys))
        self.breaches: list[Breach] = []
        self.refusals: list[Breach] = []
        self.statements: list[Statement] = []
        self._pinned: dict[int, bytes] = {}  # by node: the key of its first statement
        self._digests: set[tuple[int, str]] = set()  # node and digest of all updates

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check every statement and its update, then delegate to the inner strategy."""
        kept, before, idle = [], len(self.breaches), 0
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                self.refusals.append(Breach(server_round, node, printable(reply.error.reason)[:LONGEST]))
                kept.append(reply)
                continue
            try:
                idle += self._check(server_round, reply).idle
                kept.append(reply)
            except (WrongInput, Refused) as error:
                self.breaches.append(Breach(server_round, node, str(error)))
                log(WARNING, "%s: the update of node %s breaks the agreement (%s)", self.on_breach, node, error)
                kept += [reply] if self.on_breach == "flag" else []
        if idle and not isinstance(self.agreed, SendAll):
            log(WARNING, "%s changed nothing in %s updates of round %s", self.agreed, idle, server_round)
        arrays, metrics = self.inner.aggregate_train(server_round, kept)
        if metrics is not None:
            metrics["secateur-breaches"], metrics["secateur-idle"] = len(self.breaches) - before, idle
        return arrays, metrics

    def _check(self, number: int, reply: Message) -> Statement:
        """Return the statement of a reply that keeps the agreement; raise the reason why it does not."""
        (statement, key), asked = read_statement(reply.content), reply.metadata
        node = asked.src_node_id
        if self.keys is not None and key not in self.keys:
            raise WrongInput("statement", "is signed by an unknown key; list the node's public key in keys")
        if self._pinned.setdefault(node, key) != key:
            raise WrongInput("statement", "is signed by another key than in the node's first round")
        expected = {"defense": str(self.agreed), "round": number, "run": asked.run_id, "node": node}
        expected |= {"message": asked.reply_to_message_id, "digest": digest_of(reply.content)}
        for field, value in expected.items():
            if (stated := getattr(statement, field)) != value:
                raise WrongInput("statement", f"its {field} is {stated!r}, and must be {value!r}")
        if (node, statement.digest) in self._digests:
            raise WrongInput("update", "is that of an earlier round; the node replayed it")
        self._digests.add((node, statement.digest))
        _, weights = self.read_reply(reply)
        question = self.asked[node]
        update, _ = split_update(question.sent, weights, self.buffers)
        if (reason := find_contradiction(self.agreed, update, question.mask)) is not None:
            raise WrongInput("update", f"contradicts its statement: {reason}")
        self.statements.append(statement)
        return statement
