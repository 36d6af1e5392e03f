"""Artifacts of stages: files of tensors and data, named by the hash of their dependencies.

An artifact is a safetensors file that any reader opens. Its metadata has the data, and a sha256 of the file in which
the checksum's bytes are zeros. A file appears under its name only when it is complete.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import io
import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from secateur.errors import WrongInput

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 2  # of a run's folder; 1 had flat rows and no groups.jsonl
TEMPORARY = ".*.tmp"  # files that `write` may leave when it is killed

_MARK = b'\\"checksum\\":\\"'  # JSON inside a JSON string; the metadata comes first in the file, so the first is ours
_ZEROS = b"0" * 64
_TYPES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "complex64": "C64", "bool": "BOOL"}
_TYPES |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8"}  # as safetensors names them
_TYPES |= {"uint16": "U16", "uint32": "U32", "uint64": "U64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


@dataclass(frozen=True, eq=False)
class Result:
    """Result of a stage. A run returns it with tensors on the CPU, and with data as JSON reads them back."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    key: str = ""  # set by the run; later stages depend on it


@functools.cache
def version() -> str:
    """Return Secateur's version: of the installed package, else of the source tree, else "unknown"."""
    import importlib.metadata
    import tomllib

    try:
        return importlib.metadata.version("secateur-audit")
    except importlib.metadata.PackageNotFoundError:  # src is on the path, and nothing is installed
        try:
            project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
            return str(project["version"])
        except (OSError, ValueError, LookupError):
            return "unknown"


def key_of(name: str, depends: dict[str, Any]) -> str:
    """Return the sha256 of a stage's name, its dependencies and the version of Secateur."""
    whole = {"schema": SCHEMA, "secateur": version(), "name": name, "depends": depends}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode(result: Result, key: str) -> bytes:
    """Return a result as the bytes of a safetensors file, with its checksum."""
    file = io.BytesIO()
    _store(file, result, key)
    return file.getvalue()


def decode(content: bytes, key: str) -> Result | None:
    """Return the result that was encoded under this key, or None if any byte has changed."""
    start, end = _checksum_span(content)
    whole = hashlib.sha256()
    for part in (memoryview(content)[:start], _ZEROS, memoryview(content)[end:]):
        whole.update(part)
    if content[start:end] != whole.hexdigest().encode():
        return None
    try:  # whoever forges a file can make its checksum too
        begin = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:begin])
        metadata = json.loads(header["__metadata__"]["secateur"])
        if metadata["key"] != key or not isinstance(metadata["data"], dict):
            return None
        tensors = {name: _tensor(memoryview(content)[begin:], header[name]) for name in metadata["names"]}
        return Result(tensors, metadata["data"], key)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return None


def save(path: Path, result: Result, key: str) -> None:
    """Write a result to a file, tensor by tensor: a federation's state may fill half of the memory."""
    _write_by(path, lambda file: _store(file, result, key))


def _store(file: BinaryIO, result: Result, key: str) -> None:
    header = _header(result, key)
    whole = hashlib.sha256(header)
    file.write(header)
    for value in _sort_for_file(result.tensors).values():
        content = _content(value)
        file.write(content)
        whole.update(content)
    file.seek(_checksum_span(header)[0])
    file.write(whole.hexdigest().encode())


def _sort_for_file(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors in the order of a safetensors file: the widest numbers first, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0])))


def _header(result: Result, key: str) -> bytes:
    """Return the header: the metadata, with a checksum of zeros, and the offsets of the tensors."""
    metadata = {"checksum": _ZEROS.decode(), "schema": SCHEMA, "key": key}
    metadata |= {"names": list(result.tensors), "data": result.data}
    header: dict[str, Any] = {"__metadata__": {"secateur": json.dumps(metadata, separators=(",", ":"))}}
    end = 0
    for name, value in _sort_for_file(result.tensors).items():
        start, end = end, end + value.nbytes
        kind = _TYPES[str(value.dtype).removeprefix("torch.")]
        header[name] = {"dtype": kind, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _content(value: Tensor) -> memoryview:
    import torch

    flat = value.detach().cpu().contiguous().reshape(-1)
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data  # one entry may have any stride


def _tensor(content: memoryview, entry: dict[str, Any]) -> Tensor:
    """Return a tensor in memory that torch allocates: kernels may round by alignment."""
    import torch

    names = {kind: name for name, kind in _TYPES.items()}
    dtype, (start, end) = getattr(torch, names[entry["dtype"]]), entry["data_offsets"]
    if not 0 <= start <= end <= len(content) or math.prod(entry["shape"]) * dtype.itemsize != end - start:
        raise ValueError("the shape and the bytes of a tensor contradict each other")
    tensor = torch.empty(entry["shape"], dtype=dtype)
    tensor.reshape(-1).view(torch.uint8).numpy().data[:] = content[start:end]
    return tensor


def _checksum_span(content: bytes) -> tuple[int, int]:
    start = content.find(_MARK) + len(_MARK)
    return start, start + len(_ZEROS)


def write(path: Path, content: bytes, private: bool = False) -> None:
    """Write a file, completely or not at all, whatever happens meanwhile.

    Only the user can read a `private` file. A link under the file's name is replaced, never followed.
    """
    _write_by(path, lambda file: file.write(content), private)


def write_parts(path: Path, parts: Iterable[str], private: bool = False) -> None:
    """Write a file part by part, completely or not at all: a long text need not fit in memory."""
    _write_by(path, lambda file: file.writelines(part.encode() for part in parts), private)


def _write_by(path: Path, fill: Callable[[BinaryIO], object], private: bool = False) -> None:
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")  # a name that nobody can prepare
    with explained(path):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(temporary, flags, 0o600 if private else 0o666), "wb") as file:
                fill(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the new name outlives a power cut too
        finally:
            os.close(folder)


class NoSpace(WrongInput):
    """Error of a full disk, or of a user's quota."""


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn an error of the file system into one sentence about this path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            advice = "finished stages are saved: free some space and rerun the same command"
            raise NoSpace("out", f"no space left to write {path}; {advice}") from error
        raise WrongInput("out", f"{path} cannot be used ({error.strerror}); use a writable folder") from error
