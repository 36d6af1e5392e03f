"""Flower strategies around another strategy: one decodes updates in the wire format, one audits them.

The auditor works at the server of any Flower app. It attacks chosen updates as they arrive, and writes rows and a page.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from logging import WARNING
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from secateur.attacks.inversion.updates import weights_update
from secateur.catalogue import Choice, methods, name_of
from secateur.config import inversion
from secateur.config.methods import defense as read_defense
from secateur.defenses.dp_common import Guarantee
from secateur.defenses.error_feedback import upload_of
from secateur.errors import WrongInput, check_whole
from secateur.evaluation import gallery
from secateur.evaluation.calibration import is_open, list_weights
from secateur.evaluation.client import caution
from secateur.evaluation.membership import flat_labels
from secateur.evaluation.reconstruction import (
    COSINE,
    Scoring,
    attack_labels,
    judge,
    summary_rows,
    target_rows,
    with_extras,
)
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
from secateur.federated.flower.statement import IDLE, cosine, find_contradiction, read_statement
from secateur.interfaces import Batch, InversionAttack, Knowledge, Mask, Params, ServerView, Weights
from secateur.metrics.lpips import load_weights
from secateur.progress import progress
from secateur.report import page_afterwards
from secateur.runs.folder import open_run
from secateur.runs.rows import Row, join_notes
from secateur.runs.unfinished import NullWatcher
from secateur.seeding import derive
from secateur.training.optimisers import read_steps

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


class Auditor:
    """An attacker with a server's knowledge, which keeps the page in `out` up to date.

    `knowledge` must have the local steps and the learning rate of the clients. Where the examples of an update are
    known, reconstructions are scored against them; else the page shows the reconstructions unscored. An attack such as
    ig runs with several weights of total variation, each under its own name, unless its `tv` is set. The page says if
    the defense changed nothing: by the known examples, or by the client's statement. It says if an update is visibly
    not the defense's.
    """

    def __init__(
        self,
        knowledge: Knowledge,
        attacks: str | Sequence[str],
        out: Path | str,
        *,
        defense: str = "none",
        name: str = "model",
        images: bool = True,
        seed: int = 0,
        **over: Any,
    ) -> None:
        if knowledge.learning_rate is None:
            raise WrongInput("knowledge", "must have the clients' learning_rate and local_steps: they send weights")
        chosen = [inversion(name, **over) for name in ([attacks] if isinstance(attacks, str) else attacks)]
        self.attacks = [x for attack in chosen for x in (list_weights(attack) if is_open(attack) else [attack])]
        self.knowledge, self.images, self.out = knowledge, images, Path(out)
        extra = {"labels": "inferred", "update": f"weights after {knowledge.local_steps} local steps"}
        self.labels: dict[str, Any] = {"model": name, "dataset": "given", "seed": seed, "defense": defense}
        self.labels |= {"extra": extra}
        self.rows: list[Row] = []
        self.figures: list[dict[str, Any]] = []
        self.targets = 0  # attacked updates
        self.scoring = Scoring(load_weights())
        known = all(name_of(part) in methods("defense") for part in defense.split("+"))  # or a name of the user's own
        self.caution = caution(read_defense(defense), self.attacks) if known else None
        self.upload = upload_of(read_defense(defense)) if known else None

    def __call__(
        self,
        number: int,
        node: int | None,
        sent: Params,
        weights: Params,
        truth: Batch | None = None,
        clients: int | None = None,
        stated: float | None = None,
    ) -> None:
        """Attack one update of a round, or where `clients` is set the average of so many, as one batch of theirs.

        `stated` is the cosine of the update before and after its defense, as its client states it.
        """
        names = [name for name, _ in self.knowledge.net.named_parameters()]
        if missing := [name for name in names if name not in weights]:
            raise WrongInput("knowledge", f"its net has {missing[0]}, and the update does not; use the app's net")
        view = ServerView(sent, Weights({name: weights[name] for name in names}))
        size = self.knowledge.batch_size * (clients or 1) if truth is None else truth.size
        local = self.knowledge.local_batch
        known = replace(self.knowledge, batch_size=size, local_batch=local and local * (clients or 1))
        labels = self._labels(None, number, node, size, clients)
        if truth is not None:
            pixels, classes = known.pixels(truth.inputs), truth.labels.tolist()
            self.figures += gallery.truths(flat_labels(labels), self.targets, pixels, classes, self.images)
        if self.labels["defense"] != "none" and clients is None:
            self.rows.append(self._compare(view, truth, known, stated, with_extras(labels, target=self.targets)))
        for attack in self.attacks:
            self._attack(attack, view, truth, known, self._labels(attack, number, node, size, clients))
        self.targets += 1
        self.write()

    def promise(self, guarantee: Guarantee, number: int) -> None:
        """Add the epsilon that holds after a round to the rows and the page."""
        extra = self.labels["extra"] | {"round": number, "client": None}
        self.rows.append(
            Row(**(self.labels | {"extra": extra}), metric="epsilon", value=guarantee.epsilon, note=str(guarantee))
        )
        self.write()

    def write(self) -> None:
        """Write the rows and the page of all attacks so far."""
        config = {"attack": [str(attack) for attack in self.attacks], "local_steps": self.knowledge.local_steps}
        with page_afterwards(self.out), open_run(self.out, "invert", config, seeds=[self.labels["seed"]]) as run:
            run.add(self.rows)
            run.show(self.figures)

    def _compare(
        self, view: ServerView, truth: Batch | None, known: Knowledge, stated: float | None, labels: dict[str, Any]
    ) -> Row:
        """Return the cosine of a sent update with the plain one, and a note if the defense was not applied."""
        sent, defense = view.sent, labels["defense"]
        update = {name: sent[name] - value for name, value in view.update.values.items()}
        similarity, problem = stated, None if self.upload is None else find_contradiction(self.upload, update)
        if truth is not None:
            local = read_steps(known)
            plain = weights_update(known.net, sent, truth, known.batchnorm, loss=known.loss, turn=local)
            similarity = cosine({name: sent[name] - value for name, value in plain.values.items()}, update)
        if problem is not None:
            note = f"the update is visibly not one of {defense}: {problem}"
        elif similarity is not None and similarity >= IDLE:
            note = f"{defense} changed nothing: the sent update has a cosine of {IDLE} or more with the plain one"
        else:
            note = None
        return Row(**labels, metric=COSINE, value=similarity, note=note)

    def _attack(
        self, attack: Choice, view: ServerView, truth: Batch | None, known: Knowledge, labels: dict[str, Any]
    ) -> None:
        method: InversionAttack = attack.make()
        method.check(known, view)
        begun, seed = time.monotonic(), labels["seed"]
        rng = derive(seed, "reconstruct", attack.name, labels["extra"]["round"], self.targets)
        with progress(f"{attack} in round {labels['extra']['round']}", getattr(method, "iterations", None)) as advance:
            reconstructions = dict(method.reconstruct([[view]], known, [rng], NullWatcher(advance)))
        outcome = judge([truth], [reconstructions.get(0)], known, time.monotonic() - begun, self.scoring)
        self.rows += target_rows(labels, [self.targets], outcome)
        rows = summary_rows(labels, outcome, derive(seed, "bootstrap"))
        self.rows += [
            replace(row, note=join_notes(row.note, self.caution)) if row.metric == "psnr" else row for row in rows
        ]
        self.figures += gallery.draw_figures(flat_labels(labels), [self.targets], outcome, self.images)

    def _labels(
        self, attack: Choice | None, number: int, node: int | None, size: int, clients: int | None
    ) -> dict[str, Any]:
        extra = self.labels["extra"] | {"round": number, "client": node, "batch_size": size, "stage": f"round {number}"}
        if clients is not None:
            extra |= {"view": "sum", "update": f"the sum of {clients} clients, {extra['update']}"}
        if attack is not None:
            what = "an update" if clients is None else "in the sum"
            knows = f"{size} examples {what}, how pixels become inputs, the steps and the learning rate"
            extra |= {"threat": attack.method.info["threat"], "knows": knows}
        return attack_labels(self.labels, extra, attack)
