"""Questions to the clients of a federation over Flower's Grid, and their answers as a stream, until a deadline.

Tensors in Flower's records: as arrays that any app reads, and as bytes of our wire format.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid
from torch import Tensor

from secateur.errors import WrongInput
from secateur.federated.faults import Fault
from secateur.interfaces import Params

log = logging.getLogger(__name__)

FEW = 4  # answers that are fetched, and held, at once
PAUSE = 0.2  # seconds between two looks for answers
MOST = 1 << 32  # examples that a client can say it has
HELLO = "query"  # the type of the message that asks a node which client it is

WIRE = "secateur"  # the name of an array whose bytes are a message of wire/, and its serialisation type


class Link:
    """Knows which node is which client.

    A node says by its node-config which client it is (partition-id); one that does not say is given a free number.
    One with data of its own says how many examples it has.

    `deployed` nodes keep their state when the server's process is started anew, simulated ones do not.
    """

    def __init__(self, grid: Grid, deadline: float, patience: float = 60.0, deployed: bool = False) -> None:
        self.grid, self.deadline, self.patience, self.deployed = grid, deadline, patience, deployed
        self.clients = 0  # how many there are to be
        self.stopped = False  # somebody else's wish that all waiting ends
        self.nodes: dict[int, int] = {}  # by client
        self.examples: dict[int, int] = {}  # of clients with data of their own
        self._met: set[int] = set()
        self._waited = False

    def meet(self) -> None:
        """Greet nodes that are new; before the first round wait for all of them, but not for ever."""
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
        """Ask clients, and give what each answers as it comes, or why there is no answer."""
        asked: list[tuple[int, int, RecordDict]] = []
        for client, content in contents:
            if client in self.nodes:
                asked.append((client, self.nodes[client], content))
            else:
                yield client, "absent"
        yield from self._ask(kind, asked)

    def _greet(self, nodes: list[int]) -> None:
        self._met |= set(nodes)
        said: dict[int, tuple[int, int]] = {}  # by node
        content = RecordDict({"turn": ConfigRecord({"hello": True})})
        for node, answer in self._ask(HELLO, ((node, node, content) for node in nodes)):
            if isinstance(answer, str):
                self._met.discard(node)  # to be greeted again
            elif (told := _told(answer)) is None:
                log.warning("node %s answers to its greeting with what cannot be read; it is left out", node)
            else:
                said[node] = told
        for node, (client, examples) in said.items():
            if client >= self.clients or self.nodes.get(client, node) != node:
                log.warning(
                    "node %s says that it is client %s, and there is no such place; it is left out", node, client
                )
            elif client >= 0:
                self._place(client, node, examples)
        free = iter(sorted(set(range(self.clients)) - set(self.nodes)))
        silent = [(node, examples) for node, (client, examples) in said.items() if client < 0]
        for client, (node, examples) in zip(free, silent, strict=False):
            self._place(client, node, examples)

    def _place(self, client: int, node: int, examples: int) -> None:
        self.nodes[client] = node
        self.examples.pop(client, None)
        if examples:
            self.examples[client] = examples

    def _ask(self, kind: str, asked: Iterable[tuple[int, int, RecordDict]]) -> Iterator[tuple[int, RecordDict | Fault]]:
        waiting: dict[str, int] = {}
        for who, node, content in asked:  # pushed one by one: Flower keeps what is the same in several only once
            message = Message(content, node, kind, ttl=self.deadline + 60)
            pushed = [ident for ident in self.grid.push_messages([message]) if ident]
            if pushed:
                waiting[pushed[0]] = who
            else:
                yield who, "absent"
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            if self.stopped:
                raise KeyboardInterrupt
            before, idents = len(waiting), list(waiting)
            for first in range(0, before, FEW):
                for reply in self.grid.pull_messages(idents[first : first + FEW]):
                    who = waiting.pop(reply.metadata.reply_to_message_id)
                    yield who, self._content(reply)
            if len(waiting) == before:
                time.sleep(PAUSE)
        for who in waiting.values():
            yield who, "late"

    def _content(self, reply: Message) -> RecordDict | Fault:
        if not reply.has_error():
            return reply.content
        log.warning("a client answered with an error: %s", reply.error.reason)
        return "absent" if reply.error.code == ErrorCode.NODE_UNAVAILABLE else "error"


def _told(answer: RecordDict) -> tuple[int, int] | None:
    """Which client a node is, -1 where it does not say, and its examples, 0 where the server knows them."""
    try:
        told = answer.config_records["turn"]
        return int(str(told["client"])), min(max(int(str(told.get("examples", 0))), 0), MOST)
    except (KeyError, ValueError):
        return None


def tensors_of(record: ArrayRecord) -> Params:
    """The arrays of a record by name."""
    return {name: torch.from_numpy(array.numpy().copy()) for name, array in record.items()}


def arrays_of(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors as arrays that any Flower app reads."""
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def packed(**messages: bytes) -> ArrayRecord:
    """Bytes of the wire format, each under its name; Flower cuts an array into pieces, and nothing else."""
    return ArrayRecord({name: Array("uint8", (len(data),), WIRE, data) for name, data in messages.items()})


def unpacked(record: ArrayRecord) -> dict[str, bytes]:
    """The bytes in a record that `packed` made."""
    if wrong := [name for name, array in record.items() if array.stype != WIRE]:
        raise WrongInput("message", f"{wrong[0]} is not in the wire format of secateur")
    return {name: array.data for name, array in record.items()}


def size_of(record: ArrayRecord) -> int:
    """Bytes of the arrays of a record."""
    return sum(len(array.data) for array in record.values())


def only(content: RecordDict, what: str) -> tuple[str, ArrayRecord]:
    """The one record of arrays in a message, and its name."""
    found = list(content.array_records.items())
    if len(found) != 1:
        raise WrongInput(what, f"holds {len(found)} records of arrays; exactly one is allowed")
    return found[0]


def kept(state: RecordDict, name: str) -> Params | None:
    """What a client kept at home under a name; None where it has nothing yet."""
    return tensors_of(state.array_records[name]) if name in state.array_records else None


def keep(state: RecordDict, name: str, tensors: Params) -> None:
    """Keep tensors at home, in the client's context, until its next turn."""
    state.array_records[name] = arrays_of(tensors)
