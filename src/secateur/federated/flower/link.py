"""Messages over Flower's Grid: questions to clients, their answers until a deadline, and tensors in records.

A record holds tensors as arrays that any Flower app reads, or as bytes of our wire format (secateur/wire).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from flwr.supercore.inflatable import inflatable_utils
from torch import Tensor

from secateur.errors import WrongInput, printable
from secateur.federated.faults import Fault
from secateur.interfaces import Mask, Params
from secateur.wire import decode_mask

log = logging.getLogger(__name__)

FEW = 4  # answers that are fetched and held at a time
PAUSE = 0.2  # seconds between two polls, at most
SOON = 0.03  # seconds between the first polls
SHARE = 0.1  # of the time since the question, between two later polls
BACKOFF = 0.05  # seconds before a part of a message is asked for again, doubled each time
TRIES = 3  # pushes of a message
MOST = 1 << 32  # examples that a client may report
HELLO = "query"  # the type of the message that asks a node which client it is
SLACK = 1 << 16  # bytes of tables and positions that an update may have beyond its values
MASK = "secateur-mask"  # of a message's configuration: the server's mask as bytes
INLINE = "secateur-wire"  # the record of a small message's bytes
SMALL = 1 << 20  # bytes of such a message, at most
WIRE = "secateur"  # the serialisation type of an array whose bytes are a message of secateur/wire


class Link:
    """The nodes of a federation, by client, and the messages to them.

    The node-config of a node names its client (partition-id); a node without one gets a free number. A node with data
    of its own reports how many examples it has.

    `deployed` nodes keep their state when the server's process restarts, simulated ones do not.
    """

    def __init__(self, grid: Grid, deadline: float, patience: float = 60.0, deployed: bool = False) -> None:
        self.grid, self.deadline, self.patience, self.deployed = grid, deadline, patience, deployed
        self.clients = 0  # the number of clients in the federation
        self.stopped = False  # set from outside: all waiting ends
        self.nodes: dict[int, int] = {}  # by client
        self.examples: dict[int, int] = {}  # of clients with data of their own
        self._met: set[int] = set()
        self._waited = False
        if deployed:
            shorten_pulls(deadline)

    def greet_nodes(self) -> None:
        """Greet new nodes; before the first round wait until all are online, at most `patience` seconds."""
        end = time.monotonic() + (0.0 if self._waited else self.patience)
        self._waited = True
        while not self.stopped:
            online = set(self.grid.get_node_ids())
            self._greet(sorted(online - self._met))
            self._met &= online
            self.nodes = {client: node for client, node in self.nodes.items() if node in online}
            if len(self.nodes) >= self.clients or time.monotonic() >= end:
                return
            time.sleep(PAUSE)

    def ask(self, kind: str, contents: Iterable[tuple[int, RecordDict]]) -> Iterator[tuple[int, RecordDict | Fault]]:
        """Ask clients, and yield each answer as it arrives, or the fault of a client without an answer."""
        asked: list[tuple[int, int, RecordDict]] = []
        for client, content in contents:
            if client in self.nodes:
                asked.append((client, self.nodes[client], content))
            else:
                yield client, "absent"
        yield from self._ask(kind, asked)

    def _greet(self, nodes: list[int]) -> None:
        self._met |= set(nodes)
        greetings: dict[int, tuple[int, int]] = {}  # by node
        content = RecordDict({"turn": ConfigRecord({"hello": True})})
        for node, answer in self._ask(HELLO, ((node, node, content) for node in nodes)):
            if isinstance(answer, str):
                self._met.discard(node)  # greeted again later
            elif (greeting := _parse_greeting(answer)) is None:
                log.warning("ignoring node %s: malformed answer to the greeting", node)
            else:
                greetings[node] = greeting
        for node, (client, examples) in greetings.items():
            if client >= self.clients or self.nodes.get(client, node) != node:
                log.warning("ignoring node %s: client %s does not exist, or is another node", node, client)
            elif client >= 0:
                self._assign(client, node, examples)
        free = iter(sorted(set(range(self.clients)) - set(self.nodes)))
        silent = [(node, examples) for node, (client, examples) in greetings.items() if client < 0]
        for client, (node, examples) in zip(free, silent, strict=False):
            self._assign(client, node, examples)

    def _assign(self, client: int, node: int, examples: int) -> None:
        self.nodes[client] = node
        self.examples.pop(client, None)
        if examples:
            self.examples[client] = examples

    def _ask(self, kind: str, asked: Iterable[tuple[int, int, RecordDict]]) -> Iterator[tuple[int, RecordDict | Fault]]:
        waiting: dict[str, int] = {}
        for key, node, content in asked:  # one by one: Flower then stores content that messages share only once
            content = inline(content) if self.deployed else content
            pushed = self._push(Message(content, node, kind, ttl=self.deadline + 60))
            if pushed:
                waiting[pushed[0]] = key
            else:
                yield key, "absent"
        begun = time.monotonic()
        while waiting and time.monotonic() < begun + self.deadline:
            if self.stopped:
                raise KeyboardInterrupt
            before, idents = len(waiting), list(waiting)
            for first in range(0, before, FEW):
                for reply in self.grid.pull_messages(idents[first : first + FEW]):
                    key = waiting.pop(reply.metadata.reply_to_message_id)
                    yield key, self._content(reply)
            if len(waiting) == before:
                time.sleep(min(PAUSE, max(SOON, SHARE * (time.monotonic() - begun))))
        for key in waiting.values():
            yield key, "late"

    def _push(self, message: Message) -> list[str]:
        """Push a message, and return its identifier; none if Flower refuses it.

        A restarted superlink refuses a part that it had stored before. The same message again brings the missing parts.
        """
        for _ in range(TRIES):
            try:
                return [ident for ident in self.grid.push_messages([message]) if ident]
            except inflatable_utils.ObjectPushError as error:
                log.warning("pushing a message again: %s", error)
        return []

    def _content(self, reply: Message) -> RecordDict | Fault:
        if not reply.has_error():
            return restore(reply.content)
        log.warning("ignoring the answer of a client: it failed (%s)", printable(reply.error.reason)[:300])
        return "absent" if reply.error.code == ErrorCode.NODE_UNAVAILABLE else "error"


def shorten_pulls(limit: float | None = None) -> None:
    """Let this process ask soon again for parts of a message that the sender is still pushing.

    Flower shows a message before its parts, waits a second for a part that is missing, and two hours in all. It has no
    setting for either.

    Args:
        limit: Seconds after which a message whose parts do not come is an error; None leaves Flower's.
    """
    for pull in (inflatable_utils.pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        usual = pull.__kwdefaults__ or {}
        new = {"initial_backoff": BACKOFF} | ({} if limit is None else {"max_time": limit})
        usual.update({name: value for name, value in new.items() if name in usual})


def _parse_greeting(answer: RecordDict) -> tuple[int, int] | None:
    """Return the client of a node (-1: not named) and its examples (0: known to the server); None if unreadable."""
    try:
        turn = answer.config_records["turn"]
        return int(str(turn["client"])), min(max(int(str(turn.get("examples", 0))), 0), MOST)
    except (KeyError, ValueError):
        return None


def tensors_of(record: ArrayRecord) -> Params:
    """Return the arrays of a record by name."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def read_tensors(record: ArrayRecord, like: Params) -> Params:
    """Return the arrays of a client's record; refuse one that claims other shapes, or more bytes than `like` has."""
    for name, array in record.items():
        if name not in like or tuple(array.shape) != tuple(like[name].shape):
            raise WrongInput("message", f"{name} is not expected, or has another shape")
        if len(array.data) > 8 * like[name].numel() + SLACK:
            raise WrongInput("message", f"{name} has {len(array.data)} bytes, which is too many for its shape")
    try:
        return tensors_of(record)
    except (ValueError, TypeError, OSError, MemoryError) as error:  # an array's own header may be forged too
        raise WrongInput("message", f"its arrays cannot be read ({error})") from error


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Return tensors as arrays that any Flower app reads."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def pack(**messages: bytes) -> ArrayRecord:
    """Return messages of the wire format as arrays, because Flower splits large arrays and nothing else."""
    return ArrayRecord({name: Array("uint8", (len(data),), WIRE, data) for name, data in messages.items()})


