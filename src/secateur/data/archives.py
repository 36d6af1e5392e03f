"""Readers of archives and pickles: no file is extracted, no content is run, and the size of the output is bounded.

The pickles are those of CIFAR's python archives. Their reader calls no function that a pickle names.
"""

from __future__ import annotations

import gzip
import io
import lzma
import math
import pickle
import stat
import struct
import sys
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Any, BinaryIO, Literal, cast

import numpy as np

from secateur.errors import WrongInput

ARCHIVES = (".tgz", ".tar.gz", ".tar", ".zip", ".npz")
FORGED = (TypeError, LookupError, ArithmeticError, AttributeError, SyntaxError, struct.error)  # of headers
DAMAGE = (
    *(EOFError, OSError, RuntimeError, ValueError),
    *(zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, *FORGED),
)
HEADER = (MemoryError, tokenize.TokenError)  # numpy parses headers as Python
IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


@dataclass(frozen=True)
class ArchiveLimits:
    """Limits on the size of an archive's content.

    The largest public data set (Texas) has 0.9 GB at a ratio below 100.
    """

    total: int = 4 << 30  # unpacked bytes of one archive
    ratio: int = 200  # unpacked bytes per packed byte
    free: int = 16 << 20  # bytes that are allowed at any ratio

    def limit_of(self, path: Path) -> int:
        """Return the number of bytes that may be unpacked from the file at `path`."""
        with reading(path):
            return min(self.total, max(self.free, self.ratio * path.stat().st_size))


LIMITS = ArchiveLimits()


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors that a reader raises on a damaged file into one WrongInput."""
    try:
        yield
    except DAMAGE as error:
        detail = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise WrongInput("data", f"{path} is truncated, damaged or unreadable ({detail}); get it again") from error


class Guarded(io.RawIOBase):
    """A stream that raises WrongInput after more than `limit` bytes, and on any read error."""

    def __init__(self, inner: IO[bytes], path: Path, limit: int) -> None:
        super().__init__()
        self.inner, self.path, self.left = inner, path, limit

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer; the standard library's buffered readers call this method."""
        with reading(self.path):
            data = self.inner.read(len(buffer))
        self.left -= len(data)
        if self.left < 0:
            raise _bomb(self.path)
        buffer[: len(data)] = data
        return len(data)


def contents(path: Path, limits: ArchiveLimits = LIMITS) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    """Yield the inner name and the stream of every file of a folder or an archive (tar, tgz, zip, npz).

    A plain file yields itself. Read a stream before asking for the next one. The files of a folder are sorted, and
    their names start with the folder's name, as in an archive of that folder.
    """
    if path.is_dir():
        for file in sorted(file for file in path.rglob("*") if file.is_file()):
            with reading(path), file.open("rb") as stream:
                yield PurePosixPath(path.resolve().name, *file.relative_to(path).parts), stream
    elif not path.name.lower().endswith(ARCHIVES):
        with reading(path), path.open("rb") as stream:
            yield PurePosixPath(path.name), stream
    elif path.name.lower().endswith((".zip", ".npz")):
        yield from _zip(path, limits)
    else:
        yield from _tar(path, limits)


def _tar(path: Path, limits: ArchiveLimits) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    allowed = limits.limit_of(path)
    with reading(path), path.open("rb") as file:
        compressed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        plain = cast(BinaryIO, gzip.GzipFile(fileobj=file) if compressed else file)
        outer = io.BufferedReader(Guarded(plain, path, allowed))
        # read as a stream, so that the skipped members count against the limit too
        with tarfile.open(fileobj=outer, mode="r|") as archive:
            for member in archive:
                name = _check_entry(path, member.name)
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise WrongInput("data", f"{path} holds {member.name!r}, a link or device; allowed are plain files")
                if member.size > allowed:
                    raise _bomb(path)
                inner = archive.extractfile(member)
                yield name, io.BufferedReader(Guarded(cast(IO[bytes], inner), path, allowed))
        while outer.read(1 << 20):  # read to the end: gzip compares its checksum there
            pass


