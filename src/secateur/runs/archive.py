"""Archive of a study: the rows of runs with their provenance, in one compressed file (NAME.jsonl.xz).

The first line has the provenance: studies, scale, command, commit, seeds and machine. Groups and notes follow, then
short rows (rows.py). Histograms and class means are kept as well, since some tables are made of them. Curves, pictures
and single records are not. An archive may come from a stranger: its size is bounded, and no path in it is believed.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from secateur.errors import WrongInput, printable
from secateur.runs.artifacts import SCHEMA, write
from secateur.runs.folder import DAMAGE, load_config, load_figures, load_marker, load_rows
from secateur.runs.rows import Groups, Row, pack

SUFFIX = ".jsonl.xz"
MOST_BYTES = 2**29  # of the lines of an archive
MOST_MEMORY = 2**27  # of the decompressor; the strongest preset needs half
MOST_TEXT = 20_000  # characters of the provenance
KEPT = ("histogram", "classes")  # kinds of figures
PATHS = re.compile(r"(--(?:data-folder|out)[ =])(\"[^\"]*\"|'[^']*'|\S+)")


class Archive(NamedTuple):
    """The content of an archive."""

    provenance: dict[str, Any]
    rows: list[Row]
    figures: list[dict[str, Any]]

    @property
    def studies(self) -> list[str]:
        """The studies whose tables the rows fill."""
        return [str(name) for name in self.provenance.get("studies", [])]

    @property
    def scale(self) -> str:
        """The scale of the studies; empty if there is none."""
        return str(self.provenance.get("scale", ""))


def is_archive(path: Path) -> bool:
    """Return True if a path names an archive, not the folder of a run."""
    return path.name.endswith(SUFFIX)


def write_archive(
    path: Path, rows: Iterable[Row], provenance: Mapping[str, Any], figures: Iterable[Mapping[str, Any]] = ()
) -> None:
    """Write rows into one compressed file, completely or not at all.

    Args:
        path: the file, NAME.jsonl.xz.
        rows: the measurements.
        provenance: the studies, command, commit, seeds and machine behind them.
        figures: those of which tables are made; other kinds are left out.
    """
    packed = pack(rows)
    kept = [{"schema": SCHEMA, "figure": dict(figure)} for figure in figures if figure["kind"] in KEPT]
    lines = [{"schema": SCHEMA, "provenance": dict(provenance)}, *packed["groups"], *kept, *packed["rows"]]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
    write(path, lzma.compress(text.encode(), preset=9))


def read_archive(path: Path) -> Archive:
    """Return the content of a file of `write_archive`; refuse another file, and one that decompresses to too much."""
    try:
        if not path.is_file():
            raise WrongInput("rows", f"{path} is no file; name an archive of rows")
        with path.open("rb") as file:
            text = _decompress(path, file.read(MOST_BYTES))
        first, *lines = json.loads(b"[" + b",".join(text.splitlines()) + b"]")
        if not isinstance(first["provenance"], dict) or len(json.dumps(first["provenance"])) > MOST_TEXT:
            raise ValueError("its provenance is no short object")
        figures = [line["figure"] for line in lines if "figure" in line]
        groups = Groups(line for line in lines if "schema" in line and "figure" not in line)
        rows = [groups.expand(line) for line in lines if "schema" not in line]
        if not all(isinstance(figure, dict) and figure["kind"] in KEPT for figure in figures):
            raise ValueError("it holds a figure of another kind")
        if not isinstance(first["provenance"].get("studies", []), list):
            raise ValueError("its studies are no list")
        return Archive(first["provenance"], rows, figures)
    except OSError as error:
        raise WrongInput("rows", f"{path} cannot be read ({error.strerror}); name an archive of rows") from error
    except (lzma.LZMAError, EOFError, *DAMAGE) as error:
        problem = printable(f"{path} is no archive of rows ({error})")
        raise WrongInput("rows", f"{problem}; write it by secateur report RUN --rows FILE{SUFFIX}") from error


def _decompress(path: Path, content: bytes) -> bytes:
    """Return the decompressed bytes; refuse more than the bound before they are in memory."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
    text = decompressor.decompress(content, MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise WrongInput("rows", f"{path} decompresses to more than {MOST_BYTES >> 20} MiB; archive fewer runs at once")
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("its end is missing, or something follows it")
    return text


def gather_runs(folders: Sequence[Path], studies: Sequence[str] = (), commit: str | None = None) -> Archive:
    """Return the rows of runs, with their provenance; it says which runs were stopped before their end.

    Args:
        folders: the runs.
        studies: the studies whose tables the rows fill; by default those that the runs were.
        commit: the commit of the code; by default that of the checkout that runs now.
    """
    markers = [load_marker(folder) for folder in folders]
    commands = [PATHS.sub(r"\1PATH", str(marker.get("command", ""))) for marker in markers]
    texts = [f"{load_config(folder)}\n{command}" for folder, command in zip(folders, commands, strict=True)]
    provenance = {
        "studies": [*studies] or _distinct(_word_after(r"^study:|reproduce", text) for text in texts),
        "scale": ", ".join(_distinct(_word_after(r"^scale:|--scale", text) for text in texts)),
        "command": "; ".join(_distinct(commands)),
        "commit": commit or find_commit(),
        "seeds": sorted({seed for marker in markers for seed in marker.get("seeds", [])}),
        "machine": ", ".join(_distinct(f"{marker.get('device')}, torch {marker.get('torch')}" for marker in markers)),
        "date": max(str(marker.get("finished") or marker.get("started")) for marker in markers)[:10],
    }
    if stopped := sum(not marker.get("finished") for marker in markers):
        provenance["stopped before the end"] = f"{stopped} of {len(markers)} runs; their finished measurements count"
    rows = [row for folder in folders for row in load_rows(folder)]
    figures = [figure for folder in folders for figure in load_figures(folder)]
    return Archive(provenance, rows, figures)


def _word_after(words: str, text: str) -> str:
    match = re.search(rf"(?:{words})[ =]([\w.-]+)", text, re.MULTILINE)
    return match[1] if match else ""


def _distinct(texts: Iterable[str]) -> list[str]:
    return [text for text in dict.fromkeys(texts) if text]


def find_commit() -> str:
    """Return the commit of the checkout that this code lies in; refuse where there is none."""
    folder = Path(__file__).parent
    try:
        command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise WrongInput("commit", "is not known, as this is no checkout; name it by --commit") from error
