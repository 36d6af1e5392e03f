"""Public files: found in the user's folder or the cache, else downloaded and checked before they are used."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from secateur.errors import WrongInput

LARGEST = 4 << 30  # no public file here is larger; a server that sends more is not sending it
CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """One public file: where it lies under a data folder, where it comes from, its published md5 ('' for none)."""

    path: str
    address: str
    md5: str = ""

    @property
    def name(self) -> str:
        """The file's own name."""
        return self.path.rpartition("/")[2]


def md5(data: bytes) -> str:
    """The checksum that these data sets were published with; it finds damage, it is no proof against forgery."""
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


def md5_of(path: Path) -> str:
    """The checksum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def cache() -> Path:
    """Where downloads go when no folder is named: $XDG_CACHE_HOME/secateur or ~/.cache/secateur."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "secateur"


def find(paths: Sequence[str], folder: Path | None = None) -> Path | None:
    """The first of some files or folders that exists: in the named folder, else in $SECATEUR_DATA, else in the cache.

    A named folder may also be the inner one: MNIST/raw/x.gz is found from the folder above MNIST, from MNIST, and
    directly in a folder of any name.
    """
    if folder is not None:
        if not folder.is_dir():
            raise WrongInput("data", f"{folder} is not a folder; name one that holds {paths[0]}")
        tries = [where for path in paths for where in _inside(folder.resolve(), Path(path).parts)]
    else:
        named = os.environ.get("SECATEUR_DATA")
        roots = [Path(named), cache()] if named else [cache()]
        tries = [root / path for root in roots for path in paths]
    return next((where for where in tries if where.exists()), None)


def _inside(folder: Path, parts: tuple[str, ...]) -> list[Path]:
    found = [folder.joinpath(*parts), folder / parts[-1]]
    found += [folder.joinpath(*parts[i:]) for i in range(1, len(parts)) if folder.parts[-i:] == parts[:i]]
    return [*found, folder] if folder.name == parts[-1] else found


def fetch(source: Source, folder: Path | None = None, download: bool = True, also: Sequence[str] = ()) -> Path:
    """The file, or one of the places in `also` that may hold the same data; downloaded when there is none of them."""
    found = find([source.path, *also], folder)
    if found is not None:
        return found
    target = (folder or cache()) / source.path
    if not download:
        raise _wanted(source, target, "is not there and downloads are turned off")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _download(source, target)
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise _wanted(source, target, f"is not there and could not be downloaded ({reason})") from error
    return target


def _wanted(source: Source, target: Path, problem: str) -> WrongInput:
    return WrongInput("data", f"{source.name} {problem}; get it from {source.address} and put it at {target}")


def _download(source: Source, target: Path) -> None:
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        with urllib.request.urlopen(source.address, timeout=60) as response, part.open("wb") as file:
            _copy(response, file, source.name, int(response.headers.get("Content-Length") or 0))
        found = md5_of(part)
        if source.md5 and found != source.md5:
            raise OSError(f"its md5 is {found}, published is {source.md5}")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _copy(response: BinaryIO, file: BinaryIO, name: str, size: int) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    done = 0
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