def _zip(path: Path, limits: ArchiveLimits) -> Iterator[tuple[PurePosixPath, BinaryIO]]:
    allowed = limits.limit_of(path)
    with reading(path), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if sum(member.file_size for member in members) > allowed:
            raise _bomb(path)
        for member in members:
            name = _check_entry(path, member.filename)
            if member.is_dir():
                continue
            kind = stat.S_IFMT(member.external_attr >> 16)
            if kind not in (0, stat.S_IFREG):
                raise WrongInput("data", f"{path} holds {member.filename!r}, a link or device; allowed are plain files")
            with archive.open(member) as inner:
                yield name, io.BufferedReader(Guarded(inner, path, member.file_size))


def _check_entry(path: Path, name: str) -> PurePosixPath:
    inside = PurePosixPath(name.replace("\\", "/"))
    if not name or inside.is_absolute() or ".." in inside.parts or PureWindowsPath(name).drive:
        raise WrongInput("data", f"{path} holds {name!r}, which leaves the archive; get it from its public address")
    return inside


def _bomb(path: Path) -> WrongInput:
    return WrongInput("data", f"{path} unpacks to far more than its size allows; get it from its public address")


def read_idx(path: Path, limits: ArchiveLimits = LIMITS) -> tuple[np.ndarray, bytes]:
    """Return the array of an IDX file (MNIST's format), plain or .gz, and its uncompressed bytes.

    The header states the size, and exactly that many bytes are read.
    """
    with reading(path), path.open("rb") as file:
        stream: IO[bytes] = cast(IO[bytes], gzip.GzipFile(fileobj=file)) if path.suffix == ".gz" else file
        magic = stream.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_TYPES or not 1 <= magic[3] <= 4:
            raise ValueError("it does not start as an IDX file does")
        kind = np.dtype(IDX_TYPES[magic[2]])
        sizes = stream.read(4 * magic[3])
        shape = [int(size) for size in np.frombuffer(sizes, dtype=">u4")]
        if len(shape) != magic[3]:
            raise ValueError("its header is cut off")
        size = math.prod(shape) * kind.itemsize
        if size > limits.limit_of(path):
            raise _bomb(path)
        data = stream.read(size)
        if len(data) != size or stream.read(1):
            raise ValueError(f"its header promises {size} bytes and it holds another number")
    return np.frombuffer(data, dtype=kind).reshape(shape), magic + sizes + data


