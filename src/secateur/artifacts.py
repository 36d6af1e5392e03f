"""What a stage leaves behind: one file of tensors and data, named by the hash of what they depend on.

An artifact is a safetensors file that any reader opens. Its metadata holds the data, and a sha256 of the whole file
taken with zeros in the checksum's own place. Files appear under their names whole or not at all.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from secateur.errors import WrongInput

if TYPE_CHECKING:
    from torch import Tensor

SCHEMA = 1  # of every file in a run's folder
TEMPORARY = ".*.tmp"  # what `write` may leave behind when it is killed

_MARK = b'\\"checksum\\":\\"'  # JSON inside a JSON string; the metadata comes first in the file, so the first is ours
_ZEROS = b"0" * 64


@dataclass(frozen=True, eq=False)
class Result:
    """What a stage computes. Its tensors are on the CPU and its data is what JSON makes of it once a run returns it."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    key: str = ""  # given by the run: what later stages depend on


@functools.cache
def version() -> str:
    """Secateur's version."""
    import importlib.metadata

    return importlib.metadata.version("secateur")


def key_of(name: str, depends: dict[str, Any]) -> str:
    """The sha256 of all that a stage's result depends on: its name, what it is given, and the code's version."""
    whole = {"schema": SCHEMA, "secateur": version(), "name": name, "depends": depends}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def encode(result: Result, key: str) -> bytes:
    """A result as the bytes of a safetensors file, with its checksum."""
    import torch
    from safetensors.torch import save

    # safetensors refuses tensors that share memory or aren't contiguous
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in result.tensors.items()
    }
    metadata = {
        "checksum": _ZEROS.decode(),
        "schema": SCHEMA,
        "key": key,
        "names": list(tensors),
        "data": result.data,
    }
    content = save(tensors, metadata={"secateur": json.dumps(metadata, separators=(",", ":"))})
    tensors.clear()  # a federation's state may fill half of the memory: never more than two copies of it
    start, end = _checksum_place(content)
    parts = memoryview(content)
    return b"".join((parts[:start], _checksum(content), parts[end:]))


def decode(content: bytes, key: str) -> Result | None:
    """The result that was encoded under this key, or None when even one byte is not as it was."""
    from safetensors.torch import load

    start, end = _checksum_place(content)
    if content[start:end] != _checksum(content):
        return None
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = json.loads(header["__metadata__"]["secateur"])
    if metadata["key"] != key:
        return None
    tensors = load(content)
    # safetensors sorts the names and aligns by chance; kernels may round by alignment, so torch allocates them anew
    return Result({name: tensors[name].clone() for name in metadata["names"]}, metadata["data"], key)


def _checksum_place(content: bytes) -> tuple[int, int]:
    start = content.find(_MARK) + len(_MARK)
    return start, start + len(_ZEROS)


def _checksum(content: bytes) -> bytes:
    start, end = _checksum_place(content)
    whole = hashlib.sha256()
    for part in (memoryview(content)[:start], _ZEROS, memoryview(content)[end:]):
        whole.update(part)
    return whole.hexdigest().encode()


def write(path: Path, content: bytes) -> None:
    """Put a file in its place, whole or not at all, whatever happens meanwhile."""
    temporary = path.with_name(f".{path.name}.tmp")
    with explained(path):
        try:
            with temporary.open("wb") as file:
                file.write(content)
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


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Tell the user in one sentence what keeps a run from using this place."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"no space left to write {path}; what was finished is kept: free some space and start again"
        else:
            message = f"{path} cannot be used ({error.strerror}); give a folder that can be written"
        raise WrongInput("out", message) from error
