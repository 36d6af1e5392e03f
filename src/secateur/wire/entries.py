"""The entries of one tensor: those that are coded, and their values' bits."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.errors import WrongInput
from secateur.interfaces import Mask
from secateur.wire import positions
from secateur.wire.positions import Bits
from secateur.wire.rans import Bytes
from secateur.wire.table import DTYPES, Coding, Entry, item_size

WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # the same bits, whatever they mean


def mask_of(name: str, shape: tuple[int, ...], inside: Mask | None) -> Tensor | None:
    """(n,) the broadcast positions of a tensor; None: all."""
    if inside is None or name not in inside:
        return None
    if inside[name].shape != shape or inside[name].dtype != torch.bool:
        raise WrongInput("inside", f"must hold {name} as bool of the shape {shape}")
    return inside[name].detach().cpu().reshape(-1)


def within(name: str, value: Tensor, inside: Mask | None) -> Tensor:
    """(m,) the entries of a tensor that are coded."""
    if value.dtype not in DTYPES:
        raise WrongInput("update", f"{name} is {value.dtype}; allowed: {', '.join(str(d)[6:] for d in DTYPES)}")
    flat = value.detach().cpu().reshape(-1)
    where = mask_of(name, tuple(value.shape), inside)
    if where is None:
        return flat
    taken = torch.from_numpy(_words(flat)[where.numpy()]).view(value.dtype)  # faster than to index a tensor
    if int((flat != 0).sum()) != int((taken != 0).sum()):
        raise WrongInput("update", f"{name} has entries outside of the broadcast positions")
    return taken


def fingerprint(inside: Mask) -> int:
    """The CRC-32 of a mask, so that no message is read with another one."""
    found = 0
    for name in sorted(inside):
        if inside[name].dtype != torch.bool:
            raise WrongInput("inside", f"{name} is {inside[name].dtype}; a mask is bool")
        bits = np.packbits(inside[name].detach().cpu().reshape(-1).numpy()).tobytes()
        found = zlib.crc32(bits, zlib.crc32(f"{name}{tuple(inside[name].shape)}".encode(), found))
    return found


def _words(flat: Tensor) -> npt.NDArray[np.signedinteger]:
    """The bits of numbers, in the same memory."""
    words: npt.NDArray[np.signedinteger] = flat.view(WORDS[flat.dtype.itemsize]).numpy()
    return words


def values(flat: Tensor, kept: Bits | None) -> bytes:
    """The bits of the kept values, or of all with zeros among them; nothing of a mask."""
    if not item_size(flat.dtype):
        return b""
    plain = torch.where(flat != 0, flat, 0) if kept is None else flat  # -0.0 is 0
    words = _words(plain)
    taken = words if kept is None else words[kept]
    return taken.astype(taken.dtype.newbyteorder("<"), copy=False).tobytes()


@dataclass(frozen=True, eq=False)
class Expected:
    """A tensor of a message's table, to be read."""

    entry: Entry
    inside: Tensor | None  # (n,) the broadcast positions; None: all
    size: int  # entries that are coded

    @classmethod
    def of(cls, entry: Entry, inside: Mask | None) -> Self:
        """What the table and the mask say of it."""
        where = mask_of(entry.name, entry.shape, inside)
        return cls(entry, where, math.prod(entry.shape) if where is None else int(where.sum()))

    @property
    def value_bytes(self) -> int:
        """How many bytes its values have."""
        return item_size(self.entry.dtype) * (self.size if self.entry.coding == Coding.DENSE else self.entry.count)

    def read(self, own: bytes, bitmap: Bytes | None, values: bytes) -> Tensor:
        """The tensor, 0 wherever nothing was sent."""
        flat = self._coded(positions.read(self.entry, own, bitmap, self.size), values)
        if self.inside is None:
            return flat.reshape(self.entry.shape)
        found = torch.zeros(self.inside.shape, dtype=self.entry.dtype)
        _words(found)[self.inside.numpy()] = _words(flat)
        return found.reshape(self.entry.shape)

    def _coded(self, kept: Bits | None, values: bytes) -> Tensor:
        """(size,) the entries that are coded."""
        name, count = self.entry.name, self.entry.count
        if not item_size(self.entry.dtype) and kept is not None:
            return torch.from_numpy(kept)
        word = np.dtype(f"i{self.entry.dtype.itemsize}")
        flat = given = np.frombuffer(values, word.newbyteorder("<")).astype(word)
        if kept is not None:
            flat = np.zeros(self.size, word)
            flat[kept] = given
        found = torch.from_numpy(flat).view(self.entry.dtype)
        if (number := int((found != 0).sum())) != count:
            raise WrongInput("message", f"{name} has {number} entries that are not 0, but its count is {count}")
        return found