def read_npz(path: Path, limits: ArchiveLimits = LIMITS) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file by name; refuse object arrays, which numpy stores as pickles."""
    arrays = {}
    for name, stream in contents(path, limits):
        with reading(path), _reading_header(name):
            arrays[name.stem] = np.lib.format.read_array(io.BytesIO(stream.read()), allow_pickle=False)
            _check_text(name, arrays[name.stem])
    return arrays


def _check_text(name: object, array: np.ndarray) -> None:
    """Refuse records, and texts of characters that do not exist: Python fails on them where they are used."""
    codes = array.astype(array.dtype.newbyteorder("=")).reshape(-1).view(np.uint32) if array.dtype.kind == "U" else None
    if array.dtype.kind == "V" or (codes is not None and codes.size and codes.max() > sys.maxunicode):
        raise ValueError(f"{name} holds neither numbers nor texts")


@contextmanager
def _reading_header(name: object) -> Iterator[None]:
    """Turn the errors of numpy on a damaged or forged header into ValueError."""
    try:
        yield
    except HEADER as error:
        raise ValueError(f"{name} has a damaged header, or promises more than fits in memory") from error


def map_npz(path: Path, limits: ArchiveLimits = LIMITS) -> dict[str, np.ndarray]:
    """Return the arrays of a .npz file by name; those that are stored uncompressed are mapped, not read.

    A mapped array takes no memory of its own. Compressed arrays are read as by `read_npz`.
    """
    with reading(path), zipfile.ZipFile(path) as archive, path.open("rb") as file:
        stored = [member for member in archive.infolist() if member.compress_type == zipfile.ZIP_STORED]
        if len(stored) != len(archive.infolist()):
            return read_npz(path, limits)
        return {PurePosixPath(member.filename).stem: _map_member(path, file, member) for member in stored}


def _map_member(path: Path, file: BinaryIO, member: zipfile.ZipInfo) -> np.ndarray:
    """Map one array of an archive: it begins behind the archive's header of the file, and its own header."""
    file.seek(member.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise ValueError(f"{member.filename} does not begin where the archive says")
    names = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
    start = file.seek(member.header_offset + 30 + names)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    kind = np.lib.format.read_magic(file)
    if kind not in read:
        raise ValueError(f"{member.filename} is of an unknown version")
    with _reading_header(member.filename):
        shape, fortran, dtype = read[kind](file)
    size = math.prod(shape) * dtype.itemsize
    if dtype.hasobject or file.tell() + size > start + member.file_size:
        raise ValueError(f"{member.filename} holds objects, or less than its header promises")
    if not size:
        return np.empty(shape, dtype)
    order: Literal["F", "C"] = "F" if fortran else "C"
    array = np.memmap(path, dtype, mode="c", offset=file.tell(), shape=shape, order=order)
    _check_text(member.filename, array)
    return array


class Kind:
    """Stand-in for numpy.dtype that stores only the name."""

    def __init__(self, name: bytes | str, *_: object) -> None:
        self.name = name.decode("latin1") if isinstance(name, bytes) else name

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and alignment, which a byte does not have."""


class Array:
    """Stand-in for numpy.ndarray that stores shape and bytes."""

    value: np.ndarray

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Read numpy's state: version, shape, dtype, Fortran order, bytes."""
        _, shape, kind, fortran, data = state
        if not isinstance(kind, Kind) or kind.name not in ("u1", "uint8") or fortran:
            raise ValueError("only arrays of bytes in C order are allowed")
        self.value = np.frombuffer(data, dtype=np.uint8).reshape(shape)


def _array(*_: object) -> Array:
    return Array()


def _encode(text: str, encoding: str | bytes = "latin1") -> bytes:
    if encoding not in ("latin1", b"latin1"):
        raise ValueError(f"encoding {encoding!r} is not allowed")
    return text.encode("latin1")


STANDS_FOR: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): Array,
    ("numpy", "dtype"): Kind,
    ("_codecs", "encode"): _encode,
}


class PickleReader(pickle._Unpickler):
    """Unpickler that resolves five names, each to a harmless function of this module.

    It is the pure-Python unpickler: one large memo index can make the compiled one fill the memory.
    """

    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        """Return one of the five stand-ins; refuse other names, because importing makes a pickle dangerous."""
        if (module, name) not in STANDS_FOR:
            raise pickle.UnpicklingError(f"it names {module}.{name}, and nothing but arrays of bytes is allowed")
        return STANDS_FOR[module, name]


def read_pickle(data: bytes, path: Path) -> dict[str, Any]:
    """Return a pickled dictionary of byte arrays, numbers and names; keys that are byte strings become text."""
    try:
        loaded = PickleReader(io.BytesIO(data), encoding="bytes").load()
        if not isinstance(loaded, dict):
            raise ValueError("it is not a dictionary")
        names = [key.decode("latin1") if isinstance(key, bytes) else str(key) for key in loaded]
        values = [value.value if isinstance(value, Array) else value for value in loaded.values()]
        return dict(zip(names, values, strict=True))
    except Exception as error:  # a hostile pickle can make the reader fail in any way
        detail = str(error) or type(error).__name__
        raise WrongInput("data", f"{path} is not a safe pickle of arrays ({detail}); get it again") from error