def unpack(record: ArrayRecord) -> dict[str, bytes]:
    """Return the bytes in a record that `pack` made."""
    if wrong := [name for name, array in record.items() if array.stype != WIRE]:
        raise WrongInput("message", f"{wrong[0]} is not in the wire format of secateur")
    return {name: array.data for name, array in record.items()}


def inline(content: RecordDict) -> RecordDict:
    """Return a message's content with its arrays of the wire format as bytes of one configuration, if they are small.

    Flower makes three objects of an array and its record, and a request of each on every step of the way.
    """
    records = {name: record for name, record in content.array_records.items() if _is_wire(record)}
    if not records or sum(map(size_of, records.values())) > SMALL:
        return content
    data: dict[str, Any] = {}
    for name, record in records.items():
        data |= {f"{name}/{key}": array.data for key, array in record.items()}
    return RecordDict({**{name: content[name] for name in content if name not in records}, INLINE: ConfigRecord(data)})


def restore(content: RecordDict) -> RecordDict:
    """Return the content that `inline` was given; anything else in its record is left out."""
    if INLINE not in content.config_records:
        return content
    records: dict[str, dict[str, bytes]] = {}
    for name, data in content.config_records[INLINE].items():
        record, _, key = name.partition("/")
        if isinstance(data, bytes):
            records.setdefault(record, {})[key] = data
    others = {name: content[name] for name in content if name != INLINE}
    return RecordDict({**others, **{name: pack(**messages) for name, messages in records.items()}})


def _is_wire(record: ArrayRecord) -> bool:
    return bool(record) and all(array.stype == WIRE for array in record.values())


def size_of(record: ArrayRecord) -> int:
    """Return the bytes of all arrays of a record."""
    return sum(len(array.data) for array in record.values())


def single_record(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    """Return the one record of arrays in a message, and its name."""
    records = list(content.array_records.items())
    if len(records) != 1:
        raise WrongInput(what, f"holds {len(records)} records of arrays; exactly one is allowed")
    return records[0]


def load_tensors(state: RecordDict, name: str) -> Params | None:
    """Return the tensors in the client's context under a name; None where there are none yet."""
    return tensors_of(state.array_records[name]) if name in state.array_records else None


def store_tensors(state: RecordDict, name: str, tensors: Params) -> None:
    """Keep tensors in the client's context until its next turn."""
    state.array_records[name] = arrays_of(tensors)


def extend_config(content: RecordDict, values: Mapping[str, Any]) -> RecordDict:
    """Return a message's content with more values in its configuration; the content itself may be other messages' too.

    The values go into the record that is there, as some of Flower's mods allow only one.
    """
    name, record = next(iter(content.config_records.items()), ("config", ConfigRecord()))
    return RecordDict({**content, name: ConfigRecord({**record, **values})})


def mask_in(content: RecordDict, model: Params) -> Mask:
    """Return the mask in a message for this model; empty if there is none."""
    for record in content.config_records.values():
        if isinstance(data := record.get(MASK), bytes):
            return decode_mask(data, {name: tuple(value.shape) for name, value in model.items()})
    return {}
