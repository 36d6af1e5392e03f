"""What engines cost on the same work, from few clients to many: in process, Flower's simulation, deployed; and a peer.

Every client takes part in every round, with one local step of batch 8 of the digits network: so it is the engine that
is measured, and not the training. In process and simulated: wall seconds of the first round (in which a simulation
starts its workers and greets its nodes) and of a later one, CPU seconds of the server's process in a later round, and
its highest memory. The simulation's workers are Ray's and not counted. Deployed: benchmarks/deployed.py. On paper:
bytes, time and the server's memory for a million clients. `--many` measures federations of which ten clients a round
take part, with residuals: seconds to the end of the first round, and memory after rounds 10 and 200. `--peer` measures
rounds of one federation here and in pfl-research, turns alternating (benchmarks/pfl_peer.py).

    python benchmarks/flower.py [--clients 10 100 1000] [--engines here flower] [--peer] [--json FILE] [--archive FILE]
    python benchmarks/flower.py --clients --nodes 2 4 8 [--tree]
    python benchmarks/flower.py --clients --many 1000 10000 100000
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTINGS = ["--model", "digits-cnn", "--local-steps", "1", "--batch-size", "8", "--evaluate-every", "1000000"]
MANY = ["--model", "mlp", "--partition", "shared", "--defense", "top-k+error-feedback", "--per-round", "10"]
PEER = Path(__file__).with_name("pfl_peer.py")


def measured(engine: str, clients: int, rounds: int) -> dict[str, Any]:
    """One federation in a process of its own."""
    announce(f"{rounds} rounds of {clients} clients, engine {engine}")
    with tempfile.TemporaryDirectory() as folder:
        begun = time.monotonic()
        found = _line([__file__, "--one", engine, str(clients), str(rounds), folder])
        whole = time.monotonic() - begun
    return {"engine": engine, "clients": clients, "rounds": rounds, "whole_seconds": whole} | found


def many(clients: int) -> dict[str, Any]:
    """Ten clients a round out of so many, in a process of its own."""
    announce(f"200 rounds of 10 out of {clients} clients")
    with tempfile.TemporaryDirectory() as folder:
        return {"engine": "here", "clients": clients} | _line([__file__, "--one", "many", str(clients), "200", folder])


def resident() -> float:
    """Memory of this process in MiB, without files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("RssAnon"))) / 1024


def announce(work: str) -> None:
    """Say what is measured next."""
    print(f"measuring {work} ...", file=sys.stderr, flush=True)


def _line(command: list[str]) -> dict[str, Any]:
    """What a script prints last."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def one(engine: str, clients: int, rounds: int, folder: Path) -> None:
    """A federation, and a line of what it cost."""
    started = time.monotonic()
    from secateur.federated.federation import Federation
    from secateur.federated.traffic import Round

    spent: list[tuple[float, float]] = []
    memory: list[float] = []
    start: list[tuple[float, float]] = []  # seconds to the end of each round, of the clock and of the CPU
    plain = Federation.rounds

    def timed(self: Federation) -> Iterator[Round]:
        rest = plain(self)
        while True:
            begun = time.monotonic(), time.process_time()
            done = next(rest, None)
            if done is None:
                return
            spent.append((time.monotonic() - begun[0], time.process_time() - begun[1]))
            memory.append(resident())
            start.append((time.monotonic() - started, time.process_time()))
            yield done

    Federation.rounds = timed  # type: ignore[method-assign]
    from secateur.cli import main
    from secateur.runs.folder import load_rows

    counts = ["--rounds", str(rounds), "--clients", str(clients)]
    counts += MANY if engine == "many" else ["--per-round", str(clients), "--engine", engine]
    sys.stdout = sys.stderr
    if main(["federate", *SETTINGS, *counts, "--out", str(folder / "run")]):
        raise SystemExit(1)
    if engine == "many":
        (wall, cpu), (_, later), (_, last) = start[0], start[9], start[-1]
        found = {"start_seconds": wall, "start_cpu_seconds": cpu, "round_cpu_ms": 1e3 * (last - later) / (rounds - 10)}
        found |= {"MiB_at_round_10": memory[9], f"MiB_at_round_{rounds}": memory[-1], "ratio": memory[-1] / memory[9]}
        print(json.dumps(found), file=sys.__stdout__)
        return
    rows = load_rows(folder / "run")
    up = next(row.value for row in rows if row.metric == "bytes_up" and row.extra["client"] is None)
    wall, cpu = (min(each) for each in zip(*(spent[1:] or spent), strict=True))
    found = {"first_round_seconds": spent[0][0], "round_seconds": wall, "server_cpu_seconds": cpu}
    found |= {"server_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
    print(json.dumps(found | {"bytes_up_per_client_round": up / (clients * rounds)}), file=sys.__stdout__)


def on_paper(fewer: dict[str, Any], more: dict[str, Any], clients: int) -> dict[str, Any]:
    """A round of so many clients, if all grew on as it did between these two."""

    def grown(name: str) -> float:
        slope = (more[name] - fewer[name]) / max(1, more["clients"] - fewer["clients"])
        return float(more[name] + slope * (clients - more["clients"]))

    return {
        "engine": f"{more['engine']}, on paper",
        "clients": clients,
        "GB_up_a_round": more["bytes_up_per_client_round"] * clients / 1e9,
        "hours_a_round": grown("round_seconds") / 3600,
        "server_GiB": grown("server_MiB") / 1024,
    }


def arguments() -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[10, 100])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", nargs="+", default=["here", "flower"])
    parser.add_argument("--nodes", type=int, nargs="*", default=[], help="numbers of supernodes to deploy")
    parser.add_argument("--tree", action="store_true", help="supernodes share an interpreter")
    parser.add_argument("--many", type=int, nargs="*", default=[], help="numbers of clients, ten a round")
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--peer-folder", help="where the peer's packages are or go")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--archive", type=Path, help="write the measured numbers as rows: NAME.jsonl.xz")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


def rows_of(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Everything that was asked for, as it is measured."""
    found: dict[str, list[dict[str, Any]]] = {engine: [] for engine in given.engines}
    for clients in given.clients:
        for engine in given.engines:
            found[engine].append(measured(engine, clients, given.rounds))
            yield found[engine][-1]
    yield from (on_paper(*rows[-2:], 10**6) for rows in found.values() if len(rows) > 1)
    yield from map(many, given.many)
    if given.nodes:
        from deployed import deployed

        for nodes in given.nodes:
            announce(f"{given.rounds + 1} rounds deployed to {nodes} supernodes")
            yield deployed(nodes, given.rounds + 1, given.tree)
    if given.peer:
        folder = [] if given.peer_folder is None else ["--folder", given.peer_folder]
        for work, clients in (("mapp", 10), *(("digits", clients) for clients in given.clients)):
            announce(f"pfl-research on {work}, {clients} clients")
            yield _line([str(PEER), "--work", work, "--clients", str(clients), *folder])


def main() -> None:
    """Measure and print."""
    given = arguments()
    if given.one:
        engine, clients, rounds, folder = given.one
        one(engine, int(clients), int(rounds), Path(folder))
        return
    rows = []
    for row in rows_of(given):
        parts = (
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()
        )
        print(", ".join(parts), flush=True)
        rows.append(row)
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=2))
    if given.archive is not None:
        from archive import write  # here, as it imports torch, which a federation's own process times

        write(given.archive, [row for row in rows if "on paper" not in row.get("engine", "")])


if __name__ == "__main__":
    main()
