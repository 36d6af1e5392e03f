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
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from secateur.errors import WrongInput, printable
from secateur.runs.artifacts import SCHEMA, write
from secateur.runs.folder import DAMAGE, load_config, load_figures, load_marker, load_rows
from secateur.runs.rows import Groups, Row, pack

T = TypeVar("T")

SUFFIX = ".jsonl.xz"
MOST_BYTES = 2**27  # of the lines of an archive; as rows they take up to 20 times as much memory
FREE_BYTES = 2**20  # of the lines of any archive
MOST_RATIO = 50  # of the lines to the file, where the lines are longer; those of studies have 10 to 15
MOST_MEMORY = 2**27  # of the decompressor; the strongest preset needs half
MOST_TEXT = 20_000  # characters of the provenance
KEPT = ("histogram", "classes")  # kinds of figures
PATHS = re.compile(r"(--(?:data-folder|out)[ =])(\"[^\"]*\"|'[^']*'|\S+)")
FOLDERS = re.compile(r"(?<![\w.:/])(?:/[^\s/'\"]+)+/")  # of absolute paths, which say where somebody works


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
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
    content = lzma.compress(text, preset=9)
    if len(text) > _most_text(content):
        raise _too_long(path, content)
    write(path, content)


def read_archive(path: Path) -> Archive:
    """Return the content of a file of `write_archive`; refuse another file, and one that decompresses to too much."""
    try:
        if not path.is_file():
            raise WrongInput("rows", f"{path} is no file; name an archive of rows")
        with path.open("rb") as file:
            return _parse(_decompress(path, file.read(MOST_BYTES)))
    except OSError as error:
        raise WrongInput("rows", f"{path} cannot be read ({error.strerror}); name an archive of rows") from error
    except (lzma.LZMAError, EOFError, *DAMAGE) as error:
        problem = printable(f"{path} is no archive of rows ({error})")
        raise WrongInput("rows", f"{problem}; write it by secateur report RUN --rows FILE{SUFFIX}") from error


def _parse(text: bytes) -> Archive:
    """Return the content of an archive's lines; a line that nobody writes ends it before the next takes memory."""
    lines = map(json.loads, BytesIO(text))
    first = next(lines, {"provenance": None})
    if isinstance(schema := first.get("schema"), int) and schema > SCHEMA:
        raise ValueError("a newer Secateur wrote it; upgrade first")
    provenance = first["provenance"]
    if not isinstance(provenance, dict) or len(json.dumps(provenance)) > MOST_TEXT:
        raise ValueError("its provenance is no short object")
    if not isinstance(provenance.get("studies", []), list):
        raise ValueError("its studies are no list")
    texts = {printable(name): printable(x) if isinstance(x, str) else x for name, x in provenance.items()}
    archive, groups = Archive(texts, [], []), Groups()
    for line in lines:
        if "figure" in line:
            if line["figure"]["kind"] not in KEPT:
                raise ValueError("it holds a figure of another kind")
            archive.figures.append(dict(line["figure"]))
        elif "schema" in line:
            groups.add(line)
        else:
            archive.rows.append(groups.expand(line))
    return archive


def _decompress(path: Path, content: bytes) -> bytes:
    """Return the decompressed bytes; refuse more than the bound before they are in memory."""
    decompressor = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MOST_MEMORY)
    text = decompressor.decompress(content, _most_text(content) + 1)
    if len(text) > _most_text(content):
        raise _too_long(path, content)
    if not decompressor.eof or decompressor.unused_data:
        raise ValueError("its end is missing, or something follows it")
    return text


def _most_text(content: bytes) -> int:
    """Return the most bytes of lines that a compressed file may hold."""
    return min(MOST_BYTES, max(FREE_BYTES, MOST_RATIO * len(content)))


def _too_long(path: Path, content: bytes) -> WrongInput:
    most = f"{_most_text(content) >> 20} MiB, the most of a file of {len(content):,} bytes"
    return WrongInput("rows", f"{path} decompresses to more than {most}; archive fewer runs at once")


