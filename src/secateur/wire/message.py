"""Messages: updates and masks as bytes, with the positions and the bits of the entries that are not 0."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from secateur.errors import WrongInput
from secateur.interfaces import Mask, Params
from secateur.wire import positions, rans
from secateur.wire.positions import Bits
from secateur.wire.rans import Bytes
from secateur.wire.table import (
    DTYPES,
    HEAD,
    MAGIC,
    VERSION,
    Coding,
    Shapes,
    TableEntry,
    TensorTable,
    item_size,
    largest_table,
    pack,
    unpack,
)

Dtypes = Mapping[str, torch.dtype]
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of the same bits, by bytes


@dataclass(frozen=True, eq=False)
class Expected:
    """Tensor of a message's table, to be read."""

    entry: TableEntry
    inside: Tensor | None  # (n,) the broadcast positions; None: all
    size: int  # entries that are coded

    @classmethod
    def from_entry(cls, entry: TableEntry, inside: Mask | None) -> Self:
        """Return the expected tensor of an entry in the table."""
        where = mask_of(entry.name, entry.shape, inside)
        return cls(entry, where, math.prod(entry.shape) if where is None else int(where.sum()))

    @property
    def value_bytes(self) -> int:
        """The number of bytes of the values."""
        return item_size(self.entry.dtype) * (self.size if self.entry.coding == Coding.DENSE else self.entry.count)

    def read(self, payload: bytes, bitmap: Bytes | None, values: bytes) -> Tensor:
        """Return the tensor, 0 where nothing was sent."""
        flat = self._decode(positions.read(self.entry, payload, bitmap, self.size), values)
        if self.inside is None:
            return flat.reshape(self.entry.shape)
        whole = torch.zeros(self.inside.shape, dtype=self.entry.dtype)
        _to_integers(whole)[self.inside.numpy()] = _to_integers(flat)
        return whole.reshape(self.entry.shape)

    def _decode(self, kept: Bits | None, values: bytes) -> Tensor:
        """Return the entries that are coded, (size,)."""
        name, count = self.entry.name, self.entry.count
        if not item_size(self.entry.dtype) and kept is not None:
            return torch.from_numpy(kept)
        word = np.dtype(f"i{self.entry.dtype.itemsize}")
        words = sent = np.frombuffer(values, word.newbyteorder("<")).astype(word)
        if kept is not None:
            words = np.zeros(self.size, word)
            words[kept] = sent
        flat = torch.from_numpy(words).view(self.entry.dtype)
        if (number := int((flat != 0).sum())) != count:
            raise WrongInput("message", f"{name} has {number} entries that are not 0, but its count is {count}")
        return flat


def encode(update: Params, *, inside: Mask | None = None) -> bytes:
    """Return an update as bytes: its entries that are not 0, and their positions.

    These entries arrive bit for bit, NaN too; -0.0 counts as 0 and arrives as 0.0. `inside` are positions that both
    sides know (ADGP's broadcast): only entries there are coded, and every other entry must be 0.

    Example:
        >>> update = {"w": torch.tensor([0.0, 1.5, 0.0])}
        >>> decode(encode(update), {"w": (3,)})["w"].tolist()
        [0.0, 1.5, 0.0]
    """
    flat = {name: select_coded(name, value, inside) for name, value in update.items()}
    kept = {name: (value != 0).numpy() for name, value in flat.items()}
    coded = positions.code(kept, {name: item_size(value.dtype) for name, value in flat.items()})
    listed = tuple(
        TableEntry(name, value.dtype, tuple(value.shape), coded[name].count, coded[name].coding, len(coded[name].own))
        for name, value in update.items()
    )
    shared = [one for one in coded.values() if one.coding == Coding.ENTROPY]
    bitmaps = [one.bitmap for one in shared]
    stream = rans.encode(np.concatenate(bitmaps), [(one.count, len(one.bitmap)) for one in shared]) if shared else b""
    table = pack(TensorTable(None if inside is None else fingerprint(inside), len(stream), listed))
    values = [pack_values(flat[e.name], None if e.coding == Coding.DENSE else kept[e.name]) for e in listed]
    body = b"".join([len(table).to_bytes(4, "little"), table, *(one.own for one in coded.values()), stream, *values])
    return MAGIC + bytes([VERSION]) + zlib.crc32(body).to_bytes(4, "little") + body


