"""What engines cost on the same work: in process and Flower's simulation, from few clients to many.

Every client takes part in every round, with one local step of batch 8 of the digits network: so it is the engine that
is measured, and not the training. Of both: wall seconds of the first round and of a later one, CPU seconds of the
server a client and round, and the highest memory of its process. On paper: bytes, time and the server's memory for a
million clients. The processes of the simulation's clients are Ray's and are not counted.

    python benchmarks/flower.py [--clients 10 100] [--rounds 3] [--engines here flower] [--json FILE]
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", OMP_WAIT_POLICY="PASSIVE")

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SETTINGS = ["--model", "digits-cnn", "--local-steps", "1", "--batch-size", "8", "--evaluate-every", "1000000"]


def measured(engine: str, clients: int, rounds: int) -> dict[str, Any]:
    """One federation in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--one", engine, str(clients), str(rounds), folder]
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        whole, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row = {"engine": engine, "clients": clients, "rounds": rounds, "whole_seconds": whole} | found
    return row | {"server_cpu_ms_per_client_round": 1e3 * spent / (clients * rounds)}


def one(engine: str, clients: int, rounds: int, folder: Path) -> None:
    """A federation, and a line of what it cost."""
    from secateur.federated.federation import Federation

    seconds: list[float] = []
    plain = Federation._round

    def timed(self: Federation, number: int) -> Any:
        begun = time.monotonic()
        done = plain(self, number)
        seconds.append(time.monotonic() - begun)
        return done

    Federation._round = timed  # type: ignore[method-assign]
    from secateur.cli import main

    counts = ["--rounds", str(rounds), "--clients", str(clients), "--per-round", str(clients), "--engine", engine]
    sys.stdout = sys.stderr
    if main(["federate", *SETTINGS, *counts, "--out", str(folder / "run")]):
        raise SystemExit(1)
    rows = [json.loads(line) for line in (folder / "run" / "results.jsonl").read_text().splitlines()]
    up = next(row["value"] for row in rows if row["metric"] == "bytes_up" and row["client"] is None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {"first_round_seconds": seconds[0], "round_seconds": min(seconds[1:] or seconds), "server_MiB": peak}
    print(json.dumps(found | {"bytes_up_per_client_round": up / (clients * rounds)}), file=sys.__stdout__)


def on_paper(row: dict[str, Any], clients: int) -> dict[str, Any]:
    """A round of so many clients by what one costs: bytes grow with them, the server's memory does not."""
    return {
        "clients": clients,
        "GB_up_a_round": row["bytes_up_per_client_round"] * clients / 1e9,
        "hours_a_round": row["round_seconds"] / row["clients"] * clients / 3600,
        "server_MiB": row["server_MiB"],
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["here", "flower"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        engine, clients, rounds, folder = given.one
        one(engine, int(clients), int(rounds), Path(folder))
        return
    rows = [measured(engine, clients, given.rounds) for clients in given.clients for engine in given.engines]
    rows += [{"engine": f"{row['engine']}, on paper"} | on_paper(row, 10**6) for row in rows[-len(given.engines) :]]
    for row in rows:
        parts = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print(", ".join(parts))
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