def gather_runs(paths: Sequence[Path], studies: Sequence[str] = (), commit: str | None = None) -> Archive:
    """Return the rows of runs and archives together, with their provenance.

    Runs may overlap: rows and figures that an earlier one has to the last digit count once. The provenance says in how
    many measurements runs of studies differ: another data set, machine or version, or a GPU's rounding.

    Args:
        paths: folders of runs, or archives.
        studies: the studies whose tables the rows fill; by default those that the runs were.
        commit: the commit of the code of the runs; by default that of the checkout that runs now.
    """
    parts = [read_archive(path) if is_archive(path) else _load_run(path, commit) for path in paths]
    scales = _distinct(part.scale for part in parts)
    if len(scales) > 1:
        raise WrongInput("run", f"runs are of several scales ({', '.join(scales)}); archive them apart")
    provenance: dict[str, Any] = {"studies": [*studies] or _distinct(name for part in parts for name in part.studies)}
    for name in dict.fromkeys(name for part in parts for name in part.provenance if name != "studies"):
        values = [part.provenance[name] for part in parts if name in part.provenance]
        provenance[name] = "; ".join(_distinct(text for value in values for text in str(value).split("; ")))
    provenance["seeds"] = sorted({seed for part in parts for seed in part.provenance.get("seeds", [])})
    difference = _describe_differences([part.rows for part in parts if part.studies])
    if texts := _distinct([*str(provenance.get("differ", "")).split("; "), difference]):
        provenance["differ"] = "; ".join(texts)
    return Archive(provenance, _join(part.rows for part in parts), _join(part.figures for part in parts))


def _describe_differences(parts: Sequence[Sequence[Row]]) -> str:
    """Return in how many measurements runs differ that have them in common, and one of these; empty without any.

    Times may differ. What a run measured several times under the same labels is not told apart by them, and is left
    out.
    """
    known: dict[str, str] = {}
    differ: dict[str, str] = {}
    for values in map(_list_values, parts if len(parts) > 1 else ()):
        for name, value in values.items():
            if (before := known.setdefault(name, value)) != value:
                row = json.loads(name)
                label = f"{row['metric']} of {row['defense'] or row['model']}, seed {row['seed']}"
                differ.setdefault(name, printable(f"{label} ({before} and {value})"))
    return f"runs differ in {len(differ):,} measurements, such as {min(differ.values())}" if differ else ""


def _list_values(rows: Sequence[Row]) -> dict[str, str]:
    """Return the values of rows by their labels; of labels that one row alone has."""
    values: dict[str, list[str]] = {}
    for row in rows:
        if not row.timing:
            name = json.dumps(replace(row, value=None, low=None, high=None, note=None).to_json(), sort_keys=True)
            values.setdefault(name, []).append(json.dumps(row.to_json().get("value")))
    return {name: same[0] for name, same in values.items() if len(same) == 1}


def _join(parts: Iterable[Sequence[T]]) -> list[T]:
    """Return what the parts hold; what an earlier part has is left out, and a row keeps the notes of all parts."""
    joined: list[T] = []
    places: dict[str, int] = {}  # of what earlier parts have
    for part in parts:
        new: dict[str, int] = {}
        for one in part:
            text = json.dumps(replace(one, note=None).to_json() if isinstance(one, Row) else one, sort_keys=True)
            if text not in places:
                new[text] = len(joined)
                joined.append(one)
            elif isinstance(known := joined[places[text]], Row) and isinstance(one, Row) and one.note:
                joined[places[text]] = replace(known, note=_join_distinct(known.note, one.note))
        places |= new
    return joined


def _join_distinct(one: str | None, other: str) -> str:
    """Return two notes as one, in which no part stands twice."""
    return "; ".join(_distinct([*(one or "").split("; "), *other.split("; ")]))


def _load_run(folder: Path, commit: str | None) -> Archive:
    """Return the rows of a run, also of one that was interrupted."""
    marker = load_marker(folder)
    command = FOLDERS.sub("", PATHS.sub(r"\1PATH", str(marker.get("command", ""))))
    text = f"{load_config(folder)}\n{command}"
    provenance = {
        "studies": _distinct([_word_after(r"^study:|reproduce", text)]),
        "scale": _word_after(r"^scale:|--scale", text),
        "command": command,
        "commit": commit or find_commit(),
        "seeds": marker.get("seeds", []),
        "machine": f"{marker.get('device')}, torch {marker.get('torch')}",
        "date": str(marker.get("finished") or marker.get("started"))[:10],
    }
    provenance |= {} if marker.get("finished") else {"unfinished": "a run was interrupted"}
    if not (rows := load_rows(folder)):
        raise WrongInput("run", f"{folder}: there are no results yet; finish the run first")
    return Archive(provenance, rows, load_figures(folder))


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
