"""Public files: located in the user's folder or the cache, else downloaded and checked before use."""

from __future__ import annotations

import hashlib
import http.client
import logging
import os
import urllib.parse
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from secateur.errors import WrongInput

LARGEST = 4 << 30  # bytes; no public file here is larger, so a server that sends more sends another file
CHUNK = 1 << 20
LOCAL = ("localhost", "127.0.0.1", "::1")
SHA256 = {  # by the published md5; an md5 detects damage, but can be forged
    "f68b3c2dcbeaaa9fbdd348bbdeb94873": "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",  # MNIST
    "d53e105ee54ea40749a09fcbcd1e9432": "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    "9fb629c4189551a2d022fa330f9573f3": "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    "ec29112dd5afa0611ce80d1b7f02629c": "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    "8d4fb7e6c68d591d4c3dfef9ec88bf0d": "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",  # Fashion
    "25c81989df183df01b3e8a0aad5dffbe": "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
    "bef4ecab320f06d8554ea6380940ec79": "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
    "bb300cfdad3c16e7a12a480ee83cd310": "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
    "e26dedcc434d2e4c54c9b2d4a06d8373": "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8",  # SVHN
    "eb5a983be6a315427106f1b164d9cef3": "cdce80dfb2a2c4c6160906d0bd7c68ec5a99d7ca4831afa54f09182025b6a75b",
    "c32a1d4ab5d03f1284b67883e8d87530": "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",  # CIFAR-10
    "03b5dce01913d631647c71ecec9e9cb8": "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",  # CIFAR-100
    "0ddbebfc56344752028fda72602aaade": "936d0b95ae0f04f1f7b18a2b7e8c55776c3e887d102f645bcee752d1a6626a32",  # CHMNIST
}

log = logging.getLogger(__name__)


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
        _check_scheme(source.address)
        with urllib.request.urlopen(source.address, timeout=60) as response, part.open("wb") as file:  # noqa: S310
            _check_scheme(response.geturl())  # a server may send its reader elsewhere
            _copy(response, file, source.name, int(response.headers.get("Content-Length") or 0))
        _check_sum(source, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _check_scheme(address: str) -> None:
    """Refuse an address that is not https: anybody on the way could change the file. This machine's own are allowed."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in LOCAL):
        raise OSError(f"{parts.scheme}://{parts.hostname} is not https")


def _check_sum(source: PublicFile, path: Path) -> None:
    """Refuse a file that is not the published one; warn if there is no sha256 to decide it."""
    checksum = md5_of(path)
    if source.md5 and checksum != source.md5:
        raise OSError(f"its md5 is {checksum}, published is {source.md5}")
    if source.md5 in SHA256:
        with path.open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != SHA256[source.md5]:
                raise OSError("it has the published md5 and another sha256: it is forged")
    else:
        how = "its md5 alone, which can be forged" if source.md5 else "nothing: no checksum is published"
        log.warning("data: %s was downloaded over https and checked by %s", source.name, how)


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
