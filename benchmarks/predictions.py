"""Time and memory of an audit of a large file of saved predictions, by the command line in a process of its own.

The file holds the answers of a model and of in-out shadow models for the same rows, uncompressed. Memory is counted
beside the file: pages that the process owns (RssAnon), sampled every 50 ms, and the largest resident set (VmHWM).

Run it with: python benchmarks/predictions.py [--rows N] [--classes K] [--shadows S] [--attack NAMES] [--keep FOLDER]
    [--archive FILE]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

import archive

AT_ONCE = 50_000
LIMITS = {"seconds": 60.0, "GiB": 2.0}


def answers(rows: int, labels: np.ndarray, inside: np.ndarray, seed: int, classes: int) -> Iterator[np.ndarray]:
    """Yield probabilities, some rows at a time: members are a little surer of their label."""
    rng = np.random.default_rng(seed)
    for start in range(0, rows, AT_ONCE):
        part = slice(start, min(start + AT_ONCE, rows))
        logits = rng.normal(0, 1.5, (part.stop - start, classes)).astype(np.float32)
        logits[np.arange(len(logits)), labels[part]] += 4 + inside[part]
        weights = np.exp(logits)
        yield weights / weights.sum(1, keepdims=True)


def store(archive: zipfile.ZipFile, name: str, shape: tuple[int, ...], parts: Iterator[np.ndarray]) -> None:
    """Write an array of float32 into an .npz, part by part."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(stream, header)
        for part in parts:
            stream.write(part.tobytes())


def write_file(path: Path, rows: int, classes: int, shadows: int) -> None:
    """Write the file of predictions."""
    rng = np.random.default_rng(0)
    labels, members = rng.integers(0, classes, rows), rng.random(rows) < 0.5
    inside = np.stack([rng.permutation(shadows) < shadows // 2 for _ in range(1000)])[rng.integers(0, 1000, rows)].T
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in {"labels": labels, "membership": members, "shadow_membership": inside}.items():
            with archive.open(f"{name}.npy", "w") as stream:
                np.lib.format.write_array(stream, np.ascontiguousarray(array))
        store(archive, "probabilities", (rows, classes), answers(rows, labels, members, 1, classes))

        def of_shadows() -> Iterator[np.ndarray]:
            for shadow in range(shadows):
                yield from answers(rows, labels, inside[shadow], 2 + shadow, classes)

        store(archive, "shadow_probabilities", (shadows, rows, classes), of_shadows())


def measure(command: list[str]) -> tuple[float, float, float, float]:
    """Return seconds, CPU seconds, GiB beside the file and the largest resident GiB of a process."""
    start, beside, resident = time.perf_counter(), 0, 0
    process = subprocess.Popen(command)
    while process.poll() is None:
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except (FileNotFoundError, ProcessLookupError):
            break
        sizes = {name: int(size) for name, size in re.findall(r"^(\w+):\s+(\d+) kB", status, re.MULTILINE)}
        beside, resident = max(beside, sizes.get("RssAnon", 0)), max(resident, sizes.get("VmHWM", 0))
        time.sleep(0.05)
    if process.wait():
        raise SystemExit(f"the audit ended with {process.returncode}")
    times = os.times()
    return time.perf_counter() - start, times.children_user + times.children_system, beside / 2**20, resident / 2**20


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--shadows", type=int, default=4)
    parser.add_argument("--attack", default="conf,mentr,lira,rmia")
    parser.add_argument("--keep", type=Path, help="folder of the file, which is kept and used again")
    archive.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = (options.keep or Path(scratch)) / f"{options.rows}-{options.classes}-{options.shadows}.npz"
        if not path.exists():
            print(f"writing {path} ...", file=sys.stderr, flush=True)
            write_file(path, options.rows, options.classes, options.shadows)
        flags = ["--predictions", str(path), "--attack", options.attack, "--out", f"{scratch}/run"]
        seconds, cpu, beside, resident = measure([sys.executable, "-m", "secateur", "audit", *flags])
    size = f"{options.rows} rows x {options.classes} classes, {options.shadows} shadows, {options.attack}"
    print(f"{size}: {seconds:.0f} s ({cpu:.0f} CPU seconds), {beside:.2f} GiB beside the file, {resident:.2f} with it")
    met = "met" if seconds <= LIMITS["seconds"] and beside <= LIMITS["GiB"] else "missed"
    print(f"target: {LIMITS['seconds']:.0f} s and {LIMITS['GiB']:.0f} GiB beside the file, {met}")
    numbers = {"cpu_seconds": cpu, "seconds": seconds, "GiB_beside_the_file": beside, "GiB_with_it": resident}
    archive.write(options.archive, [{"case": f"{options.rows} rows of {options.classes} classes"} | numbers])


if __name__ == "__main__":
    main()
