"""States of many clients in one file, so that memory does not grow with the clients that were sampled.

All states have the same form, so each takes one slot of the file. A checkpoint names the slot of every client, and its
slots are not overwritten until the next checkpoint is saved. So a checkpoint writes no state again, and a killed run
finds the states of its last checkpoint.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path

import torch

from secateur.federated.checkpoint import check_state
from secateur.interfaces import Params
from secateur.runs.artifacts import explained


class ClientStateFile(MutableMapping[int, Params]):
    """The states of clients, by client, in a file of their own; without a path in a temporary one."""

    def __init__(self, fresh: Params) -> None:
        self.fresh = {name: value.to("cpu", copy=True).contiguous() for name, value in fresh.items()}
        self.size = sum(value.nbytes for value in fresh.values())  # bytes of a slot
        self.slots: dict[int, int] = {}
        self._count, self._free = 0, list[int]()  # slots in all, and those that can be written
        self._marked, self._saved = set[int](), set[int]()  # slots of the newest state, and of the saved checkpoint
        self._path: Path | None = None
        self._file: int | None = None

    def place(self, path: Path) -> None:
        """Use this file; called before any state is kept."""
        self._path = path

    def _open(self) -> int:
        if self._file is None and self._path is None:
            file, name = tempfile.mkstemp(prefix="secateur-states-")
            os.unlink(name)  # the kernel removes it with the process
            self._file = file
        elif self._file is None:
            assert self._path is not None
            with explained(self._path):
                self._path.parent.mkdir(exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        assert self._file is not None
        return self._file

    def __getitem__(self, client: int) -> Params:
        slot = self.slots[client]
        data = bytearray(os.pread(self._open(), self.size, slot * self.size))
        check_state(len(data) == self.size)
        state, start = {}, 0
        for name, value in self.fresh.items():
            raw = torch.frombuffer(data, dtype=torch.uint8, count=value.nbytes, offset=start) if value.nbytes else None
            state[name] = torch.empty_like(value) if raw is None else raw.clone().view(value.dtype).view(value.shape)
            start += value.nbytes
        return state

    def __setitem__(self, client: int, state: Params) -> None:
        slot = self.slots.get(client)
        if slot is None or slot in self._saved or slot in self._marked:
            slot = self._free.pop() if self._free else self._count
            self._count = max(self._count, slot + 1)
        parts = [state[name].detach().to("cpu").contiguous().view(-1).view(torch.uint8) for name in self.fresh]
        data = torch.cat(parts).numpy()
        with explained(self._path or Path(tempfile.gettempdir())):
            written = os.pwrite(self._open(), data, slot * self.size)
            if written != self.size:
                raise OSError(errno.ENOSPC, "no space is left")
        self.slots[client] = slot

    def mark(self) -> dict[str, int]:
        """Return the slot of every client, for a checkpoint; these are kept as they are."""
        if self.slots:
            os.fsync(self._open())
        before, self._marked = self._marked, set(self.slots.values())
        self._free += before - self._saved - self._marked
        return {str(client): slot for client, slot in self.slots.items()}

    def save(self) -> None:
        """Let go of the slots of the checkpoint before the marked one, which was saved."""
        before, self._saved = self._saved, self._marked
        self._free += before - self._saved - set(self.slots.values())

    def restore(self, slots: Mapping[str, int]) -> None:
        """Use the states of a checkpoint."""
        self.slots = {int(client): slot for client, slot in slots.items()}
        self._marked = self._saved = set(self.slots.values())
        self._count = max(self._saved, default=-1) + 1
        self._free = sorted(set(range(self._count)) - self._saved)
        check_state(os.fstat(self._open()).st_size >= self._count * self.size)

    def clear(self) -> None:
        """Forget all clients."""
        self.restore({})

    def __delitem__(self, client: int) -> None:
        raise TypeError("a client's state is never taken away alone")

    def __iter__(self) -> Iterator[int]:
        return iter(self.slots)

    def __len__(self) -> int:
        return len(self.slots)

    def __del__(self) -> None:
        if self._file is not None:
            os.close(self._file)
