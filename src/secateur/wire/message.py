"""Updates and masks to bytes and back."""

from __future__ import annotations

import zlib
from itertools import pairwise

import numpy as np
import torch

from secateur.errors import WrongInput
from secateur.interfaces import Mask, Params
from secateur.wire import entries, positions, rans
from secateur.wire.entries import Expected
from secateur.wire.table import HEAD, MAGIC, VERSION, Coding, Entry, Shapes, Table, item_size, pack, unpack


def encode(update: Params, *, inside: Mask | None = None) -> bytes:
    """An update as bytes: its entries that are not 0, and where they are.

    What is kept arrives bit for bit, NaN too; -0.0 counts as 0 and arrives as 0.0. With `inside`, positions that both
    sides know (ADGP's broadcast), only entries there are coded, and every other one must be 0.

    Example:
        >>> update = {"w": torch.tensor([0.0, 1.5, 0.0])}
        >>> decode(encode(update), {"w": (3,)})["w"].tolist()
        [0.0, 1.5, 0.0]
    """
    flat = {name: entries.within(name, value, inside) for name, value in update.items()}
    kept = {name: (value != 0).numpy() for name, value in flat.items()}
    coded = positions.code(kept, {name: item_size(value.dtype) for name, value in flat.items()})
    listed = tuple(
        Entry(name, value.dtype, tuple(value.shape), coded[name].count, coded[name].coding, len(coded[name].own))
        for name, value in update.items()
    )
    shared = [one for one in coded.values() if one.coding == Coding.ENTROPY]
    bitmaps = [one.bitmap for one in shared]
    stream = rans.encode(np.concatenate(bitmaps), [(one.count, len(one.bitmap)) for one in shared]) if shared else b""
    table = pack(Table(None if inside is None else entries.fingerprint(inside), len(stream), listed))
    values = [entries.values(flat[e.name], None if e.coding == Coding.DENSE else kept[e.name]) for e in listed]
    body = b"".join([len(table).to_bytes(4, "little"), table, *(one.own for one in coded.values()), stream, *values])
    return MAGIC + bytes([VERSION]) + zlib.crc32(body).to_bytes(4, "little") + body


def decode(data: bytes, shapes: Shapes, *, inside: Mask | None = None) -> Params:
    """The update in a message, on the CPU; refused (WrongInput) where it is not exactly one of these shapes.

    `inside` must be the mask that it was encoded with.
    """
    found = _decode(data, shapes, inside)
    if missing := [name for name in shapes if name not in found]:
        raise WrongInput("message", f"lacks {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}")
    return {name: found[name] for name in shapes}


def encode_mask(mask: Mask) -> bytes:
    """A mask as bytes: bits, coded as an update's positions are."""
    for name, where in mask.items():
        if where.dtype != torch.bool:
            raise WrongInput("mask", f"{name} is {where.dtype}; a mask is bool")
    return encode(mask)


def decode_mask(data: bytes, shapes: Shapes) -> Mask:
    """The mask in a message. It may name fewer tensors than the shapes do: those are kept whole."""
    found = _decode(data, shapes, None)
    for name, where in found.items():
        if where.dtype != torch.bool:
            raise WrongInput("message", f"{name} is {where.dtype}; a mask is bool")
    return {name: found[name] for name in shapes if name in found}


def _decode(data: bytes, shapes: Shapes, inside: Mask | None) -> Params:
    """Whatever tensors of these shapes the message holds."""
    table, body = _opened(data, shapes)
    if table.inside != (None if inside is None else entries.fingerprint(inside)):
        raise WrongInput("inside", "is not the mask that the message was encoded with")
    tensors = [Expected.of(entry, inside) for entry in table.entries]
    own_bytes = [positions.own_bytes(one.entry, one.size) for one in tensors]
    parts = _cut(body, [*own_bytes, table.stream, *(one.value_bytes for one in tensors)])
    owns, stream, values = parts[: len(tensors)], parts[len(tensors)], parts[len(tensors) + 1 :]
    bitmaps = _bitmaps(stream, tensors)
    return {
        one.entry.name: one.read(own, bitmaps.get(one.entry.name), value)
        for one, own, value in zip(tensors, owns, values, strict=True)
    }


def _bitmaps(stream: bytes, tensors: list[Expected]) -> dict[str, rans.Bytes]:
    """The bitmaps of those tensors that the shared stream holds."""
    shared = [one for one in tensors if one.entry.coding == Coding.ENTROPY]
    if bool(stream) != bool(shared):
        raise WrongInput("message", "is damaged: the shared stream and the codings contradict each other")
    if not shared:
        return {}
    models = [(one.entry.count, (one.size + 7) // 8) for one in shared]
    ends = np.cumsum([size for _, size in models])[:-1]
    return dict(zip([one.entry.name for one in shared], np.split(rans.decode(stream, models), ends), strict=True))


def _opened(data: bytes, shapes: Shapes) -> tuple[Table, memoryview]:
    """The table of a message, checked against the shapes, and what follows it."""
    if len(data) < HEAD or data[:4] != MAGIC:
        raise WrongInput("message", "is not one of secateur's, or is cut off: it must begin with SCTR")
    if data[4] != VERSION:
        raise WrongInput("message", f"has the version {data[4]}; this decoder reads {VERSION}")
    if zlib.crc32(memoryview(data)[9:]) != int.from_bytes(data[5:9], "little"):
        raise WrongInput("message", "has a wrong checksum: it was changed or cut off on its way")
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
        seen.add(entry.name)
    return table, memoryview(data)[end:]


def _cut(body: memoryview, lengths: list[int]) -> list[bytes]:
    """The body in parts of these lengths, which must be all of it."""
    if sum(lengths) != len(body):
        raise WrongInput("message", f"has {len(body)} bytes of positions and values; its table asks for {sum(lengths)}")
    ends = np.cumsum([0, *lengths]).tolist()
    return [bytes(body[start:end]) for start, end in pairwise(ends)]
