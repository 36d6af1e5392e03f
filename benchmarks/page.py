"""Pages of many rows: seconds, bytes and memory. `python benchmarks/page.py [--rows N] [--runs N] [--archive FILE]`.

The rows are those of an audit of many models, under ten attacks and five seeds, with a ROC curve for each attack. The
runs are copies of one small audit, each in a folder of its own.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import archive
from secateur.report.page import write_page
from secateur.runs.folder import open_run
from secateur.runs.rows import Row

ATTACKS = ("conf", "xent", "mentr", "top1-conf", "nn", "top3-nn", "nncls", "blindmi", "samia", "lira")
PRUNERS = ("l1-unstructured", "l1-structured", "snip", "grasp", "synflow")
MEASURES = ("auc", "tpr_at_fpr_0.01", "tpr_at_fpr_0.001", "balanced_accuracy", "attack_accuracy", "advantage")


def list_models(seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the labels of ever more models, each of all seeds."""
    number = 0
    while True:
        compression = {"pruner": PRUNERS[number % len(PRUNERS)], "sparsity": number % 97 / 100}
        for seed in range(seeds):
            names = {"model": "digits-cnn", "dataset": "digits", "adaptive": False, "seed": seed}
            yield names | compression | {"defense": f"dp:sigma={number}"}
        number += 1


def write_run(folder: Path, count: int, seeds: int = 5) -> None:
    """Write the folder of an audit with so many rows."""
    draw, rows, figures = np.random.default_rng(0), [], []
    for labels in list_models(seeds):
        accuracy = float(draw.random())
        for metric in ("test_accuracy", "train_accuracy", "confidence_gap", "bytes_masked"):
            rows.append(Row(**labels, metric=metric, value=accuracy, low=accuracy, high=accuracy))
        for attack in ATTACKS:
            auc = float(draw.uniform(0.5, 0.9))
            rows += [
                Row(**labels, attack=attack, metric=m, value=auc, low=auc - 0.03, high=auc + 0.03) for m in MEASURES
            ]
            rates = {"fpr": [i / 60 for i in range(61)], "tpr": [(i / 60) ** (1.5 - auc) for i in range(61)]}
            figures.append({"kind": "roc", "attack": attack} | labels | rates)
        if len(rows) >= count:
            break
    with open_run(folder, "audit", {"model": "digits-cnn"}, seeds=range(seeds)) as run:
        run.add(rows[:count])
        run.show(figures)


def measure(folders: Sequence[Path], out: Path, what: str) -> dict[str, Any]:
    """Write one page, print and return what it took."""
    begun, used = time.perf_counter(), time.process_time()
    size = write_page(folders, out).stat().st_size
    wall, processor = time.perf_counter() - begun, time.process_time() - used
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {wall:.1f} s ({processor:.1f} s of the processor), {size / 2**20:.2f} MiB, peak {peak:.2f} GiB")
    return {"case": what, "cpu_seconds": processor, "seconds": wall, "page_MiB": size / 2**20, "peak_GiB": peak}


def main() -> None:
    """Measure a page of many rows, and a page of many runs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1000)
    archive.add_option(parser)
    options, numbers = parser.parse_args(), []
    with tempfile.TemporaryDirectory() as place:
        if options.rows:
            write_run(Path(place, "rows"), options.rows)
            numbers.append(measure([Path(place, "rows")], Path(place, "rows.html"), f"{options.rows} rows"))
        if options.runs:
            write_run(Path(place, "run-0"), 500, seeds=1)
            folders = [Path(place, f"run-{number}") for number in range(options.runs)]
            for folder in folders[1:]:
                shutil.copytree(folders[0], folder)
            numbers.append(measure(folders, Path(place, "runs.html"), f"{options.runs} runs of 500 rows"))
    archive.write(options.archive, numbers)


if __name__ == "__main__":
    main()
