"""The state of Flower's simulation, with the messages of each node in a queue of their own.

The simulation asks its state for the messages of every node in turn, and Flower's state looks through all stored
messages for each answer. So a sweep costs nodes times messages. Flower's simulation has no setting for its state.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import flwr.simulation  # noqa: F401 (whose module is named like its function)
from flwr.app import Message
from flwr.server.superlink.linkstate import InMemoryLinkState, LinkState, LinkStateFactory
from flwr.supercore.date import now

SIMULATION = "flwr.simulation.run_simulation"


class IndexedLinkState(InMemoryLinkState):
    """Flower's state in memory, which finds a node's messages by its queue."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._waiting: defaultdict[int, deque[str]] = defaultdict(deque)  # by node

    def store_message_ins(self, message: Message) -> str | None:
        """Store a message, and note it for its node."""
        with self.lock:
            new = message.metadata.message_id not in self.message_ins_store
            ident = super().store_message_ins(message)
            if ident is not None and new:
                self._waiting[message.metadata.dst_node_id].append(ident)
        return ident

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Message]:
        """Return the messages of a node that were not delivered, the oldest first."""
        if run_id is not None:  # the simulation has one run, and never asks so
            return super().get_message_ins(node_id, limit, run_id=run_id)
        messages: list[Message] = []
        with self.lock:
            queue = self._waiting[node_id]
            while queue and (limit is None or len(messages) < limit):
                ident = queue.popleft()
                self._check_stored_messages({ident})  # deletes one that is too old
                message = self.message_ins_store.get(ident)
                if message is not None and message.metadata.delivered_at == "":
                    message.metadata.delivered_at = now().isoformat()
                    messages.append(message)
        return messages


class IndexedStateFactory(LinkStateFactory):
    """A factory of such states."""

    def state(self) -> LinkState:
        """Return the state, made at the first call."""
        with self._state_lock:
            if self.state_instance is None:
                self.state_instance = IndexedLinkState(self.federation_manager, self.objectstore_factory.store())
            return self.state_instance


@contextmanager
def indexed_state() -> Iterator[None]:
    """Let simulations inside use an indexed state; a Flower that is built otherwise keeps its own."""
    module: Any = sys.modules.get(SIMULATION)
    usual = getattr(module, "LinkStateFactory", None)
    if usual is None:
        yield
        return
    module.LinkStateFactory = IndexedStateFactory
    try:
        yield
    finally:
        module.LinkStateFactory = usual
