"""The table of a message: the tensors it holds, deflated because the names of a network's layers are repetitive."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch

from secateur.errors import WrongInput

Shapes = Mapping[str, Sequence[int]]

MAGIC, VERSION = b"SCTR", 1
HEAD = len(MAGIC) + 1 + 4 + 4  # magic, version, checksum, length of the table
DTYPES = (
    *(torch.bool, torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
)  # a code is an index here; a bool has no values, only positions


class Coding(IntEnum):
    """Codings of the positions of a tensor's kept entries."""

    EVIDENT = 0  # implied by the count: none or all
    DENSE = 1  # no positions: the zeros are among the values
    BITMAP = 2
    DEFLATED = 3  # a bitmap, deflated
    GAPS = 4  # between the kept or the dropped entries, whichever are fewer
    ENTROPY = 5  # a bitmap, in the stream that tensors share


@dataclass(frozen=True)
class TableEntry:
    """One tensor in the table."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    count: int  # entries that are not 0
    coding: Coding
    bytes: int  # of the positions of this tensor


@dataclass(frozen=True)
class TensorTable:
    """All tensors of a message."""

    inside: int | None  # the checksum of the mask that positions are relative to
    stream: int  # bytes of the shared stream
    entries: tuple[TableEntry, ...]


def item_size(dtype: torch.dtype) -> int:
    """Return the bytes of one value on the wire."""
    return 0 if dtype == torch.bool else dtype.itemsize


def pack(table: TensorTable) -> bytes:
    """Return the table as deflated bytes."""
    checksum = b"" if table.inside is None else table.inside.to_bytes(4, "little")
    plain = _number(len(checksum)) + checksum + _number(table.stream) + _number(len(table.entries))
    for entry in table.entries:
        name = entry.name.encode()
        head = [DTYPES.index(entry.dtype), entry.coding, len(entry.shape), *entry.shape, entry.count, entry.bytes]
        plain += _number(len(name)) + name + b"".join(map(_number, head))
    return zlib.compress(plain, 9)


def largest_table(shapes: Shapes) -> int:
    """Return the most bytes that a table of these shapes can have."""
    return 64 + sum(len(name.encode()) + 10 * (6 + len(shape)) for name, shape in shapes.items())


def unpack(data: bytes, shapes: Shapes) -> TensorTable:
    """Return the table from deflated bytes; its size is bounded by the largest table of these shapes."""
    reader = TableReader(inflate(data, largest_table(shapes), "table"))
    checksum = reader.take(reader.number())
    if len(checksum) not in (0, 4):
        raise WrongInput("message", "is damaged: its table has a broken checksum of the mask")
    inside = int.from_bytes(checksum, "little") if checksum else None
    stream, number = reader.number(), reader.number()
    if number > len(shapes):
        raise WrongInput("message", f"holds {number} tensors; {len(shapes)} are expected")
    entries = tuple(_entry(reader, shapes) for _ in range(number))
    if reader.rest:
        raise WrongInput("message", "is damaged: something follows its table")
    return TensorTable(inside, stream, entries)


def inflate(data: bytes, limit: int, what: str) -> bytes:
    """Inflate at most `limit` bytes; refuse data that is longer, cut off, or followed by other bytes."""
    machine = zlib.decompressobj()
    try:
        plain = machine.decompress(data, limit + 1)
    except zlib.error as error:
        raise WrongInput("message", f"is damaged: its {what} cannot be inflated") from error
    if len(plain) > limit:
        raise WrongInput("message", f"is refused: its {what} inflates to more than the {limit} bytes it can have")
    if not machine.eof or machine.unused_data:
        raise WrongInput("message", f"is damaged: its {what} does not end where it must")
    return plain


class TableReader:
    """Reader of a table's bytes that refuses to read past the end."""

    def __init__(self, data: bytes) -> None:
        self.rest = memoryview(data)

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > len(self.rest):
            raise WrongInput("message", "is damaged: its table is cut off")
        taken, self.rest = self.rest[:size], self.rest[size:]
        return bytes(taken)

    def number(self) -> int:
        """Return the next number: seven bits a byte, the lowest first, the last byte below 128."""
        value = 0
        for shift in range(0, 63, 7):
            byte = self.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise WrongInput("message", "is damaged: its table holds a number above 2^63")


def _number(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _entry(reader: TableReader, shapes: Shapes) -> TableEntry:
    try:
        name = reader.take(reader.number()).decode()
    except UnicodeDecodeError as error:
        raise WrongInput("message", "is damaged: a tensor's name is not UTF-8") from error
    if name not in shapes:  # a forged name may contain line breaks
        shown = name if name.isprintable() else ascii(name)
        raise WrongInput("message", f"holds {shown}, which is not expected")
    dtype, coding, dimensions = (reader.number() for _ in range(3))
    if dtype >= len(DTYPES):
        raise WrongInput("message", f"{name} has the unknown dtype {dtype}; allowed: 0 to {len(DTYPES) - 1}")
    if coding >= len(Coding):
        raise WrongInput("message", f"{name} has the unknown coding {coding}; allowed: 0 to {len(Coding) - 1}")
    if dimensions > len(reader.rest):
        raise WrongInput("message", "is damaged: its table is cut off")
    shape = tuple(reader.number() for _ in range(dimensions))
    return TableEntry(name, DTYPES[dtype], shape, reader.number(), Coding(coding), reader.number())