def largest_message(shapes: Shapes, item: int = 8) -> int:
    """Return the most bytes that a message of these shapes can have, with values of `item` bytes."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    values = sum(item * size + (size + 7) // 8 for size in sizes)  # with positions, which a dense coding has not
    return HEAD + largest_table(shapes) + rans.OVERHEAD + 8 * rans.LANES + values


def decode(data: bytes, shapes: Shapes, *, inside: Mask | None = None, dtypes: Dtypes | None = None) -> Params:
    """Return the update in a message, on the CPU; WrongInput unless it has exactly these shapes.

    `inside` must be the mask that the update was encoded with. With `dtypes` it must have these too.
    """
    update = _decode(data, shapes, inside, dtypes)
    if missing := [name for name in shapes if name not in update]:
        raise WrongInput("message", f"lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}")
    return {name: update[name] for name in shapes}


def encode_mask(mask: Mask) -> bytes:
    """Return a mask as bytes: bits, coded as the positions of an update are."""
    _check_bool("mask", mask)
    return encode(mask)


def decode_mask(data: bytes, shapes: Shapes) -> Mask:
    """Return the mask in a message; it may lack tensors of `shapes`, which are then kept whole."""
    mask = _decode(data, shapes, None, dict.fromkeys(shapes, torch.bool))
    _check_bool("message", mask)
    return {name: mask[name] for name in shapes if name in mask}


def _check_bool(field: str, mask: Mask) -> None:
    for name, where in mask.items():
        if where.dtype != torch.bool:
            raise WrongInput(field, f"{name} is {where.dtype}; must be bool")


def select_coded(name: str, value: Tensor, inside: Mask | None) -> Tensor:
    """Return the entries of a tensor that are coded, (m,)."""
    if value.dtype not in DTYPES:
        raise WrongInput("update", f"{name} is {value.dtype}; allowed: {', '.join(str(d)[6:] for d in DTYPES)}")
    flat = value.detach().cpu().reshape(-1)
    where = mask_of(name, tuple(value.shape), inside)
    if where is None:
        return flat
    taken = torch.from_numpy(_to_integers(flat)[where.numpy()]).view(value.dtype)  # faster than indexing a tensor
    if int((flat != 0).sum()) != int((taken != 0).sum()):
        raise WrongInput("update", f"{name} has entries outside of the broadcast positions")
    return taken


def mask_of(name: str, shape: tuple[int, ...], inside: Mask | None) -> Tensor | None:
    """Return the broadcast positions of a tensor, (n,); None: all."""
    if inside is None or name not in inside:
        return None
    if inside[name].shape != shape or inside[name].dtype != torch.bool:
        raise WrongInput("inside", f"must hold {name} as bool of the shape {shape}")
    return inside[name].detach().cpu().reshape(-1)


def fingerprint(inside: Mask) -> int:
    """Return the CRC-32 of a mask, so that no message is read with another mask."""
    _check_bool("inside", inside)
    checksum = 0
    for name in sorted(inside):
        bits = np.packbits(inside[name].detach().cpu().reshape(-1).numpy()).tobytes()
        checksum = zlib.crc32(bits, zlib.crc32(f"{name}{tuple(inside[name].shape)}".encode(), checksum))
    return checksum


def pack_values(flat: Tensor, kept: Bits | None) -> bytes:
    """Return the bits of the kept values, or of all values if `kept` is None; empty for a mask."""
    if not item_size(flat.dtype):
        return b""
    plain = torch.where(flat != 0, flat, 0) if kept is None else flat  # -0.0 is 0
    words = _to_integers(plain)
    taken = words if kept is None else words[kept]
    return taken.astype(taken.dtype.newbyteorder("<"), copy=False).tobytes()


def _decode(data: bytes, shapes: Shapes, inside: Mask | None, dtypes: Dtypes | None) -> Params:
    """Return the tensors in a message, which may be fewer than the shapes."""
    table, body = _open(data, shapes, dtypes)
    if table.inside != (None if inside is None else fingerprint(inside)):
        raise WrongInput("inside", "is not the mask that the message was encoded with")
    tensors = [Expected.from_entry(entry, inside) for entry in table.entries]
    own_bytes = [positions.own_bytes(one.entry, one.size) for one in tensors]
    parts = _split_body(body, [*own_bytes, table.stream, *(one.value_bytes for one in tensors)])
    payloads, stream, values = parts[: len(tensors)], parts[len(tensors)], parts[len(tensors) + 1 :]
    bitmaps = _bitmaps(stream, tensors)
    return {
        one.entry.name: one.read(payload, bitmaps.get(one.entry.name), value)
        for one, payload, value in zip(tensors, payloads, values, strict=True)
    }


def _open(data: bytes, shapes: Shapes, dtypes: Dtypes | None) -> tuple[TensorTable, memoryview]:
    """Return the table of a message, checked against the shapes and types, and the body behind the table."""
    if len(data) < HEAD or data[:4] != MAGIC:
        raise WrongInput("message", "is not one of secateur's, or is cut off: it must begin with SCTR")
    if data[4] != VERSION:
        raise WrongInput("message", f"has the version {data[4]}; this decoder reads {VERSION}")
    if zlib.crc32(memoryview(data)[9:]) != int.from_bytes(data[5:9], "little"):
        raise WrongInput("message", "has a wrong checksum: it was changed or cut off on its way")
    if len(data) > (most := largest_message(shapes)):
        raise WrongInput("message", f"has {len(data)} bytes; one of these shapes has at most {most}")
    end = HEAD + int.from_bytes(data[9:HEAD], "little")
    if end > len(data):
        raise WrongInput("message", "is damaged: its table is cut off")
    table = unpack(bytes(data[HEAD:end]), shapes)
    seen: set[str] = set()
    for entry in table.entries:
        if entry.name in seen:
            raise WrongInput("message", f"holds {entry.name} twice")
        if entry.shape != tuple(shapes[entry.name]):
            wanted = tuple(shapes[entry.name])
            raise WrongInput("message", f"{entry.name} has the shape {entry.shape}; {wanted} is expected")
        if dtypes is not None and entry.dtype != dtypes[entry.name]:
            raise WrongInput("message", f"{entry.name} is {entry.dtype}; must be {str(dtypes[entry.name])[6:]}")
        seen.add(entry.name)
    return table, memoryview(data)[end:]


def _split_body(body: memoryview, lengths: list[int]) -> list[bytes]:
    """Return the body in parts of these lengths, which must add up to the body's."""
    if sum(lengths) != len(body):
        raise WrongInput("message", f"has {len(body)} bytes of positions and values; its table asks for {sum(lengths)}")
    ends = np.cumsum([0, *lengths]).tolist()
    return [bytes(body[start:end]) for start, end in pairwise(ends)]


def _bitmaps(stream: bytes, tensors: list[Expected]) -> dict[str, rans.Bytes]:
    """Return the bitmaps in the shared stream, by tensor."""
    shared = [one for one in tensors if one.entry.coding == Coding.ENTROPY]
    if bool(stream) != bool(shared):
        raise WrongInput("message", "is damaged: the shared stream and the codings contradict each other")
    if not shared:
        return {}
    models = [(one.entry.count, (one.size + 7) // 8) for one in shared]
    ends = np.cumsum([size for _, size in models])[:-1]
    return dict(zip([one.entry.name for one in shared], np.split(rans.decode(stream, models), ends), strict=True))


def _to_integers(flat: Tensor) -> npt.NDArray[np.signedinteger]:
    """Return the bits of numbers as integers, in the same memory."""
    words: npt.NDArray[np.signedinteger] = flat.view(WORDS[flat.dtype.itemsize]).numpy()
    return words
