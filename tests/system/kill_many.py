"""Small runs killed many times, each compared with one that was never killed: `python kill_many.py KILLS [JOB ...]`.

A process that has done its imports forks, and the fork runs the command. It is killed by one of three means: after a
random time; before or after a random call that touches the disk; or, as a process of its own, while it starts. The
next start goes on in the same folder. A run that gets through must have the rows of an uninterrupted one.
"""

import argparse
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from secateur.attacks.inversion import optimisation
from secateur.cli import main
from secateur.federated import checkpoint
from secateur.runs import unfinished
from secateur.runs.folder import load_rows
from secateur.runs.rows import select_comparable

JOBS = {
    "audit": "audit --model mlp --shadows 1 --pruner l1-unstructured --sparsity .5 --attack conf"
    " --set train.epochs=2 --set finetune.epochs=1",
    "invert": "invert --attack ig:iterations=30:tv=.001 --targets 2 --set together=1",
    "federate": "federate --model conv-1 --rounds 5 --clients 4 --per-round 2 --local-steps 1 --batch-size 4"
    " --base-pruning random --defense pseudo-largest",
    "submodels": "federate --submodels fdropout --rounds 4 --clients 4 --partition iid --batch-size 32"
    " --attack yeom --set examples=120",
    "recommend": "recommend --model mlp --pruner l1-unstructured --sparsity .5,.9 --defense basic,ppb --shadows 1"
    " --candidates 3 --finalists 2 --attack conf --set train.epochs=2 --set finetune.epochs=1 --set examples=300",
}
SWEEP = "jobs:\n  a: {job: audit, model: mlp, shadows: 1, attack: conf, sparsity: [.5], seeds: 2, train: {epochs: 2}}\n"
SWEEP += "  b: {job: invert, attack: 'ig:iterations=30:tv=.001', targets: 1}\n"
MEANS = ("clock",) * 6 + ("disk",) * 5 + ("start",)


def run(arguments: list[str], fatal: int | None = None, modules: "multiprocessing.Queue | None" = None) -> None:
    """Run a command in this process, silently; die before or after the call number `fatal` that touches the disk.

    The names of the modules that it imported go to `modules`.
    """
    checkpoint.EVERY = 0.05
    unfinished.EVERY = optimisation.SAVE_SECONDS = 0.05
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    calls = 0

    def dying(act):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if fatal is not None and calls == abs(fatal):
                if fatal < 0:
                    act(*arguments, **options)
                os.kill(os.getpid(), signal.SIGKILL)
            return act(*arguments, **options)

        return call

    os.fsync, os.replace, os.open = dying(os.fsync), dying(os.replace), dying(os.open)
    code = main(arguments)
    if modules is not None:
        modules.put(sorted(sys.modules))
        modules.close()
        modules.join_thread()
    os._exit(code)


def start(arguments: list[str], means: str, moments: random.Random) -> "multiprocessing.Process | subprocess.Popen":
    """Start a command that is to be killed."""
    if means == "start":
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        return subprocess.Popen([sys.executable, "-m", "secateur", *arguments], **quiet)
    fatal = moments.randint(1, 60) * moments.choice((1, -1)) if means == "disk" else None
    process = multiprocessing.get_context("fork").Process(target=run, args=(arguments, fatal))
    process.start()
    return process


def run_whole(arguments: list[str]) -> float:
    """Run a command without a kill, and import its modules here, so that later forks begin at once; return seconds."""
    context = multiprocessing.get_context("fork")
    names = context.Queue()
    process = context.Process(target=run, args=(arguments, None, names))
    process.start()
    for name in names.get(timeout=900):
        if name not in sys.modules and not name.startswith("__"):
            with suppress(Exception):  # some import only in their own order
                importlib.import_module(name)
    process.join()
    assert process.exitcode == 0, f"the uninterrupted run ended with {process.exitcode}"
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as again:
        end_of(start([*arguments[:-1], again], "clock", random.Random(0)), 600)
    return time.perf_counter() - begun


def end_of(process: "multiprocessing.Process | subprocess.Popen", seconds: float) -> int:
    """Wait so long for a process, then kill it; return its exit code."""
    if isinstance(process, subprocess.Popen):
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
    return process.exitcode


def kill_many(name: str, arguments: list[str], kills: int, seed: int, place: Path, means: tuple[str, ...]) -> Counter:
    """Kill a run so many times; AssertionError where a resumed run differs from an uninterrupted one."""
    moments, counts, whole, folder = random.Random(f"{seed}/{name}"), Counter(), place / "whole", place / "killed"
    if name in JOBS:
        seconds = run_whole([*arguments, "--out", str(whole)])
    else:
        begun = time.perf_counter()
        assert end_of(start([*arguments, "--out", str(whole)], "start", moments), 600) == 0
        seconds = time.perf_counter() - begun
    rows = select_comparable(load_rows(whole))
    while counts["kills"] < kills:
        way = moments.choice(means)
        limit = 600 if way == "disk" else moments.uniform(0, seconds + (6 if way == "start" and len(means) > 1 else 0))
        code = end_of(start([*arguments, "--out", str(folder)], way, moments), limit)
        assert code in (0, -signal.SIGKILL), f"{name}: ended with {code} after {dict(counts)}"
        if code:
            counts["kills"] += 1
            counts[way] += 1
            if counts["kills"] % 50 == 0:
                print(f"{name}: {dict(counts)}", file=sys.stderr, flush=True)
            if (folder / "run.json").exists():
                load_rows(folder)  # readable at any moment
                counts["resumable"] += 1
        if not code or counts["kills"] == kills:
            if code:
                calm = "clock" if name in JOBS else "start"  # Ray does not start in a fork
                code = end_of(start([*arguments, "--out", str(folder)], calm, moments), 600)
            assert code == 0 and select_comparable(load_rows(folder)) == rows, f"{name}: other rows {dict(counts)}"
            assert not [path for path in folder.rglob("*") if path.name.endswith(".tmp")]
            recipes = [(one / "recipe.yaml").read_bytes() for one in (whole, folder) if name == "recommend"]
            assert len(set(recipes)) < 2, f"{name}: another recipe {dict(counts)}"
            counts["compared"] += 1
            shutil.rmtree(folder)
    return counts


def main_script() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int, help="of each job")
    parser.add_argument("jobs", nargs="*", help=f"by default {', '.join(JOBS)}; sweep needs Ray")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in options.jobs or JOBS:
        with tempfile.TemporaryDirectory(prefix="kill-") as place:
            (Path(place) / "sweep.yaml").write_text(SWEEP)
            arguments = JOBS.get(name, f"sweep {place}/sweep.yaml").split()
            means = MEANS if name in JOBS else ("start",)
            begun = time.perf_counter()
            counts = kill_many(name, arguments, options.kills, options.seed, Path(place), means)
            print(json.dumps({"job": name, **counts, "seconds": round(time.perf_counter() - begun)}), flush=True)


if __name__ == "__main__":
    main_script()
