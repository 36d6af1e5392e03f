"""Archive of a benchmark: its numbers as rows, with command, commit, machine and load (results/rows).

python benchmarks/startup.py --archive results/rows/bench-startup.jsonl.xz
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from secateur.runs.archive import find_commit, write_archive
from secateur.runs.rows import Row

LABELS = ("engine", "clients", "case", "work", "execution", "auto", "limit")  # beside the model; all others are numbers


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option that names the archive."""
    parser.add_argument("--archive", type=Path, help="write the numbers as rows: NAME.jsonl.xz")


def write(path: Path | None, numbers: Iterable[Mapping[str, Any]], device: str = "cpu") -> None:
    """Write an archive if one is named.

    Args:
        path: the file, or None.
        numbers: one mapping a measured case: labels and numbers by name; a mapping inside has numbers by name too.
        device: that on which the numbers were measured.
    """
    if path is None:
        return
    machine = torch.cuda.get_device_name() if device == "cuda" else _name_processor()
    provenance = {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "commit": find_commit(),
        "machine": f"{machine}, {os.cpu_count()} cores, torch {torch.__version__}",
        "load": f"{os.getloadavg()[2]:.1f} (average of 15 minutes, at the end)",
        "date": time.strftime("%Y-%m-%d"),
        "seeds": [0],
    }
    write_archive(path, [row for case in numbers for row in make_rows(case)], provenance)


def make_rows(case: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each number of a case."""
    labels = {"model": str(case.get("model", "")), "dataset": "", "seed": 0, "timing": True}
    extra = {name: case[name] for name in LABELS if name in case}
    for name, value in case.items():
        values = value if isinstance(value, Mapping) else {"": value}
        for part, number in values.items():
            if name not in LABELS and isinstance(number, (int, float)):
                metric = "_".join(filter(None, (str(part), name))).replace(" ", "_")
                yield Row(**labels, metric=metric, value=float(number), extra=dict(extra))


def _name_processor() -> str:
    """Return the name of the processor without its number."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return " ".join(names[0].split()[:2]) if names else platform.machine()
