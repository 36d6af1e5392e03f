"""Cost of deterministic training on a GPU, and whether two runs of one seed are equal bit for bit.

Every run is a process of its own, as an audit is. It trains the six models of an audit (a victim and five shadows)
by `fit_many` on random pictures. The cost is the time of all epochs after the first, in which graphs are captured, and
of the whole training. Deterministic training is the default of audits if it costs less than 20 %.

    python benchmarks/deterministic.py [--device cpu|cuda] [--repeats 3] [--json FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
MODELS, SHAPE, AT_MOST = 6, (3, 32, 32), 1.2
NETWORKS = {"cuda": ("resnet18-w16", "resnet18-pool", "vgg16-bn"), "cpu": ("resnet18-w16",)}
EXECUTIONS = ("auto", "sequential", "stacked")
NO_FORM = "does not have a deterministic implementation"  # torch's warning


def train(name: str, device: str, execution: str, exact: bool, size: int, epochs: int) -> Row:
    """Train six models; return the seconds of the training and of its later epochs, and a digest of all weights."""
    import torch

    from secateur import tree
    from secateur.gpu.determinism import deterministic
    from secateur.interfaces import Batch
    from secateur.models.create import create
    from secateur.training.recipe import Recipe, Task
    from secateur.training.trainer import fit_many

    torch.set_num_threads(1)

    def draw(seed: int, rows: int) -> Batch:
        rng = torch.Generator().manual_seed(seed)
        return Batch(torch.randn(rows, *SHAPE, generator=rng), torch.randint(10, (rows,), generator=rng)).to(device)

    def task(seed: int) -> Task:
        net = create(name, SHAPE, 10, torch.Generator().manual_seed(seed)).to(device)
        rng = torch.Generator().manual_seed(100 + seed)
        return Task(tree.state_of(net), draw(seed, size), draw(50 + seed, size // 8), rng)

    net = create(name, SHAPE, 10, torch.Generator().manual_seed(0))
    ends: list[float] = []
    with deterministic(exact):
        tasks, start = [task(seed) for seed in range(MODELS)], time.perf_counter()
        recipe = Recipe(epochs=epochs, patience=None)
        fitted = dict(
            fit_many(
                net, tasks, recipe, execution=execution, progress=lambda index, row: ends.append(time.perf_counter())
            )
        )
    digest = hashlib.sha256()
    for _, model in sorted(fitted.items()):
        for value in model.state.values():
            digest.update(value.cpu().contiguous().numpy().tobytes())
    together = device == "cuda"  # on a CPU one model follows the other
    later = ends[-1] - (ends[MODELS - 1] if together else start)
    return {"seconds": ends[-1] - start, "later": later, "digest": digest.hexdigest()[:16]}


def run(name: str, device: str, execution: str, exact: bool, size: int, epochs: int) -> Row:
    """Train in a process of its own."""
    here = [sys.executable, __file__, "--device", device, "--size", str(size), "--epochs", str(epochs)]
    command = [*here, "--train", name, "--execution", execution, *(["--exact"] if exact else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    if done.returncode:
        return {"fault": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no output"}
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    warnings = [line for line in done.stderr.splitlines() if NO_FORM in line]
    return row | {"without": sorted({line.split(f" {NO_FORM}")[0].split()[-1] for line in warnings})}


def compare(name: str, device: str, execution: str, repeats: int, size: int, epochs: int) -> Row:
    """Return the times with and without, runs of both interleaved, and how many digests there were."""
    results: dict[bool, list[Row]] = {False: [], True: []}
    for _ in range(repeats):
        for exact, rows in results.items():
            rows.append(run(name, device, execution, exact, size, epochs))
    faults = [row["fault"] for rows in results.values() for row in rows if "fault" in row]
    if faults:
        return {"model": name, "execution": execution, "fault": faults[0]}
    row: Row = {"model": name, "execution": execution}
    for part in ("later", "seconds"):
        plain, exact = (median(run[part] for run in results[mode]) for mode in (False, True))
        row |= {part: {"plain": plain, "deterministic": exact, "ratio": exact / plain}}
    row["different"] = {mode: len({run["digest"] for run in rows}) for mode, rows in _named(results).items()}
    return row | {"without": results[True][0]["without"], "met": row["later"]["ratio"] < AT_MOST}


def _named(results: dict[bool, list[Row]]) -> dict[str, list[Row]]:
    return {"plain": results[False], "deterministic": results[True]}


def main() -> None:
    """Measure, print, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--size", type=int, default=5120, help="Training rows of a model.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--networks", default="", help="Comma-separated; by default some of each kind.")
    parser.add_argument("--executions", default=",".join(EXECUTIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--execution", default="auto", help=argparse.SUPPRESS)
    parser.add_argument("--exact", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        row = train(options.train, options.device, options.execution, options.exact, options.size, options.epochs)
        print(json.dumps(row))
        return
    rows = []
    for name in options.networks.split(",") if options.networks else NETWORKS[options.device]:
        for execution in options.executions.split(","):
            row = compare(name, options.device, execution, options.repeats, options.size, options.epochs)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"machine": platform.machine(), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
