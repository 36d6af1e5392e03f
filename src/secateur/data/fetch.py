"""Public files: located in the user's folder or the cache, else downloaded and checked before use."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from secateur.errors import WrongInput

LARGEST = 4 << 30  # bytes; no public file here is larger, so a server that sends more sends another file
CHUNK = 1 << 20


@dataclass(frozen=True)
class PublicFile:
    """A public file: its path under a data folder, its address, and its published md5 ('' if none)."""

    path: str
    address: str
    md5: str = ""

    @property
    def name(self) -> str:
        """The file's name without its folders."""
        return self.path.rpartition("/")[2]


def md5(data: bytes) -> str:
    """Return the md5, the checksum that these data sets are published with.

    An md5 detects damage, but not forgery.
    """
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def md5_of(path: Path) -> str:
    """Return the md5 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def cache() -> Path:
    """Return the default folder of downloads: $XDG_CACHE_HOME/secateur or ~/.cache/secateur."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    if not folder.is_absolute():  # neither the variable nor a home
        raise WrongInput("data_folder", "is missing, and there is no home folder; set it, or SECATEUR_DATA")
    return folder / "secateur"


def find(paths: Sequence[str], folder: Path | None = None) -> Path | None:
    """Return the first path that exists: in `folder` if named, else in $SECATEUR_DATA, then in the cache.

    A named folder may also be an inner one. MNIST/raw/x.gz is recognised from the folder above MNIST, from MNIST
    itself, and directly in a folder of any name.
    """
    if folder is not None:
        if not folder.is_dir():
            raise WrongInput("data", f"{folder} is not a folder; name one that holds {paths[0]}")
        candidates = [candidate for path in paths for candidate in _list_files(folder.resolve(), Path(path).parts)]
    else:
        named = os.environ.get("SECATEUR_DATA")
        roots = [Path(named)] if named else []
        with suppress(WrongInput):  # of a user without a home
            roots.append(cache())
        candidates = [root / path for root in roots for path in paths]
    return next((candidate for candidate in candidates if candidate.exists()), None)


def _list_files(folder: Path, parts: tuple[str, ...]) -> list[Path]:
    candidates = [folder.joinpath(*parts), folder / parts[-1]]
    candidates += [folder.joinpath(*parts[i:]) for i in range(1, len(parts)) if folder.parts[-i:] == parts[:i]]
    return [*candidates, folder] if folder.name == parts[-1] else candidates


def fetch(source: PublicFile, folder: Path | None = None, download: bool = True, also: Sequence[str] = ()) -> Path:
    """Return the path of the file, or of an alternative in `also` with the same data; download it if none exists."""
    existing = find([source.path, *also], folder)
    if existing is not None:
        return existing
    target = (folder or cache()) / source.path
    if not download:
        raise _explain_missing(source, target, "is missing and downloads are turned off")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _download(source, target)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise _explain_missing(source, target, f"is missing and could not be downloaded ({reason})") from error
    return target


def _explain_missing(source: PublicFile, target: Path, problem: str) -> WrongInput:
    return WrongInput("data", f"{source.name} {problem}; get it from {source.address} and put it at {target}")


def _download(source: PublicFile, target: Path) -> None:
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(source.address, timeout=60) as response, part.open("wb") as file:
            _copy(response, file, source.name, int(response.headers.get("Content-Length") or 0))
        checksum = md5_of(part)
        if source.md5 and checksum != source.md5:
            raise OSError(f"its md5 is {checksum}, published is {source.md5}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _copy(response: BinaryIO, file: BinaryIO, name: str, size: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    title, done = TextColumn("{task.description}"), 0
    columns = (title, BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=size or None)
        while chunk := response.read(CHUNK):
            done += len(chunk)
            if done > (size or LARGEST):
                raise OSError("the server sent more than it promised")
            file.write(chunk)
            progress.update(task, completed=done)
    if size and done != size:
        raise OSError(f"the connection ended after {done} of {size} bytes")
